"""The logger: a standard one, usable before anything, that knows its rank and logs one line per node."""

from __future__ import annotations

import inspect
import logging
import os
import sys

import pytest
import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.processes.logs import get_logger
from accel_core.processes.world import World
from accel_testing import run_ranks

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def lines(self):
        return [record.getMessage() for record in self.records]


def logger_with_records(name, level=logging.DEBUG):
    """A logger of this name at this level, and what it logs."""
    handler = Records()
    standard = logging.getLogger(name)
    standard.addHandler(handler)
    standard.setLevel(level)
    standard.propagate = False
    return get_logger(name), handler


@pytest.fixture
def logged(request):
    name = f"test_logs.{request.node.name}"
    logger, handler = logger_with_records(name)
    yield logger, handler
    logging.getLogger(name).removeHandler(handler)


@pytest.fixture
def place(monkeypatch):
    """Sets the launcher's variables."""

    def launched(*values):
        for name, value in zip(LAUNCHED, values, strict=True):
            monkeypatch.setenv(name, str(value))

    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return launched


def places(handler):
    return [(record.rank, record.local_rank, record.world_size) for record in handler.records]


def test_it_is_a_standard_logger(logged):
    """A standard logger."""
    logger, handler = logged
    assert isinstance(logger, logging.LoggerAdapter)
    assert logger.logger is logging.getLogger(logger.name)
    logger.debug("%s and %d", "one", 2)
    logger.log(25, "three")
    try:
        raise ValueError("four")
    except ValueError:
        logger.exception("failed")
    assert handler.lines == ["one and 2", "three", "failed"]
    assert [record.levelno for record in handler.records] == [logging.DEBUG, 25, logging.ERROR]
    assert str(handler.records[2].exc_info[1]) == "four"


def test_it_works_before_anything_exists_and_starts_nothing(logged, place):
    """Usable before anything."""
    logger, handler = logged
    logger.info("early")
    assert places(handler) == [(0, 0, 1)]
    assert not dist.is_initialized()


def test_nothing_global_is_configured():
    """No handler, no root level."""
    root = logging.getLogger()
    before = root.level, list(root.handlers), logging.root.manager.disable
    logger = get_logger("test_logs.plain", "debug")
    logger.info("nobody listens")
    assert (root.level, list(root.handlers), logging.root.manager.disable) == before
    assert not logger.logger.handlers
    assert logger.logger.propagate


@pytest.mark.parametrize("launched, lines", [
    ((0, 8, 0, 4), ["node", "[RANK 0] all"]),
    ((1, 8, 1, 4), ["[RANK 1] all"]),
    ((4, 8, 0, 4), ["node", "[RANK 4] all"]),
    ((7, 8, 3, 4), ["[RANK 7] all"]),
])  # fmt: skip
def test_one_line_per_node_unless_all_processes_are_asked_for(logged, place, launched, lines):
    """One line per node by default, from the place that the launcher gave."""
    place(*launched)
    logger, handler = logged
    logger.info("node")
    logger.info("all", main_process_only=False)
    assert handler.lines == lines
    assert set(places(handler)) == {(launched[0], launched[2], 8)}
    assert not dist.is_initialized()


def test_the_rank_is_in_the_record_beside_the_caller_s_own_attributes(logged, place):
    """Rank in the record."""
    place(4, 8, 0, 4)
    logger, handler = logged
    logger.warning("hm", extra={"epoch": 3, "world_size": "mine"})
    (record,) = handler.records
    assert (record.rank, record.local_rank, record.epoch, record.world_size) == (4, 0, 3, "mine")
    assert logging.Formatter("%(rank)s: %(message)s").format(record) == "4: hm"


def wrapped(logger):
    logger.info("through a helper", stacklevel=2)


def test_the_line_shown_is_the_caller_s(logged):
    logger, handler = logged
    here = inspect.currentframe().f_lineno
    logger.info("a")
    logger.info("b", main_process_only=False)
    logger.info("c", in_order=True)
    logger.warning_once("d")
    logger.log(logging.INFO, "e")
    assert [record.lineno - here for record in handler.records] == [1, 2, 3, 4, 5]
    assert {record.pathname for record in handler.records} == {__file__}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 counts the frames of logging itself")
def test_the_line_shown_through_a_helper_is_that_of_its_caller(logged):
    logger, handler = logged
    here = inspect.currentframe().f_lineno
    wrapped(logger)
    assert handler.records[0].lineno == here + 1


def test_a_message_that_is_no_text_and_has_percent_signs_is_left_to_logging(logged):
    logger, handler = logged
    logger.info(ValueError("100%"), main_process_only=False)
    logger.info("100%")
    logger.info("%s%%", 5, main_process_only=False)
    assert handler.lines == ["[RANK 0] 100%", "100%", "[RANK 0] 5%"]


def test_a_level_that_is_off_costs_neither_a_rank_nor_a_barrier(logged, monkeypatch):
    logger, handler = logged
    logger.logger.setLevel(logging.WARNING)
    monkeypatch.setattr("accel_core.processes.logs.read_place", None)
    logger.info("no", in_order=True)
    assert handler.records == []


def test_warning_once_logs_each_message_once(logged):
    logger, handler = logged
    logger.logger.setLevel(logging.ERROR)
    logger.warning_once("late")
    logger.logger.setLevel(logging.INFO)
    for _ in range(3):
        logger.warning_once("late")
        for argument in (1, 2, {"unhashable": []}):
            logger.warning_once("got %s", argument, main_process_only=False)
    assert handler.lines == ["late", "[RANK 0] got 1", "[RANK 0] got 2", "[RANK 0] got {'unhashable': []}"]
    assert {record.levelno for record in handler.records} == {logging.WARNING}


@pytest.mark.parametrize("given, expected", [("debug", 10), ("INFO", 20), (35, 35), ("NOTICE", 25)])
def test_the_level_may_be_a_name_in_either_case_or_a_number(given, expected, monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "ERROR")
    logging.addLevelName(25, "NOTICE")
    assert get_logger("test_logs.level", given).logger.level == expected


def test_the_environment_gives_the_level_where_the_code_gives_none(monkeypatch):
    name = "test_logs.environment"
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL", raising=False)
    assert get_logger(name).logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger(name).logger.level == logging.ERROR


@pytest.mark.parametrize(("level", "kind"), [("loud", ValueError), ("", ValueError), (1.5, TypeError)])
def test_an_unknown_level_is_refused(level, kind):
    with pytest.raises(kind, match=r"[Ll]evel"):
        get_logger("test_logs.refused", level)


def test_an_unknown_level_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="Unknown level: 'LOUD'"):
        get_logger("test_logs.refused")


def test_in_order_before_the_group_runs_says_what_to_do(logged, place):
    place(0, 2, 0, 2)
    with pytest.raises(
        WorldError, match=r"lets 2 processes wait for each other, but .* Create the Accelerator first, or log"
    ):
        logged[0].info("too early", in_order=True)


def log_on_all_ranks(path):
    logger, handler = logger_with_records("ranks")
    logger.info("before")
    world = World.current()
    logger.info("after")
    logger.info("all", main_process_only=False)
    with path.open("a", buffering=1) as file:
        logging.getLogger("ranks").addHandler(logging.StreamHandler(file))
        for turn in range(3):
            here = inspect.currentframe().f_lineno
            logger.warning("turn %d", turn, in_order=True)
            assert handler.records[-1].lineno == here + 1
        world.barrier()
    return handler.lines, places(handler)


def test_ranks_log_one_after_the_other_when_asked_to(tmp_path):
    """On real ranks: before a group runs, while it runs, and in order."""
    first, second = run_ranks(log_on_all_ranks, 2, tmp_path / "log")
    turns = [[f"[RANK {rank}] turn {turn}" for turn in range(3)] for rank in range(2)]
    assert first == (["before", "after", "[RANK 0] all", *turns[0]], [(0, 0, 2)] * 6)
    assert second == (["[RANK 1] all", *turns[1]], [(1, 1, 2)] * 4)
    assert (tmp_path / "log").read_text().splitlines() == [turns[rank][turn] for turn in range(3) for rank in range(2)]


def log_in_a_group_that_no_launcher_made(url):
    rank = int(os.environ["RANK"])
    for name in LAUNCHED:
        del os.environ[name]
    logger, handler = logger_with_records("ranks")
    logger.info("alone", main_process_only=False)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    logger.info("together", main_process_only=False)
    logger.info("once")
    dist.barrier()  # a group that is still being connected breaks where the other rank ends it
    dist.destroy_process_group()
    return handler.lines, places(handler)


def test_a_running_group_knows_better_than_the_environment(tmp_path):
    first, second = run_ranks(log_in_a_group_that_no_launcher_made, 2, f"file://{tmp_path}/store")
    assert first == (["[RANK 0] alone", "[RANK 0] together", "once"], [(0, 0, 1), (0, 0, 2), (0, 0, 2)])
    assert second == (["[RANK 0] alone", "[RANK 1] together"], [(0, 0, 1), (1, 1, 2)])

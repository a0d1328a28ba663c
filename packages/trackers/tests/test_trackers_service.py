"""What trackers of services share: the process is put back, and options are known or refused."""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import os
import sys
import threading

import pytest

from accel_trackers.process_guard import check_options, process_kept, shared_options, variables


def state():
    hooks = sys.excepthook, sys.exit, builtins.__import__
    levels = [logging.getLogger(name).level for name in ("asyncio", "urllib3")]
    return (*hooks, *levels, multiprocessing.get_start_method(allow_none=True))


def change():
    """As services do it."""
    imports = builtins.__import__
    sys.excepthook, sys.exit = print, print
    builtins.__import__ = lambda *arguments, **options: imports(*arguments, **options)
    for name in ("asyncio", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    multiprocessing.set_start_method("spawn", force=True)


def test_the_process_is_put_back_also_where_the_service_fails():
    before = state()
    with pytest.raises(OSError, match="no server"), process_kept():
        change()
        raise OSError("no server")
    assert state() == before


def test_what_the_user_wants_is_left():
    before = builtins.__import__
    try:
        with process_kept([(builtins, "__import__")]):
            change()
        assert builtins.__import__ is not before
        assert sys.exit is not print
    finally:
        builtins.__import__ = before


def test_the_output_is_put_back_on_request():
    before = sys.stderr
    try:
        for streams in (True, False):
            with process_kept(streams=streams):
                sys.stderr = other = sys.__stdout__
            assert sys.stderr is (before if streams else other)
    finally:
        sys.stderr = before


def test_services_that_start_at_the_same_time_go_back_to_what_was_before_the_first():
    before, changed, entered = state(), threading.Event(), threading.Event()

    def second():
        changed.wait(10)
        with process_kept():  # sees what the first has changed
            entered.set()
            first.join(10)

    def work():
        with process_kept():
            change()
            changed.set()
            entered.wait(10)

    first, other = threading.Thread(target=work), threading.Thread(target=second)
    for each in (first, other):
        each.start()
    for each in (first, other):
        each.join(10)
    assert state() == before


def test_variables_are_set_for_a_moment_where_the_user_has_not(monkeypatch):
    monkeypatch.setenv("MINE", "1")
    monkeypatch.delenv("OURS", raising=False)
    wanted = {"MINE": "2", "OURS": "2", "THEIRS": None}
    for override, mine in ((False, "1"), (True, "2")):
        with variables(wanted, override=override):
            assert (os.environ["MINE"], os.environ["OURS"], "THEIRS" in os.environ) == (mine, "2", False)
            os.environ["THEIRS"] = "set by the service"
        assert (os.environ["MINE"], "OURS" in os.environ, "THEIRS" in os.environ) == ("1", False, False)


def log_metric(name, value, timestamp=False, **others):
    """Of a service."""


def log_plot(name, rows, title=None):
    """Of a service too."""


def test_each_call_gets_the_options_that_it_knows():
    calls = {log_metric: ("name", "value"), log_plot: ("name", "rows")}
    assert shared_options({"timestamp": True, "title": "so"}, "mine", calls) == [{"timestamp": True}, {"title": "so"}]
    assert shared_options({}, "mine", calls) == [{}, {}]
    with pytest.raises(
        TypeError, match=r"'mine': \.\.\.} has 'others', 'value', which log_metric or log_plot does not"
    ):
        shared_options({"value": 1, "others": 2, "title": "so"}, "mine", calls)


def test_unknown_options_are_named_with_those_that_there_are():
    check_options({"a"}, {"a", "b"}, "init_kwargs", "init")
    with pytest.raises(TypeError, match=r"init_kwargs has 'c', which init does not have here: expected a, b\."):
        check_options({"c": 1}, {"a", "b"}, "init_kwargs", "init")

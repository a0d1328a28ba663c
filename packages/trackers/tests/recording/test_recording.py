"""Recording a run: who is told what, which run goes on, and that nothing which a tracker does reaches the training."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trackers_for_tests import (
    Listing,
    Older,
    Wrong,
    draws,
    give_nothing_usable,
    give_what_no_file_holds,
    opened_at_the_end,
)

from accel_core import (
    Accelerator,
    GeneralTracker,
    Histogram,
    PluginError,
    ProjectConfiguration,
    RecordRefusedError,
    Tracker,
    TrackerError,
    TrackingKwargs,
)
from accel_testing import run_ranks

TOYS = str(Path(__file__).parents[4] / "tests" / "strategies")
"""Where scripts find `trackers_for_tests`."""
QUICK = TrackingKwargs(start_timeout=1.0, stall_timeout=0.3, finish_timeout=1.0)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    with opened_at_the_end() as event:
        yield event


def accelerator_with(*trackers: Any, rules: TrackingKwargs | None = None, **options: Any) -> Accelerator:
    handlers = None if rules is None else [rules]
    return Accelerator(cpu=True, log_with=list(trackers), kwargs_handlers=handlers, **options)


# --- what trackers are told -----------------------------------------------------------------------------------------------


def test_values_arrive_plain_with_their_steps_and_names_joined() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project", {"lr": 1e-3})
    loss = torch.tensor(2.0, requires_grad=True)
    accelerator.log({"train": {"loss": loss, "count": torch.tensor([3])}, "note": "begun", "done": True})
    with torch.no_grad():
        loss.fill_(7.0)  # as a loop overwrites its buffers
    accelerator.log({"loss": float("nan")}, step=10)
    accelerator.log({"loss": 1}, step=4, log_kwargs={"listing": {"walltime": 1.5}})
    accelerator.log({"loss": 2})
    accelerator.end_training()
    assert [call[0] for call in tracker.calls] == ["start", "log", "log", "log", "log", "finish"]
    first, second, third, fourth = tracker.logged()
    assert first == ({"train/loss": 2.0, "train/count": 3, "note": "begun", "done": 1}, 0)
    assert str(second) == "({'loss': nan}, 10)"
    assert third == ({"loss": 1}, 4, {"walltime": 1.5})  # going back was asked for
    assert fourth == ({"loss": 2}, 11)  # and is not done unasked
    assert tracker.calls[-1] == ("finish", False)


def test_images_tables_and_histograms_arrive() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0, "weights": Histogram(torch.tensor([0.0, 1.0, 1.0]), bins=2)}, step=5)
    accelerator.log_images(
        {"digits": torch.zeros(2, 1, 4, 6), "photo": torch.zeros(3, 8, 8)}, log_kwargs={"listing": {"caption": "x"}}
    )
    accelerator.log_table("answers", columns=["question", "score"], data=[["why", torch.tensor(0.5)]], step=7)
    accelerator.end_training()
    calls = {call[0]: call[1:] for call in tracker.calls}
    assert calls["log"] == ({"loss": 1.0}, 5)
    (bins,) = calls["histograms"][0].values()
    assert (bins.counts, calls["histograms"][1]) == ((1, 2), 5)
    assert calls["images"] == ({"digits": [(4, 6, 1)] * 2, "photo": [(8, 8, 3)]}, 5, {"caption": "x"})
    name, table, step = calls["table"]
    assert (name, table.columns, table.rows, step) == ("answers", ("question", "score"), (("why", 0.5),), 7)


def test_what_a_tracker_does_not_have_is_said_once_and_the_rest_is_recorded() -> None:
    class Plain(Listing):
        log_images = Tracker.log_images
        log_histograms = Tracker.log_histograms
        log_table = Tracker.log_table

    tracker = Plain()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")

    def record() -> None:
        for _ in range(3):
            accelerator.log({"loss": 1.0, "weights": Histogram([1.0, 2.0]), "nothing": None, "rows": [1, 2]})
            accelerator.log_images({"x": torch.zeros(3, 2, 2)})
            accelerator.log_table("t", ["a"], [[1]])
        accelerator.end_training()

    with pytest.warns(RuntimeWarning) as said:
        record()
    texts = [str(each.message) for each in said]
    assert len(texts) == 5, texts
    for part in (
        "histograms: it has none",
        "images: it has none",
        "tables: it has none",
        "the value 'nothing': NoneType. Log numbers, texts,",
        "the value 'rows': list. Log numbers, texts,",
    ):
        assert sum(part in text for text in texts) == 1, part
    assert tracker.logged() == [({"loss": 1.0}, step) for step in range(3)]


class Color(Enum):
    RED = "red"


@dataclass
class Settings:
    lr: float = 0.1
    layers: tuple[int, ...] = (4, 2)
    color: Color = Color.RED
    where: Path = Path("data") / "set"


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        Settings(),
        argparse.Namespace(lr=0.1, names=["a", None], where=Path("x")),
        {
            "nested": {"list": [1, None, {"deep": Color.RED}]},
            3: "number as key",
            "tensor": torch.ones(2, 2),
            "dtype": torch.bfloat16,
        },
        {"model": nn.Linear(2, 2), "function": print, "settings": Settings(), "big": torch.zeros(1000)},
    ],
    ids=lambda config: type(config).__name__,
)
def test_config_of_any_type_is_accepted_and_readable(config: Any) -> None:
    tracker, older = Listing(), Older()
    accelerator = accelerator_with(tracker, older)
    accelerator.init_trackers("project", config)
    accelerator.end_training()
    stored = tracker.runs[0].config
    assert json.loads(json.dumps(stored)) == stored
    assert older.seen[:-1] == ([("config", stored)] if stored else [])
    if isinstance(config, Settings):
        assert stored == {"lr": 0.1, "layers": [4, 2], "color": "red", "where": str(Path("data") / "set")}


def test_a_class_written_for_the_older_interface_works_unchanged() -> None:
    tracker = Older()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project", {"lr": 0.1})
    accelerator.log({"train": {"loss": torch.tensor(1.5)}, "pair": torch.ones(2), "rows": [1, 2]}, step=3)
    assert accelerator.get_tracker("older") is tracker
    assert accelerator.get_tracker("older", unwrap=True) is tracker.seen
    accelerator.end_training()
    assert tracker.seen == [
        ("config", {"lr": 0.1}),
        ("log", {"train": {"loss": 1.5}, "pair": [1, 1], "rows": [1, 2]}, 3),
        ("finish",),
    ]


def test_an_older_class_without_its_attributes_says_which() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half lacks requires_logging_directory, tracker"):
        Half()


# --- which trackers -------------------------------------------------------------------------------------------------------


def test_objects_of_several_trackers_are_told_the_same() -> None:
    trackers = [Listing("a"), Listing("b"), Older()]
    accelerator = accelerator_with(*trackers)
    accelerator.init_trackers("project", init_kwargs={"a": {"x": 1}, "wandb": {"mode": "offline"}})
    accelerator.log({"loss": 1})
    assert [each.name for each in accelerator.trackers] == [each.name for each in trackers]
    assert accelerator.log_with == ["a", "b", "older"]
    accelerator.end_training()
    assert trackers[0].logged() == trackers[1].logged() == [({"loss": 1}, 0)]
    assert trackers[0].runs[0].run_id == trackers[1].runs[0].run_id
    assert [each.runs[0].options for each in trackers[:2]] == [{"x": 1}, {}]
    assert len({*trackers[0].threads, *trackers[1].threads}) == 2  # a thread each


@pytest.mark.parametrize(
    "log_with, error, message",
    [
        (7, TypeError, r"log_with gives a int, expected trackers: names of installed ones"),
        (
            [Listing],
            TypeError,
            r"The class trackers_for_tests.Listing was passed as tracker; an object of it is needed",
        ),
        ([Listing("")], TypeError, r"Listing has no name"),
        ([Listing(), Listing()], ValueError, r"Listing and Listing, which go by the name 'listing'"),
        (Path("runs"), TypeError, r"log_with gives a PosixPath"),
        ("tensorbord", PluginError, r"tensorbord"),
    ],
)
def test_what_is_no_tracker_is_refused(log_with: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Accelerator(cpu=True, log_with=log_with)


def test_an_unusable_tracker_says_what_to_type() -> None:
    class Absent(Listing):
        @classmethod
        def unusable(cls) -> str | None:
            return "absent is not installed. Type: pip install absent"

    with pytest.raises(
        ImportError, match="Absent was passed, and cannot be used here: absent is not installed. Type: pip install"
    ):
        accelerator_with(Absent())


def test_one_tracker_in_hand_records_as_all_do() -> None:
    first, second = Listing("first"), Listing("second")
    accelerator = accelerator_with(first, second)
    in_hand = accelerator.trackers[0]
    accelerator.init_trackers("project")
    accelerator.log({"loss": torch.tensor(1.0)})
    in_hand.log({"own": {"a": torch.tensor(2)}}, commit=False)
    in_hand.log_images({"x": torch.zeros(2, 3, 5, 4)}, step=7)
    in_hand.log_table("t", ["a"], [[1]])
    assert in_hand.tracker is first.calls
    again = accelerator.get_tracker("first")
    assert (again.name, again.logged()) == ("first", [({"loss": 1.0}, 0), ({"own/a": 2}, 1, {"commit": False})])
    assert first.calls[-2:] == [("images", {"x": [(5, 4, 3)] * 2}, 7), ("table", "t", first.calls[-1][2], 1)]
    assert len(first.threads) == 1
    accelerator.end_training()
    assert second.logged() == [({"loss": 1.0}, 0)]


def test_one_tracker_in_hand_says_what_it_does_not_have_and_fails_alone() -> None:
    accelerator = accelerator_with(Wrong("log", fail), Listing())
    accelerator.init_trackers("project")
    in_hand = accelerator.get_tracker("wrong")
    with pytest.raises(AttributeError, match="Neither TrackerHandle nor Wrong has an attribute 'writer'"):
        in_hand.writer
    assert copy.copy(in_hand).name == "wrong"
    in_hand.log({"loss": 1})
    with pytest.warns(RuntimeWarning, match="The tracker 'wrong' is switched off"):
        assert not in_hand.logged()
    accelerator.end_training()


def test_without_trackers_everything_is_harmless() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1.0})
    accelerator.log_images({"x": torch.zeros(3, 2, 2)})
    accelerator.log_table("t", ["a"], [[1]])
    assert (accelerator.trackers, accelerator.log_with) == ([], [])
    with pytest.raises(ValueError, match=r"log_with asks for none. Write log_with='wandb'"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_explain_says_what_becomes_of_trackers() -> None:
    accelerator = accelerator_with(Listing(), Wrong("start", draws))
    accelerator.init_trackers("project")
    parts = [part for part in accelerator.explain().parts if part.role == "tracker"]
    assert [(part.name, part.source) for part in parts] == [("Listing", "argument"), ("Wrong", "argument")]
    assert {each.name: each.text for each in accelerator.explain().details if each.role == "tracker"} == {
        "listing": "has not begun",
        "wrong": "has not begun",
    }
    accelerator.log({"loss": 1})
    assert "records the run 20" in str(accelerator.explain())
    accelerator.end_training()


# --- mistakes of the script ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda a: a.log({"x": 1}, step=-1),
            ValueError,
            r"step=-1 was given: expected an integer from 0 to 2\*\*63 - 1, or None",
        ),
        (
            lambda a: a.log({"x": 1}, step=2**63),
            ValueError,
            r"step=9223372036854775808 was given: expected an integer from 0",
        ),
        (lambda a: a.log({"x": 1}, step=1.5), TypeError, "'float' object cannot be interpreted as an integer"),
        (
            lambda a: a.log({"x": 1}, log_kwargs={"listin": {}}),
            ValueError,
            r"log\(log_kwargs=...\) names no tracker: 'listin'. Type 'listing'",
        ),
        (lambda a: a.log({"x": 1}, log_kwargs={"listing": 3}), TypeError, "'int' object is not iterable"),
        (lambda a: a.get_tracker("listin"), ValueError, r"get_tracker\(\) names no tracker: 'listin'. Type 'listing'"),
        (lambda a: a.get_tracker("qqq"), ValueError, r"names no tracker: 'qqq'. Known: listing."),
        (
            lambda a: a.init_trackers("p", init_kwargs={"lsting": {}}),
            ValueError,
            r"names no tracker: 'lsting'. Type 'listing'",
        ),
    ],
)
def test_mistakes_are_errors_at_the_call(
    call: Callable[[Accelerator], Any], error: type[Exception], message: str
) -> None:
    accelerator = accelerator_with(Listing())
    accelerator.init_trackers("project")
    with pytest.raises(error, match=message):
        call(accelerator)
    accelerator.end_training()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a: a.log_images({"x": torch.zeros(5)}), r"A record of log_images\(\) is left out: .*'x'"),
        (lambda a: a.log_images({"x": torch.full((3, 4, 4), 200.0)}), r"of log_images\(\) is left out: .*'x'"),
        (lambda a: a.log_table("t"), r"A record of log_table\(\) is left out: .*columns"),
        (lambda a: a.log({"a/b": 1, "a": {"b": 2}}), r"A record of log\(\) is left out: .*'a/b'"),
    ],
)
def test_content_that_cannot_be_recorded_costs_the_record_and_not_the_run(
    call: Callable[[Accelerator], Any], message: str
) -> None:
    """It may come after hours, and on the main process alone."""
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    with pytest.warns(RuntimeWarning, match=message):
        call(accelerator)
    accelerator.log({"loss": 1})
    accelerator.end_training()
    assert tracker.logged() == [({"loss": 1}, 0)]
    strict = accelerator_with(Listing(), rules=TrackingKwargs(strict=True))
    strict.init_trackers("project")
    with pytest.raises(ValueError, match=message.partition(".*")[2]):
        call(strict)
    strict.end_training()


def test_a_record_that_a_service_cannot_hold_is_left_out_alone() -> None:
    class Small(Listing):
        def log(self, values: Any, step: int, **options: Any) -> None:
            if step == 1:
                raise RecordRefusedError("numbers above 10 have no room")
            super().log(values, step, **options)

    tracker = Small()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    with pytest.warns(RuntimeWarning, match="leaves out values that it cannot hold, .*: numbers above 10 have no room"):
        log_all(accelerator, {"loss": 1}, times=3)
    assert [step for _, step in tracker.logged()] == [0, 2]


def log_all(accelerator: Accelerator, values: dict[str, Any], times: int = 1) -> None:
    for _ in range(times):
        accelerator.log(values)
    accelerator.end_training()


def test_numbers_and_texts_that_services_cannot_hold_are_given_in_another_form() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    with pytest.warns(RuntimeWarning, match="'huge': int, which cannot be read: OverflowError"):
        log_all(accelerator, {"large": 2**70, "text": "\udcff", "na\udcfeme": 1, "huge": 10**400})
    assert tracker.logged() == [({"large": float(2**70), "text": "\\udcff", "na\\udcfeme": 1}, 0)]


def test_histograms_say_how_many_values_they_lack() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    log_all(accelerator, {"weights": Histogram([1.0, float("nan"), float("inf")])})
    assert tracker.logged() == [({"weights/nonfinite": 2}, 0)]


def test_a_record_before_init_trackers_is_an_error_and_one_after_the_end_a_warning() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    with pytest.raises(RuntimeError, match=r"log\(\) came too early: call accelerator.init_trackers\('my-project'\)"):
        accelerator.log({"loss": 1.0})
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    with pytest.raises(RuntimeError, match=r"init_trackers\('project'\) was called a second time"):
        accelerator.init_trackers("project")
    accelerator.end_training()
    with pytest.warns(RuntimeWarning, match=r"log\(\) was called after end_training\(\), and is not recorded"):
        accelerator.log({"loss": 2.0})
    assert tracker.logged() == [({"loss": 1.0}, 0)]


def test_init_trackers_may_be_repeated_before_the_first_record_but_not_with_something_else() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.init_trackers("project", {"lr": 1})  # a cell of a notebook that is run again
    for project, config in (("other", {"lr": 1}), ("project", {"lr": 2})):
        with pytest.raises(
            RuntimeError, match=r"Call it once, before the first log\(\); a second run has an Accelerator"
        ):
            accelerator.init_trackers(project, config)
    log_all(accelerator, {"loss": 1.0})
    assert [(run.project, run.config) for run in tracker.runs] == [("project", {"lr": 1})]


def test_after_the_end_trackers_still_give_the_closed_object_of_their_service() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    handle = accelerator.trackers[0]
    assert handle.runs[0].project == "project"
    assert handle.tracker is accelerator.get_tracker("listing", unwrap=True) is tracker.calls
    assert accelerator.get_tracker("listing").runs is tracker.runs
    with pytest.warns(RuntimeWarning, match=r"log\(\) was called after end_training\(\), and is not recorded"):
        handle.log({"loss": 2.0})


def test_what_a_tracker_warns_of_is_logged_where_a_filter_makes_errors_of_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = accelerator_with(Listing())
    accelerator.init_trackers("project")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_all(accelerator, {"loss": object()})
        accelerator.end_training()
        accelerator.log({"loss": 1.0})
    assert "the value 'loss'" in caplog.text
    assert "log() was called after end_training(), and is not recorded" in caplog.text


def test_a_run_cannot_begin_after_the_end() -> None:
    accelerator = accelerator_with(Listing())
    accelerator.end_training()
    with pytest.raises(RuntimeError, match=r"init_trackers\('late'\) was called after end_training\(\)"):
        accelerator.init_trackers("late")


# --- What trackers do wrong ---------------------------------------------------------------------------------------------


def train(accelerator: Accelerator) -> list[torch.Tensor]:
    """A loop that draws from every stream, and its result."""
    torch.manual_seed(3)
    random.seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.init_trackers("project", {"lr": 1e-2})
    for step in range(6):
        loss = model(torch.randn(3, 4) * random.random()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss}, step=step)
    return [parameter.detach().clone() for parameter in model.parameters()]


def run(accelerator: Accelerator, folder: Path | None = None) -> list[torch.Tensor]:
    """All of it, with a checkpoint in between."""
    result = train(accelerator)
    if folder is not None:
        accelerator.save_state(folder)
    accelerator.end_training()
    return result


def log_many(accelerator: Accelerator, count: int, pause: float = 0.0) -> None:
    for step in range(count):
        accelerator.log({"loss": step})
        time.sleep(pause)


def fail() -> None:
    raise ConnectionError("the server is gone")


def leave() -> None:
    sys.exit(3)


@pytest.mark.parametrize("act", [fail, leave], ids=["raises", "exits"])
@pytest.mark.parametrize("method", ["start", "state", "log", "finish"])
def test_a_tracker_that_raises_gives_one_warning_and_an_unchanged_result(method: str, act: Callable[[], None]) -> None:
    expected = train(Accelerator(cpu=True))
    tracker, other = Wrong(method, act), Listing()
    accelerator = accelerator_with(tracker, other)
    with pytest.warns(RuntimeWarning) as said:
        result = run(accelerator)
    (warning,) = said
    kind = "ConnectionError: the server is gone" if act is fail else "SystemExit: 3"
    doing = "start" if method == "state" else method
    assert f"The tracker 'wrong' is switched off: {doing}() raised {kind}. The training goes on;" in str(
        warning.message
    )
    assert all(map(torch.equal, result, expected))
    assert [step for _, step in other.logged()] == list(range(6))  # nobody else is silenced
    assert len([call for call in tracker.calls if call[0] == "start"]) <= 1


def test_a_tracker_that_fails_is_closed_and_called_no_more() -> None:
    tracker = Wrong("log", fail)
    accelerator = accelerator_with(tracker)
    with pytest.warns(RuntimeWarning, match="switched off"):
        run(accelerator)
    assert tracker.calls == [("start",), ("finish", True)]


@pytest.mark.parametrize(
    "act, message",
    [
        (give_nothing_usable, "start() raised ValueError"),
        (give_what_no_file_holds, "start() raised TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_tracker_whose_state_no_checkpoint_can_hold_is_switched_off(
    act: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    accelerator = accelerator_with(Wrong("state", act))
    with pytest.warns(RuntimeWarning) as said:
        run(accelerator, tmp_path / "checkpoint")
    (warning,) = said
    assert message in str(warning.message)


LATE, BUSY = "has not recorded all that was logged before save_state()", "is busy: "


@pytest.mark.parametrize(
    "method, before", [("start", []), ("log", [LATE, BUSY]), ("flush", [LATE, BUSY]), ("finish", [])]
)
def test_a_tracker_that_blocks_for_ever_is_switched_off_in_the_end_and_the_result_is_unchanged(
    method: str, before: list[str], released: threading.Event, tmp_path: Path
) -> None:
    expected = train(Accelerator(cpu=True))
    tracker, other = Wrong(method, lambda: released.wait(100)), Listing()
    accelerator = accelerator_with(tracker, other, rules=QUICK)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning) as said:
        result = run(accelerator, tmp_path / "checkpoint")
    assert time.monotonic() - began < 60  # a disk may take seconds for the checkpoint
    *earlier, last = [str(warning.message) for warning in said]
    # The thread may begin a call a moment after save_state began to wait, which then has not taken too long yet.
    assert len(before[:1]) <= len(earlier) <= len(before)
    assert all(found in text for found, text in zip(before, earlier, strict=False))
    assert "The tracker 'wrong' is switched off: " in last
    assert "The training goes on;" in last
    assert all(map(torch.equal, result, expected))
    assert [step for _, step in other.logged()] == list(range(6))
    assert other.calls[-1] == ("finish", False)


def test_a_step_never_waits_for_a_tracker(released: threading.Event) -> None:
    tracker = Wrong("log", lambda: released.wait(30))
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.0})
    began = time.monotonic()
    for step in range(200):
        accelerator.log({"loss": float(step)})
    assert time.monotonic() - began < 15  # while the first one still blocks
    released.set()
    accelerator.end_training()
    assert [values["loss"] for values, _ in tracker.logged()] == [0.0, *map(float, range(200))]  # and nothing is lost


def test_a_tracker_that_falls_behind_for_ever_is_given_up(released: threading.Event) -> None:
    tracker = Wrong("log", lambda: released.wait(30))
    accelerator = accelerator_with(tracker, rules=TrackingKwargs(most_pending=10, finish_timeout=0.3))
    accelerator.init_trackers("project")
    with pytest.warns(RuntimeWarning, match="switched off: it is 10 records behind"):
        log_many(accelerator, 20)
    accelerator.end_training()


@pytest.mark.parametrize("strict", [False, True])
def test_a_record_that_takes_long_is_told_once_and_costs_nothing(released: threading.Event, strict: bool) -> None:
    """As while a server restarts."""
    tracker = Wrong("log", lambda: released.wait(30))
    accelerator = accelerator_with(tracker, rules=TrackingKwargs(stall_timeout=0.2, strict=strict))
    accelerator.init_trackers("project")
    with pytest.warns(RuntimeWarning) as said:
        log_many(accelerator, 60, pause=0.01)
    (warning,) = said
    told = r"The tracker 'wrong' is busy: log\(\) has taken more than 0\.2 s, and \d+ records wait\. They are recorded when it returns"
    assert re.match(told, str(warning.message))
    released.set()
    accelerator.end_training()
    assert [step for _, step in tracker.logged()] == list(range(60))


def test_in_place_of_a_tracker_that_is_switched_off_there_is_one_that_accepts_every_call() -> None:
    accelerator = accelerator_with(Wrong("log", fail))
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1})
    with pytest.warns(RuntimeWarning, match="switched off"):
        assert not accelerator.get_tracker("wrong")
    assert not accelerator.get_tracker("wrong", unwrap=True).any_call("at all").of[0].it
    accelerator.end_training()


def test_random_streams_stay_where_they_were_when_a_tracker_starts() -> None:
    expected = train(Accelerator(cpu=True))
    accelerator = accelerator_with(Wrong("start", draws))
    assert all(map(torch.equal, train(accelerator), expected))
    accelerator.end_training()


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_strict_mode_raises(method: str) -> None:
    accelerator = accelerator_with(Wrong(method, fail), rules=TrackingKwargs(strict=True))
    with pytest.raises(
        TrackerError, match=rf"switched off: {method}\(\) raised ConnectionError: the server is gone"
    ) as raised:
        run(accelerator)
    assert isinstance(raised.value.__cause__, ConnectionError)
    accelerator.end_training()


def test_strict_mode_raises_for_what_cannot_be_recorded() -> None:
    accelerator = accelerator_with(Listing(), rules=TrackingKwargs(strict=True))
    accelerator.init_trackers("project")
    accelerator.log({"nothing": None})
    with pytest.raises(TrackerError, match="leaves out the value 'nothing'"):
        accelerator.get_tracker("listing")
    accelerator.end_training()


@pytest.mark.parametrize("field", ["start_timeout", "stall_timeout", "finish_timeout", "most_pending"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_patience_is_positive(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"TrackingKwargs\({field}={value!r}\): expected"):
        TrackingKwargs(**{field: value})


# --- where local trackers write ---------------------------------------------------------------------------------------------


class Local(Listing):
    requires_logging_directory = True


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"project_dir": "here"}, "here"),
        ({"project_config": ProjectConfiguration("here", logging_dir="there")}, "there"),
        ({}, "runs"),
    ],
)
def test_local_trackers_write_below_the_project(
    options: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    local, other = Local("local"), Listing()
    accelerator = accelerator_with(local, other, Local("another"), **options)
    accelerator.init_trackers("my project/v2")
    with caplog.at_level(logging.WARNING, "accel_core"):
        accelerator.log({"loss": 1})
        accelerator.end_training()
    run = local.runs[0]
    assert run.directory == Path(expected) / "my project_v2" / run.run_id
    assert other.runs[0].directory is None
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        []
        if options
        else [
            f"Runs are recorded in {Path('runs') / 'my project_v2'}, because neither logging_dir nor project_dir was given."
        ]
    )


# --- resuming ---------------------------------------------------------------------------------------------------------------


def begin(tracker: Listing, folder: Path | None = None, project: str = "project", **options: Any) -> Accelerator:
    accelerator = accelerator_with(tracker)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.init_trackers(project, **options)
    if folder is not None:
        accelerator.load_state(folder)
    return accelerator


def saved_run(folder: Path) -> Listing:
    tracker = Listing()
    accelerator = begin(tracker)
    for step in range(3):
        accelerator.log({"loss": step}, step=step)
    accelerator.save_state(folder)
    accelerator.log({"loss": 3}, step=3)
    accelerator.end_training()
    return tracker


def test_a_resumed_run_goes_on_under_its_id_and_starts_once(tmp_path: Path) -> None:
    before, after = saved_run(tmp_path / "c"), Listing()
    accelerator = begin(after, tmp_path / "c")
    accelerator.log({"loss": 3})
    accelerator.save_state(tmp_path / "d")
    accelerator.end_training()
    (run,) = after.runs
    assert run.run_id == before.runs[0].run_id
    assert run.resumed == {"run_id": run.run_id, "mine": [1, None]}
    assert run.step == 3
    assert after.logged() == [({"loss": 3}, 3)]
    again = Listing()
    begin(again, tmp_path / "d").end_training()
    assert (again.runs[0].run_id, again.runs[0].step) == (run.run_id, 4)


@pytest.mark.parametrize(
    "options", [{"resume": False}, {"project": "another"}], ids=["asked for a new one", "another project"]
)
def test_a_new_run_begins_where_it_is_asked_for(options: dict[str, Any], tmp_path: Path) -> None:
    before, after = saved_run(tmp_path / "c"), Listing()
    accelerator = begin(after, tmp_path / "c", **options)
    accelerator.log({"loss": 3})
    accelerator.end_training()
    assert after.runs[0].run_id != before.runs[0].run_id
    assert (after.runs[0].resumed, after.runs[0].step) == (None, 0)


def test_other_trackers_than_before_begin_and_those_of_before_are_not_forgotten(tmp_path: Path) -> None:
    saved_run(tmp_path / "c")
    other = Listing("other")
    accelerator = begin(other, tmp_path / "c")
    accelerator.save_state(tmp_path / "d")
    accelerator.end_training()
    assert other.runs[0].resumed is None
    third = Listing()
    begin(third, tmp_path / "d").end_training()
    assert third.runs[0].resumed is not None


def test_a_checkpoint_passes_through_a_run_without_trackers(tmp_path: Path) -> None:
    before = saved_run(tmp_path / "c")
    plain = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    plain.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain.load_state(tmp_path / "c")
    plain.save_state(tmp_path / "d")
    after = Listing()
    begin(after, tmp_path / "d").end_training()
    assert after.runs[0].run_id == before.runs[0].run_id


def test_a_run_that_has_begun_is_gone_on_with_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_run(tmp_path / "c")
    tracker = Listing()
    accelerator = begin(tracker)
    accelerator.log({"loss": 1})
    accelerator.load_state(tmp_path / "c")
    assert "call load_state() before the first log(), get_tracker() or save_state()" in caplog.text
    accelerator.log({"loss": 2})
    accelerator.save_state(tmp_path / "d")
    accelerator.end_training()
    assert [step for _, step in tracker.logged()] == [0, 1]
    (saved,) = json.loads((tmp_path / "d" / "manifest.json").read_text())["record"]["tracking"]
    assert (saved["run_id"], saved["step"]) == (tracker.runs[0].run_id, 2)
    assert saved["trackers"]["listing"]["run_id"] == tracker.runs[0].run_id


def test_a_checkpoint_has_the_state_of_its_moment(tmp_path: Path) -> None:
    class Counting(Listing):
        def state(self) -> dict[str, Any]:
            return {"logged": len(self.logged())}

    tracker = Counting()
    accelerator = begin(tracker)
    log_many(accelerator, 5)
    accelerator.save_state(tmp_path / "c")
    accelerator.end_training()
    again = Counting()
    begin(again, tmp_path / "c").end_training()
    assert again.runs[0].resumed == {"logged": 5}


def test_rolling_back_inside_a_run_rolls_back_its_steps(tmp_path: Path) -> None:
    tracker = Listing()
    accelerator = begin(tracker)
    accelerator.log({"loss": 0})
    accelerator.save_state(tmp_path / "c")
    accelerator.log({"loss": 1})
    accelerator.load_state(tmp_path / "c")
    accelerator.log({"loss": 1.5})
    accelerator.end_training()
    assert [step for _, step in tracker.logged()] == [0, 1, 1]


# --- processes --------------------------------------------------------------------------------------------------------------


class Everywhere(Listing):
    main_process_only = False


def on_ranks(folder: str) -> dict[str, Any]:
    main, everywhere = Listing(), Everywhere("everywhere")
    accelerator = accelerator_with(main, everywhere)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"rank": accelerator.process_index})
    unwrapped = accelerator.get_tracker("listing", unwrap=True)
    if not accelerator.is_main_process:
        unwrapped.add_image("x", [1]).and_so_on()
        unwrapped.log({"x": 1}, commit=False)
        unwrapped.finish(exit_code=1)
        with unwrapped.context() as nothing:
            assert not nothing["key"]
        assert list(unwrapped) == []
    accelerator.save_state(folder)
    names = [each.name for each in accelerator.trackers]
    accelerator.end_training()
    again = Everywhere("everywhere")
    accelerator = accelerator_with(Listing(), again)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.init_trackers("project")
    accelerator.load_state(folder)
    accelerator.end_training()
    return {
        "main": main.logged(),
        "everywhere": everywhere.logged(),
        "names": names,
        "ids": (everywhere.runs[0].run_id, again.runs[0].run_id),
    }


def test_the_main_process_records_unless_a_tracker_says_otherwise(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path / "c"))
    assert (first["main"], second["main"]) == ([({"rank": 0}, 0)], [])
    assert (first["everywhere"], second["everywhere"]) == ([({"rank": 0}, 0)], [({"rank": 1}, 0)])
    assert (first["names"], second["names"]) == (["listing", "everywhere"], ["everywhere"])
    for facts in (first, second):
        assert facts["ids"][0] == facts["ids"][1]
    assert first["ids"][0] != second["ids"][0]


def mistaken_on_ranks() -> list[str]:
    accelerator = accelerator_with(Listing())
    said = []
    for call in (
        lambda: accelerator.log({"loss": 1}),
        lambda: accelerator.init_trackers("project"),
        lambda: accelerator.log({"loss": 1}),
        lambda: accelerator.init_trackers("project"),
        accelerator.end_training,
        lambda: accelerator.init_trackers("other"),
    ):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_mistakes_are_errors_on_every_rank_but_a_missing_start_only_where_something_is_recorded() -> None:
    first, second = run_ranks(mistaken_on_ranks, 2)
    assert "came too early: call accelerator.init_trackers(" in first[0]
    assert first[1:] == second
    assert len(second) == 2


def started_on_the_main_process() -> list[Any]:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    if accelerator.is_main_process:
        accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.log_images({"image": torch.zeros(1, 2, 2)})
    accelerator.log_table("table", ["a"], [[1]])
    accelerator.get_tracker("listing").log({"own": 2.0})
    accelerator.end_training()
    return tracker.logged()


def test_trackers_that_the_main_process_alone_starts_record_and_others_have_nothing_to_say() -> None:
    first, second = run_ranks(started_on_the_main_process, 2)
    assert (first, second) == ([({"loss": 1.0}, 0), ({"own": 2.0}, 1)], [])


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from accel_core import Accelerator
from trackers_for_tests import Listing

class Slow(Listing):
    def log(self, values, step, **options):
        time.sleep(0.02)
        print("log", step, flush=True)
    def finish(self, failed):
        print("finish", failed, flush=True)

def main():
    accelerator = Accelerator(cpu=True, log_with=Slow())
    accelerator.init_trackers("project")
    for step in range(20):
        accelerator.log({{"loss": step}})
    {end}

main()
"""


@pytest.mark.parametrize(
    "end, code, failed",
    [("pass", 0, False), ("global kept; kept = accelerator", 0, False), ("raise ValueError('the end')", 1, True)],
    ids=["falls out of scope", "is still there", "raises"],
)
def test_nothing_is_lost_by_a_program_that_does_not_call_end_training(end: str, code: int, failed: bool) -> None:
    script = SCRIPT.format(tests=TOYS, end=end)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
    )
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:-1] == [f"log {step}" for step in range(20)]
    assert lines[-1] == f"finish {failed}"


def test_trackers_die_with_their_accelerator() -> None:
    tracker = Listing()
    accelerator = accelerator_with(tracker)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1})
    reference = weakref.ref(accelerator)
    accelerator.end_training()
    del accelerator
    gc.collect()
    assert reference() is None


def test_importing_the_core_imports_nothing_of_this() -> None:
    script = "import sys, accel_core; accel_core.Accelerator(cpu=True); print([m for m in sys.modules if m.startswith(('accel_core.tracking', 'accel_trackers'))])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"

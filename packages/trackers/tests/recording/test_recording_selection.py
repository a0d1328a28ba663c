"""From `log_with`, and what is said outside of the code, to trackers: names, objects, all of them; and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest
from trackers_for_tests import Listing, Older

from accel_core import LoggerType, NotInstalledError, PluginError, ProjectConfiguration, TrackingKwargs, World
from accel_core.api.component import how_to_install
from accel_core.api.launcher import Offer, given_outside
from accel_core.api.tracker import Option, Sections, as_list
from accel_trackers.recording.selection import Chosen
from accel_trackers.recording.trackers import Trackers


class First(Listing):
    name = "first"

    def __init__(self, level: int = 1, folder: str | None = None) -> None:
        super().__init__("first")
        self.level, self.folder = level, folder


class Absent(Listing):
    name = "absent"

    @classmethod
    def unusable(cls) -> str | None:
        return "absent is not installed. Type: pip install absent"


class Namesake(Listing):
    def __init__(self) -> None:
        super().__init__("first")


class Broken(Listing):
    def __init__(self) -> None:
        raise RuntimeError("it was built on sand\nand more")


class NoTracker:
    name = "none"


def offer(name: str, kind: type, distribution: str = "some-trackers") -> Offer:
    return Offer("accel.trackers", name, f"{kind.__module__}:{kind.__qualname__}", distribution, "1.0")


OFFERS = [
    offer("first", First),
    offer("older", Older),
    offer("absent", Absent),
    offer("broken", Broken),
    offer("namesake", Namesake),
    Offer("accel.trackers", "gone", "no_such_module:Gone", "some-trackers", "1.0"),
    Offer("accel.strategies", "first", "accel_core:Single", "accel-core", "1.0"),
]


def chosen(log_with: object, offers: list[Offer] = OFFERS) -> Chosen:
    sections, outside = Sections(), given_outside("ACCELERATE_LOG_WITH")
    asked = Option(log_with, "argument")
    if log_with is None:
        asked = Option((), "default") if outside is None else Option(as_list(outside.text, ""), outside.source)
    found = Trackers.choose(asked, offers, sections)
    sections.finish(offers, "a test")
    return found


def test_names_objects_and_mixtures_are_chosen_in_their_order() -> None:
    mine = Listing("mine")
    assert chosen("first").names == ["first"]
    assert chosen(mine).names == ["mine"]
    assert chosen([mine, "older", "first"]).names == ["mine", "older", "first"]
    assert chosen(("first", "first")).names == ["first"]
    assert chosen([]).names == []
    assert chosen(None).names == []
    assert chosen("some-trackers:first").names == ["first"]


def test_a_member_of_the_enumeration_stands_for_its_name() -> None:
    with pytest.raises(NotInstalledError, match=r"'tensorboard' was asked for.*\n" + how_to_install("accel-trackers")):
        chosen(LoggerType.TENSORBOARD)
    assert chosen([LoggerType.ALL]).names == chosen("all").names
    assert chosen([Enum("Loggers", {"MINE": "first"}).MINE]).names == ["first"]


def test_all_is_what_can_be_used_and_the_rest_has_reasons() -> None:
    found = chosen("all")
    assert found.names == ["first", "older"]
    assert found.left_out.pop("gone").startswith(
        "PluginError: The tracker 'gone' was asked for, but some-trackers 1.0 is broken"
    )
    assert found.left_out == {
        "absent": "absent is not installed. Type: pip install absent",
        "broken": "RuntimeError: it was built on sand",
        "namesake": "another tracker goes by the name 'first'",
    }
    mine = Listing("older")
    assert chosen([mine, "all"]).names == ["older", "first"]
    assert chosen(["all", mine]).selected[0].component is mine
    assert chosen(["namesake", "all"]).names == ["first", "older"]


def test_what_all_leaves_out_is_listed_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers(chosen("all"), TrackingKwargs(), World.current(cpu=True), ProjectConfiguration())
    lines = caplog.text.splitlines()
    assert lines[0].endswith("log_with='all' records with first, older. Left out:")
    assert "  absent: absent is not installed. Type: pip install absent" in lines
    assert "  broken: RuntimeError: it was built on sand" in lines
    details = trackers.details()
    assert details["namesake"] == "left out of 'all': another tracker goes by the name 'first'"
    assert (details["first"], details["older"]) == ("has not begun", "has not begun")


@pytest.mark.parametrize(
    "log_with, error, message",
    [
        (
            "absent",
            NotInstalledError,
            r"'absent' was asked for \(argument\), and cannot be used here: absent is not installed. Type",
        ),
        (Absent(), NotInstalledError, r"Absent was passed, and cannot be used here: absent is not installed"),
        ("frist", PluginError, r"Type 'first' if that was meant"),
        ("wandb", NotInstalledError, how_to_install("accel-trackers")),
        ("gone", PluginError, r"some-trackers 1.0 is broken"),
        (["first", "namesake"], ValueError, r"First and Namesake, which go by the name 'first'"),
        ([First], TypeError, r"The class .*First was passed as tracker; an object of it is needed"),
        (NoTracker(), TypeError, r"log_with gives a NoTracker, expected trackers: names of installed ones"),
        ({"first": 1}, TypeError, r"log_with gives a dict"),
        ("none", TypeError, r"the name 'none' gives a NoTracker, expected trackers"),
    ],
)
def test_what_cannot_record_is_refused(log_with: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chosen(log_with, [*OFFERS, offer("none", NoTracker)])


@pytest.mark.parametrize(
    "environment, names, source",
    [
        ({"ACCELERATE_LOG_WITH": "first"}, ["first"], "ACCELERATE_LOG_WITH"),
        ({"ACCELERATE_LOG_WITH": " older , first "}, ["older", "first"], "ACCELERATE_LOG_WITH"),
        ({"ACCELERATE_LOG_WITH": "all"}, ["first", "older"], "ACCELERATE_LOG_WITH"),
    ],
)
def test_trackers_are_named_outside_of_the_code(
    environment: Mapping[str, str], names: list[str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = chosen(None)
    assert (found.names, found.source) == (names, source)
    assert chosen("older").names == ["older"]  # the code wins


def test_options_from_outside_reach_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FIRST__LEVEL", "7")
    (selected,) = chosen("first").selected
    assert (selected.component.level, selected.component.folder) == (7, None)
    assert chosen("all").selected[0].component.level == 7
    with pytest.raises(
        ValueError, match=r"ACCELERATE_FIRST__LEVEL was given, an option of 'first', beside First\(...\)"
    ):
        chosen(First())
    with pytest.warns(
        UserWarning, match="ACCELERATE_FIRST__LEVEL was given, an option of 'first', which is not active"
    ):
        chosen("older")
    monkeypatch.setenv("ACCELERATE_FIRST__LEVLE", "7")
    with pytest.raises(ValueError, match="LEVLE"):
        chosen("first")

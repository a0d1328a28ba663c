"""The places of records in services with one value per name and step, or one kind per name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

MARKS = "⟨⟩"
"""What stands around the mark of a series. Names must not have it: see `unmarked`."""


def marked(name: str, *marks: object) -> str:
    """The name with marks behind it: "loss ⟨2⟩"."""
    return " ".join([name, *(f"{MARKS[0]}{mark}{MARKS[1]}" for mark in marks)])


def unmarked(name: str) -> str:
    """The name without anything that could be taken for a mark."""
    return name.translate(dict.fromkeys(map(ord, MARKS), "_"))


def kind_of(value: object) -> str:
    """The kind of a value that is logged: "number", "text", or the class of a service's own object."""
    if isinstance(value, (int, float)):
        return "number"
    return "text" if isinstance(value, str) else type(value).__name__.lower()


class Series:
    """The series of each name: a value of a passed step goes to a further one, and is not dropped.

    Args:
        state: what `state()` said in the run that goes on here; None: this is a new run.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._kinds: dict[str, str] = dict(state["kinds"]) if state else {}
        # Steps of one series increase. Per name and series minus the last step, which increases from series to series: so the first
        # series that takes a step is found by bisection, and there are as few of them as there can be.
        self._ends: dict[str, list[int]] = {name: list(ends) for name, ends in state["ends"].items()} if state else {}

    def place(self, name: str, kind: str, step: int) -> tuple[str, ...]:
        """The marks that a name needs for a value: none, its kind, the series' number, or both.

        Args:
            name: as it was logged.
            kind: of the value, such as "number"; a name belongs to the first kind that is logged
                under it.
            step: of which there may be a value already.
        """
        marks = () if self._kinds.setdefault(name, kind) == kind else (kind,)
        ends = self._ends.setdefault("\0".join((name, *marks)), [])
        series = bisect_right(ends, -step)
        ends[series : series + 1] = [-step]
        return (*marks, str(series + 1)) if series else marks

    def state(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {"kinds": dict(self._kinds), "ends": {name: list(ends) for name, ends in self._ends.items()}}

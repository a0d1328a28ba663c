"""What the ranks of one run wrote down, a line for each event, and reading it.

A line is written before anything follows on it, so that what a killed rank did can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Writer:
    """The journal of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{rank}.jsonl").open("w", encoding="utf-8")

    def write(self, event: str, **content: Any) -> None:
        """Adds a line, which is with the operating system when this returns."""
        self._file.write(json.dumps({"event": event, **content}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclass
class Step:
    """One window on one rank: the state before it, and of each micro-batch what it saw.

    `ids` are those of the samples, as the loader says, None if it does not; `rows` are hashes of
    the rows that the models were called with.
    """

    state: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    ids: list[list[Any] | None] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    whole: float | None = None
    closed: bool = False

    def samples(self) -> list[list[Any]]:
        """By micro-batch the ids of the samples, or, if one is unknown, hashes of what models saw."""
        return list(self.rows) if None in self.ids else [each or [] for each in self.ids]


@dataclass
class RankJournal:
    """One rank of one run. `saves` are folders with the number of steps taken before; so `loads`."""

    steps: list[Step] = field(default_factory=list)
    saves: list[tuple[int, str]] = field(default_factory=list)
    loads: list[tuple[int, str | None]] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    end: dict[str, str] | None = None
    final: str | None = None
    note: str | None = None
    killed: bool = False
    accelerators: int = 0

    def closed(self) -> int:
        """The number of whole windows."""
        return sum(step.closed for step in self.steps)


def read(folder: Path) -> list[RankJournal]:
    """The journals of a run by rank; none if no rank built an Accelerator."""
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.partition("-")[2]))
    return [_read(file.read_text(encoding="utf-8")) for file in files]


def _read(text: str) -> RankJournal:
    journal = RankJournal()
    whole = text[: text.rfind("\n") + 1]  # a rank that is killed may leave half a line
    for line in whole.splitlines():
        content = json.loads(line)
        _note(journal, content.pop("event"), content)
    return journal


def _note(journal: RankJournal, event: str, content: dict[str, Any]) -> None:
    """Adds an event to what is known of a rank."""
    match event:
        case "start":
            journal.accelerators += 1
            journal.facts = journal.facts or content
        case "state":
            _open_step(journal).state = content["state"]
        case "micro":
            step = _open_step(journal)
            step.losses.append(content["loss"])
            step.ids.append(content["ids"])
            step.rows.append(content["rows"])
            step.closed = content["closes"]
        case "window":
            _note_window(journal, content)
        case "save":
            journal.saves.append((content["step"], content["folder"]))
        case "load":
            journal.loads.append((content["step"], content["folder"]))
        case "killed":
            journal.killed = True
        case "end":
            journal.end, journal.final, journal.note = content["state"], content["final"], content["note"]
        case _:
            raise ValueError(f"A journal has the event {event!r}, which is not known here.")


def _open_step(journal: RankJournal) -> Step:
    if not journal.steps or journal.steps[-1].closed:
        journal.steps.append(Step())
    return journal.steps[-1]


def _note_window(journal: RankJournal, content: dict[str, Any]) -> None:
    if not journal.steps or (journal.steps[-1].closed and journal.steps[-1].whole is not None):
        journal.steps.append(Step())  # the strategy ran all of it by itself
    step = journal.steps[-1]
    step.whole, step.closed = content["loss"], True
    if not step.losses:
        step.losses, step.ids, step.rows = [content["loss"]], [content["ids"]], [content["rows"]]

"""Diagnosis of ranks that wait for each other: their reports, and the conclusions from all of them.

Nothing follows from time alone: a rank may compute for as long as it likes. Ranks will never come
together if one of them has ended, is gone or was stopped, or if all wait, in different collectives.
For the rest, a line says now and then who waits for whom.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from accel_core.processes.watch.collective_scope import REFUSED

if TYPE_CHECKING:
    from accel_core.processes.watch.stack_location import State

WAITING = 2.0
"""Seconds in one collective after which a rank counts as waiting. Most take far less; a slow one is only looked at."""

SILENT = 4.0
"""Seconds without a report, though asked for, after which a rank is looked for on its machine."""

ENDED = "ended its training"
FAILED = "failed"
"""The ways in which a rank leaves."""

ROOTED = frozenset(
    [
        "torch.distributed.broadcast()",
        "torch.distributed.gather()",
        "torch.distributed.reduce()",
        "torch.distributed.scatter()",
        "broadcast()",
        "LocalSGD",
        "prepare()",
    ]
)
"""Collectives that a rank may leave while others wait for somebody else in them: it may have ended its training since."""

SAVING = frozenset(["save_state()", "load_state()", "save_model()", "get_state_dict()"])
"""Collectives that scripts put under a condition, because elsewhere the main process calls them alone."""

LOST = 120.0
"""Seconds of silence after which a rank of which nothing can be known is given up: its machine or the network is gone."""


@dataclass(frozen=True)
class Call:
    """A collective that a thread is in.

    Args:
        name: what the user called: "gather()".
        seconds: for how long it has been waiting there, without computing.
        line: the user's line.
        members: the ranks that take part; None: all.
        since: when that began, by the clock of its rank: tells two such times apart.
        inner: the innermost collective inside of that one; empty if there is none.
    """

    name: str
    seconds: float
    line: str
    members: tuple[int, ...] | None = None
    since: float = 0.0
    inner: str = ""

    @property
    def meeting(self) -> str:
        """The collective in which other ranks have to be, so that this one comes to its end."""
        return self.inner or self.name

    def __str__(self) -> str:
        return f"{self.inner} inside of {self.name}" if self.inner not in ("", self.name) else self.name

    def involves(self, rank: int) -> bool:
        """Whether it waits for this rank."""
        return self.members is None or rank in self.members

    @property
    def waits(self) -> bool:
        """Whether it has taken so long that somebody may be missing."""
        return self.seconds >= WAITING


@dataclass(frozen=True)
class Report:
    """The report of one rank about itself.

    Args:
        rank, number: which one, and how many reports it has made.
        line: where its main thread stands.
        calls: the collectives that its threads are in.
        left: how it has left: "ended its training" or "failed"; empty while it takes part.
        neighbours: by rank, the states of the processes on its machine.
        free: whether a thread of its that takes part in collectives is in none now.
    """

    rank: int
    number: int
    line: str
    calls: tuple[Call, ...] = field(default=())
    left: str = ""
    neighbours: Mapping[int, State] = field(default_factory=dict)
    free: bool = False

    @property
    def rests(self) -> bool:
        """Whether nothing will come of this rank unless others come to it."""
        return bool(self.calls) and not self.free and all(call.waits for call in self.calls)

    @property
    def waiting(self) -> tuple[Call, ...]:
        """The collectives for which somebody may be missing."""
        return () if self.left else tuple(call for call in self.calls if call.waits)

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """A report that has travelled."""
        found = json.loads(text)
        calls = tuple(
            Call(**{**call, "members": None if call["members"] is None else tuple(call["members"])})
            for call in found.pop("calls")
        )
        neighbours = {int(rank): state for rank, state in found.pop("neighbours").items()}
        return cls(**found, calls=calls, neighbours=neighbours)


class Absent(NamedTuple):
    """A rank that has not reported: for how many seconds, what is known of its process, and how to name that."""

    seconds: float
    state: State
    process: str


class Missing(NamedTuple):
    """A rank that will not come, and why. What is not certain follows from where several ranks stand."""

    rank: int
    reason: str
    certain: bool


class Broken(NamedTuple):
    """A collective that raised: its name, and whether the rank gave up by itself, after the timeout of the group."""

    name: str
    timed_out: bool = False


def judged(mine: Report, others: Mapping[int, Report], absent: Mapping[int, Absent]) -> tuple[Report, list[Missing]]:
    """A rank that waits in vain, and those it waits for; this rank, and none, as long as all may come together."""
    everyone = {mine.rank: mine, **others}
    looked_at = set()
    for report in everyone.values():
        waits = frozenset((call.meeting, call.members) for call in report.waiting)
        if waits and waits not in looked_at and report.rank not in absent:
            looked_at.add(waits)  # who waits in the same is told the same
            found = missing(report, {rank: each for rank, each in everyone.items() if rank != report.rank}, absent)
            if found:
                return report, found
    return mine, []


def missing(mine: Report, others: Mapping[int, Report], absent: Mapping[int, Absent]) -> list[Missing]:
    """The ranks for which this one waits in vain; empty if it does not wait, or if all may still come.

    `others` are the fresh reports, and the last ones of those that have left; `absent` do not
    report.
    """
    calls, moving = mine.waiting, _moving({**others, mine.rank: mine}, absent)
    found = [_gone(rank, each) for rank, each in absent.items() if any(call.involves(rank) for call in calls)]
    for rank, report in others.items():
        waited_for = [call for call in calls if call.involves(rank)]
        if waited_for and rank not in absent:
            found.append(_elsewhere(waited_for, report, moving))
    return sorted(each for each in found if each is not None)


def lost(absent: Absent) -> str:
    """The reason why a silent rank will never answer, as far as it is known; else empty."""
    if absent.state == "gone":
        return ended(absent.process)
    return stopped(absent.process) if absent.state == "stopped" else ""


def ended(process: str) -> str:
    """The message about a process that has ended."""
    return (
        f"{process} ended without a word: killed from outside (out of memory?), os._exit(), or a crash; gloo crashes where the "
        f"ranks are in different collectives, and its output says where the rank stood"
    )


def stopped(process: str) -> str:
    """The message about a process that was stopped."""
    return f"{process} was stopped (SIGSTOP, or a debugger)"


def _gone(rank: int, absent: Absent) -> Missing | None:
    if absent.seconds < SILENT:
        return None
    reason = lost(absent)
    if not reason and absent.state == "unknown" and absent.seconds >= LOST:
        reason = f"{absent.process} has not answered for {absent.seconds:.0f} s"
    # One that runs is busy where Python cannot answer, for however long.
    return Missing(rank, reason, True) if reason else None


def _moving(reports: Mapping[int, Report], absent: Mapping[int, Absent]) -> set[int]:
    """The ranks that may yet come to any collective: they compute, or are in one with a rank that may."""
    present = [report for rank, report in reports.items() if rank not in absent and not report.left]
    moving = {rank for rank, each in absent.items() if not lost(each)}
    moving.update(report.rank for report in present if not report.rests)
    while more := {
        report.rank
        for report in present
        if report.rank not in moving and any(call.involves(rank) for call in report.calls for rank in moving)
    }:
        moving |= more
    return moving


def _elsewhere(waited_for: Sequence[Call], report: Report, moving: set[int]) -> Missing | None:
    if report.left:
        reason = f"has {report.left}, at {report.line}"
        still = moving and all(call.name in ROOTED for call in waited_for)
        return None if still else Missing(report.rank, reason, True)
    if report.rank in moving:
        return None
    names = {call.meeting for call in waited_for} | {REFUSED}
    if REFUSED in {call.meeting for call in waited_for} or any(call.meeting in names for call in report.calls):
        return None  # it is there, or was a moment ago
    return Missing(report.rank, f"waits in {report.calls[0]}", False)


def verdict(mine: Report, others: Mapping[int, Report], found: Sequence[Missing]) -> str:
    """The message to all ranks: who waits in vain for whom, each rank's position, and what to look for."""
    call = mine.waiting[0]
    ranks = " and ".join(str(each.rank) for each in found)
    reasons = {each.rank: each.reason for each in found if each.certain}
    return (
        f"The ranks do not come together: rank {mine.rank} waits in {call} for rank {ranks}, in vain.\n"
        f"{table(mine, others, reasons)}\n{_advice(call, found)}"
    )


def broken_text(broken: Broken, mine: Report, others: Mapping[int, Report], reasons: Mapping[int, str]) -> str:
    """The message to the user of a rank whose connections broke in a collective, or that timed out."""
    if broken.timed_out:
        what = f"Rank {mine.rank} gave up in {broken.name}, after the timeout of its process group."
        advice = (
            "A rank that is elsewhere only because it takes long needs a longer timeout: "
            "kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))] of the Accelerator."
        )
    else:
        what = f"The connections of rank {mine.rank} broke in {broken.name}."
        advice = "Look for a rank that ended or is elsewhere: the error of this one only follows."
    return f"{what} The ranks:\n{table(mine, others, reasons)}\n{advice}"


def table(mine: Report, others: Mapping[int, Report], reasons: Mapping[int, str]) -> str:
    """One line per rank, in rank order: why it does not come, or where it stands."""
    lines = {rank: standing(report) for rank, report in {**others, mine.rank: mine}.items()} | dict(reasons)
    return "\n".join(f"  rank {rank}: {lines[rank]}" for rank in sorted(lines))


def standing(report: Report) -> str:
    """The position of a rank, as a line for people."""
    if report.left:
        return f"has {report.left}, at {report.line}"
    calls = [f"in {call} for {call.seconds:.0f} s, at {call.line}" for call in report.calls]
    return "; ".join(calls) or f"at {report.line}"


def _advice(call: Call, found: Sequence[Missing]) -> str:
    name = f"{call.name.partition('(')[0]}()"
    if name in SAVING and not any(each.certain and ENDED not in each.reason for each in found):
        return (
            f"{name} is called by all ranks: take it out of a condition such as `if accelerator.is_main_process`. The main "
            f"process alone writes what is to be written once."
        )
    if any(ENDED in each.reason for each in found):
        return (
            "All ranks are to leave the loop after equally many batches: prepare the loader, or put the loop into "
            "accelerator.join_uneven_inputs(); agree on leaving early by accelerator.set_trigger() and "
            "accelerator.check_trigger()."
        )
    if all(each.certain for each in found):
        return "Look into the output of that rank and the log of its machine: the errors of the others only follow."
    return (
        "A collective is called by all ranks, in the same order: look for a call that stands under a condition which is not "
        "true on every rank, such as accelerator.is_main_process."
    )

"""Diagnosis of ranks that wait for each other: their reports, and the conclusions from all of them.

Nothing follows from time alone: a rank may compute for as long as it likes. Ranks will never come
together if one of them has ended, is gone or was stopped, or if all wait, in different collectives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_core.processes.watch.collective_scope import REFUSED

if TYPE_CHECKING:
    from accel_core.processes.watch.stack_location import State

WAITING = 2.0  # seconds in one collective after which a rank counts as waiting; a slow one is only looked at
SILENT = 4.0  # seconds without a report, though asked for, after which a rank is looked for on its machine
LOST = 120.0  # seconds of silence after which a rank of which nothing can be known is given up, for its machine is gone
ENDED, FAILED = "ended its training", "failed"  # the ways in which a rank leaves

# Collectives that a rank may leave while others wait for somebody else in them: it may have ended its training since.
_OF_TORCH = frozenset(f"torch.distributed.{name}()" for name in ("broadcast", "gather", "reduce", "scatter"))
ROOTED = _OF_TORCH | {"broadcast()", "LocalSGD", "prepare()"}
# Collectives that scripts put under a condition, because elsewhere the main process calls them alone.
SAVING = frozenset(["save_state()", "load_state()", "save_model()", "get_state_dict()"])
# How names of collectives begin in which ranks meet and do nothing else: in others they may write, or wait for their own device.
_PURE = ("gather", "reduce", "wait_for_everyone", "check_trigger", "torch.distributed.")
# What is said of a process in a state in which it will never answer.
LOSSES = {
    "gone": "{} ended without a word: killed from outside (out of memory?), os._exit(), or a crash; gloo crashes where the "
    "ranks are in different collectives, and its output says where the rank stood",
    "stopped": "{} was stopped (SIGSTOP, or a debugger)",
}


class Call(NamedTuple):
    """A collective that a thread is in."""

    name: str  # what the user called: "gather()"
    seconds: float  # for how long it has been waiting there, without computing
    line: str  # the user's
    members: tuple[int, ...] | None = None  # the ranks that take part; None: all
    since: float = 0.0  # when that began, by the clock of its rank: tells two such times apart
    inner: str = ""  # the innermost collective inside of that one
    on_device: bool = False  # whether the device is in it, and not the thread: see `DeviceMark`

    @property
    def meeting(self) -> str:
        """The collective in which other ranks have to be, so that this one comes to its end."""
        return self.inner or self.name

    @property
    def waits(self) -> bool:
        """Whether it has taken so long that somebody may be missing."""
        return self.seconds >= WAITING

    def involves(self, rank: int) -> bool:
        """Whether it waits for this rank."""
        return self.members is None or rank in self.members

    def __str__(self) -> str:
        text = f"{self.inner} inside of {self.name}" if self.inner not in ("", self.name) else self.name
        return f"{text} on its device" if self.on_device else text


class Report(NamedTuple):
    """The report of one rank about itself."""

    rank: int
    number: int  # of its reports
    line: str  # of its main thread
    calls: tuple[Call, ...] = ()  # the collectives that its threads are in
    left: str = ""  # how it has left: `ENDED` or `FAILED`; empty while it takes part
    free: bool = False  # whether a thread of its that takes part in collectives is in none now
    running: tuple[int, ...] = ()  # other ranks whose processes run on its machine, for those who cannot look there
    windows: int = 0  # that its device has been given: see `DeviceMark`
    collective: tuple[Any, ...] = ()  # of its device: name, number, group; empty without

    @property
    def rests(self) -> bool:
        """Whether nothing will come of this rank unless others come to it."""
        return bool(self.calls) and not self.free and all(call.waits and not call.on_device for call in self.calls)

    @property
    def waiting(self) -> tuple[Call, ...]:
        """The collectives for which somebody may be missing."""
        return () if self.left else tuple(call for call in self.calls if call.waits)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report of which `json.dumps` made this text."""
        report = cls(*json.loads(text))
        calls = [Call(*call) for call in report.calls]
        listed = [call._replace(members=call.members and tuple(call.members)) for call in calls]
        return report._replace(calls=tuple(listed), running=tuple(report.running), collective=tuple(report.collective))

    def __str__(self) -> str:
        if self.left:
            return f"has {self.left}, at {self.line}"
        calls = [f"in {call} for {call.seconds:.0f} s, at {call.line}" for call in self.calls]
        parts = zip(("; its device's collective: ", ", number ", " of group "), self.collective, strict=False)
        return ("; ".join(calls) or f"at {self.line}") + "".join(f"{what}{part}" for what, part in parts if part)


class Absent(NamedTuple):
    """A rank that does not report: for how many seconds, the state of its process, its name."""

    seconds: float
    state: State
    process: str

    @property
    def lost(self) -> str:
        """The reason why it will never answer, as far as that is known; else empty."""
        return LOSSES.get(self.state, "").format(self.process)

    @property
    def given_up(self) -> str:
        """The reason to wait for it no more; empty while it may be busy outside of Python."""
        if self.state == "unknown" and self.seconds >= LOST:
            return f"{self.process} has not answered for {self.seconds:.0f} s"
        return self.lost if self.seconds >= SILENT else ""


def judged(reports: Mapping[int, Report], absent: Mapping[int, Absent]) -> tuple[Report | None, dict[int, str]]:
    """A rank that waits in vain, and those it waits for, as `missing`; None if all may meet."""
    looked_at = set()
    for rank, report in reports.items():
        waits = frozenset((call.meeting, call.members) for call in report.waiting)
        if waits and waits not in looked_at and rank not in absent:
            looked_at.add(waits)  # who waits in the same is told the same
            if found := missing(rank, reports, absent):
                return report, found
    return None, {}


def missing(rank: int, reports: Mapping[int, Report], absent: Mapping[int, Absent]) -> dict[int, str]:
    """Ranks that this one waits for in vain, and why (empty: several stand); `absent`: silent."""
    moving = _moving(reports, absent)
    found: dict[int, str | None] = {}
    for other in sorted({*reports, *absent} - {rank}):
        calls = [call for call in reports[rank].waiting if call.involves(other)]
        if calls:
            gone = absent.get(other)
            if gone is not None:
                found[other] = gone.given_up or None
            elif calls[0].on_device:  # and there is no other beside it
                found[other] = _out_of_order(reports[rank], reports[other])
            else:
                found[other] = _elsewhere(calls, reports[other], moving)
    return {other: reason for other, reason in found.items() if reason is not None}


def _moving(reports: Mapping[int, Report], absent: Mapping[int, Absent]) -> set[int]:
    """The ranks that may yet come to a collective: computing, or in one with such a rank."""
    present = [report for rank, report in reports.items() if rank not in absent and not report.left]
    moving = {rank for rank, each in absent.items() if not each.lost}
    moving.update(report.rank for report in present if not report.rests)
    while more := {
        report.rank
        for report in present
        if report.rank not in moving and any(call.involves(rank) for call in report.calls for rank in moving)
    }:
        moving |= more
    return moving


def _elsewhere(waited_for: Sequence[Call], report: Report, moving: set[int]) -> str | None:
    """Why a rank that has reported will not come to these calls; None if it may."""
    if report.left:
        return None if moving and all(call.name in ROOTED for call in waited_for) else str(report)
    names = {call.meeting for call in waited_for} | {REFUSED}
    # One that is in the same call is there, or was a moment ago; so is everybody for a call that was refused.
    there = REFUSED in {call.meeting for call in waited_for} or any(call.meeting in names for call in report.calls)
    return None if there or report.rank in moving else ""


def _out_of_order(mine: Report, report: Report) -> str | None:
    """Why a rank will not give its device what this one's waits for; None if it may, or has."""
    behind = report.windows < mine.windows
    if report.left:
        return str(report) if behind or report.left == FAILED else None
    if any(call.on_device for call in report.calls):  # so does that device
        same = mine.collective[1:] == report.collective[1:] and all(mine.collective[2:])  # number and name of the group
        return "" if same and mine.collective != report.collective else None
    # All call in one order: a rank that rests in what this one has gone past without it is out of it.
    here, calls = {call.meeting for call in mine.calls}, report.calls
    pure = all(call.name.startswith(_PURE) and call.name not in ROOTED and call.involves(mine.rank) for call in calls)
    return "" if behind and report.rests and pure and here.isdisjoint(call.meeting for call in calls) else None


def verdict(report: Report, reports: Mapping[int, Report], found: Mapping[int, str]) -> str:
    """The message to all ranks: who waits in vain for whom, all positions, and advice."""
    call = report.waiting[0]
    return (
        f"The ranks do not come together: rank {report.rank} waits in {call} for rank {' and '.join(map(str, found))}, in "
        f"vain.\n{table(reports, found)}\n{_advice(call, list(found.values()))}"
    )


def broken_text(
    rank: int, name: str, timed_out: bool, reports: Mapping[int, Report], reasons: Mapping[int, str]
) -> str:
    """The message for a rank whose connections broke, or that timed out, in collective `name`."""
    if timed_out:
        what = f"Rank {rank} gave up in {name}, after the timeout of its process group."
        advice = (
            "A rank that is elsewhere only because it takes long needs a longer timeout: "
            "kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))] of the Accelerator."
        )
    else:
        what = f"The connections of rank {rank} broke in {name}."
        advice = "Look for a rank that ended or is elsewhere: the error of this one only follows."
    return f"{what} The ranks:\n{table(reports, reasons)}\n{advice}"


def table(reports: Mapping[int, Report], reasons: Mapping[int, str]) -> str:
    """One line per rank, in rank order: why it does not come, or where it stands."""
    lines = {**reports, **{rank: reason for rank, reason in reasons.items() if reason}}
    return "\n".join(f"  rank {rank}: {lines[rank]}" for rank in sorted(lines))


def _advice(call: Call, reasons: Sequence[str]) -> str:
    name = f"{call.name.partition('(')[0]}()"
    if name in SAVING and all(ENDED in reason for reason in reasons if reason):
        return (
            f"{name} is called by all ranks: take it out of a condition such as `if accelerator.is_main_process`. The main "
            f"process alone writes what is to be written once."
        )
    if any(ENDED in reason for reason in reasons):
        return (
            "All ranks are to leave the loop after equally many batches: prepare the loader, or put a loop that calls backward() into "
            "accelerator.join_uneven_inputs(); agree on leaving early by accelerator.set_trigger() and accelerator.check_trigger()."
        )
    if all(reasons):
        return "Look into the output of that rank and the log of its machine: the errors of the others only follow."
    return (
        "A collective is called by all ranks, in the same order: look for a call that stands under a condition which is not "
        "true on every rank, such as accelerator.is_main_process."
    )

"""The summary of a failed run: the rank that failed first, and what became of the others."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from accel_launch.starting.ranks import Ranks

LINES = 40
"""The number of last lines of a rank's errors that are shown, if the console has not shown them."""

_HINTS = {
    "SIGKILL": "the kernel does that when memory runs out (dmesg says so), and so do people and batch systems",
    "SIGSEGV": "a fault in compiled code; PYTHONFAULTHANDLER=1 shows where in Python",
    "SIGABRT": "compiled code gave up; what it said stands above",
    "SIGBUS": "shared memory ran out, perhaps: look at /dev/shm",
}


@dataclass(frozen=True)
class Failure:
    """The failure of one rank."""

    rank: int  # of its process
    local_rank: int
    pid: int
    status: int  # its exit status; the negative number of the signal that killed it
    time: float  # when it failed, in seconds since the epoch, as exactly as that is known
    error: str = ""  # the exception that ended it: type and message; empty if it has not said
    traceback: str = ""  # the same in full
    follows: bool = False  # whether it said that it failed only because another rank had gone

    @property
    def exit_status(self) -> int:
        """The exit status as a shell gives it: for a signal, 128 plus its number."""
        return self.status if self.status >= 0 else 128 - self.status

    def how(self) -> str:
        """The cause in words: the first line of the error, else the exit status or signal."""
        if self.error:
            lines = self.error.strip().splitlines()
            return lines[0] + (" …" if len(lines) > 1 else "")
        if self.status >= 0:
            return f"exit status {self.status}"
        name = signal_name(-self.status)
        return f"killed by {name}" + (f": {_HINTS[name]}" if name in _HINTS else "")


def find_failures(ranks: Ranks, local_ranks: dict[int, int], error_files: dict[int, Path]) -> list[Failure]:
    """The ranks that failed by themselves, the one that was first in front.

    A rank that was told to end has not failed, unless it says that it had before. Errors which say
    that they only follow from another rank's stand behind those, whoever ended first: who fails may
    stay to tell the others why.
    """
    failures = []
    for rank, ending in ranks.endings.items():
        said = _read(error_files[rank])
        moment = min(said.get("time", ending.time), ending.time)
        told = ranks.stopped_at is not None and moment > ranks.stopped_at
        if ending.status != 0 and not told:
            # One that had failed, and stayed to tell the others why, may have been told to end before it did.
            stayed = said and ending.time > moment and ending.status == -signal.SIGTERM
            status = 1 if stayed else ending.status
            failures.append(Failure(rank, local_ranks[rank], ranks.pids[rank], status, **{**said, "time": moment}))
    return sorted(failures, key=lambda failure: (failure.follows, failure.time))


def from_torch(failures: Mapping[int, ProcessFailure]) -> list[Failure]:
    """The failures that torch's agent has found, by time, for platforms where we cannot look."""
    found = [Failure(rank, each.local_rank, each.pid, each.exitcode, each.timestamp) for rank, each in failures.items()]
    return sorted(found, key=lambda failure: failure.time)


def summary(
    failures: Sequence[Failure], ranks: Ranks, where: str, among: str, logs: Path | None, unseen: Path | None
) -> str:
    """The message at the end of a failed run, from its sorted `failures` and all `ranks` here.

    `where` is the machine in words, `among` " on this machine" if there are others, `logs` the folder of
    the run's files, and `unseen` as in `unseen_errors`.
    """
    first = failures[0]
    moment = time.strftime("%H:%M:%S", time.localtime(first.time))
    place = f"{where}, local rank {first.local_rank}, process {first.pid}, {moment}"
    halted = (
        f"{listed(ranks.halted)} had been halted (SIGSTOP, or a debugger), and did not answer; then "
        if ranks.halted
        else ""
    )
    lines = [f"accel launch: {halted}rank {first.rank} failed first{among} ({place}): {first.how()}"]
    lines += unseen_errors(first, unseen, is_kept=logs is not None)
    lines += [f"  rank {each.rank} failed then: {each.how()}" for each in failures[1:]]
    lines += [f"  {line}" for line in _others(ranks, {failure.rank for failure in failures})]
    return "\n".join(lines if logs is None else [*lines, f"  output of all ranks: {logs}"])


def unseen_errors(failure: Failure, file: Path | None, *, is_kept: bool) -> list[str]:
    """The last lines of a rank's errors, of which `file` has all; none if the console has shown them."""
    if file is None:
        return []
    where = f" ({file})" if is_kept else ""
    return [
        f"  its errors, which were not shown{where}:",
        *(f"  | {line}" for line in _last_lines(file, failure)),
    ]


def signal_name(number: int) -> str:
    """The name of a signal; its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def listed(ranks: Sequence[int]) -> str:
    """Ranks in few words: ranks 0–2, 5."""
    groups = itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in group] for _, group in groups]
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _others(ranks: Ranks, failed: set[int]) -> list[str]:
    """The lines about the ranks that did not fail."""
    rest = [rank for rank in ranks.pids if rank not in failed]
    halted = [rank for rank in rest if rank in ranks.halted]
    killed = [rank for rank in rest if rank in ranks.killed and rank not in halted]
    stopped = ranks.stopped_at or 0.0
    before = [rank for rank in rest if rank in ranks.endings and ranks.endings[rank].time <= stopped]
    told = [rank for rank in rest if rank not in {*halted, *killed, *before}]
    said = (
        (halted, "{was} ended, too"),
        (killed, "{was} told to end, did not, and {was} killed"),
        (told, "{was} told to end, and did"),
        (before, "had finished"),
    )
    return [f"{listed(each)} {words.format(was='was' if len(each) == 1 else 'were')}" for each, words in said if each]


def _last_lines(path: Path, failure: Failure) -> list[str]:
    try:
        with path.open(errors="replace") as stream:
            lines = [line.rstrip("\n") for line in deque(stream, LINES)]
    except OSError as error:
        lines = [f"(cannot be read: {error.strerror})"]
    return lines or failure.traceback.splitlines()[-LINES:] or ["(nothing)"]


def _read(path: Path) -> dict[str, Any]:
    """The content of a rank's error file, in the format of torch; empty if it cannot be read."""
    try:
        message = json.loads(path.read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        # It was killed while it wrote, perhaps. How it ended is known all the same.
        return {}
    if not isinstance(message, dict):
        return {"error": str(message)}
    more = message.get("extraInfo", {})
    said = {"error": str(message.get("message", "")), "traceback": str(more.get("py_callstack", ""))}
    exact = {"time": float(more["time"])} if "time" in more else {}
    return {**said, "follows": bool(more.get("follows", False)), **exact}

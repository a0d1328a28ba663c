"""A process's location: machine, state (unknown without `/proc`), and the user's line."""

from __future__ import annotations

import gc
import linecache
import os
import socket
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

State = Literal["running", "stopped", "gone", "unknown"]
_PROC = Path("/proc")
# Whose frames are not the user's own. Libraries that the user calls are: they are nearer to the cause than we.
_MACHINERY = frozenset({"torch", "pluggy"}) | sys.stdlib_module_names  # and every package "accel_…"
# Where a thread waits for others, which is not the user's code. In torch's it may also compute.
_WAITING_ROOMS = ("torch.distributed", "torch.autograd", "torch.nn.parallel.distributed", "accel_")
# Functions of torch.distributed in which a whole group meets, all of which take `group`; those between two ranks do not count.
_MEETINGS = frozenset(
    [
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
        *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
        *("broadcast", "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list"),
        *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    ]
)


class Process(NamedTuple):
    """A process as others can look for it."""

    host: str  # the name of its machine, for people
    machine: str  # the same wherever `pid` means the same process
    pid: int
    started: str  # for a number may be given again

    @classmethod
    def current(cls) -> Process:
        """This one."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _status(pid)[1])

    def state(self) -> State:
        """The state: running, stopped by a signal, gone; unknown on another machine."""
        if self.machine != _machine() or not self.started:
            return "unknown"
        letter, started = _status(self.pid)
        if letter == "?":
            return "unknown"
        if started != self.started or letter in ("Z", "X"):
            return "gone"
        return "stopped" if letter in ("T", "t") else "running"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Position(NamedTuple):
    """The position of one thread in the code."""

    line: str  # the innermost one that is the user's, as "file, line 3, in f: code"
    meeting: str  # the function of torch.distributed that it is in, if the whole world meets there
    differentiates: bool  # in a backward that torch runs
    communicates: bool  # in a function of ours or of torch's that may wait for others
    joins: bool  # waits for another thread of this process to end


def position_of(thread: int) -> Position | None:
    """The position of the thread with this identifier; None if it has ended."""
    innermost = _frame_of(thread)
    if innermost is None:
        return None
    name = innermost.f_globals.get("__name__", "")
    line, meeting = line_of(innermost), _meeting(innermost, name)
    joins = name == "threading" and innermost.f_code.co_name in ("join", "_wait_for_tstate_lock", "_shutdown")
    return Position(line, meeting, name.startswith("torch.autograd"), name.startswith(_WAITING_ROOMS), joins)


def _frame_of(thread: int) -> FrameType | None:
    # Before Python 3.12 garbage may be collected in this call, under a lock without which a forked process does not begin:
    # where that closes a loader, and so lets other threads run, the workers that they fork would hang.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def cpu_seconds(thread: int) -> float:
    """The CPU seconds of the thread with this kernel number; 0.0 where they cannot be read."""
    try:
        return int((_PROC / "self/task" / str(thread) / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError):
        return 0.0


def line_of(frame: FrameType) -> str:
    """The innermost line of the user's, from this frame outwards."""
    found: FrameType | None = frame
    while found is not None and _is_machinery(found):
        found = found.f_back
    if found is None:
        return "the end of the script"  # exit handlers run, for instance
    # A frame that stands between two lines, in compiled code for instance, has none.
    return _line(found, found.f_lineno or found.f_code.co_firstlineno)


def calling_line() -> str:
    """The line of the user's from which this is called."""
    return line_of(sys._getframe(1))


def raising_line(error: BaseException, *, or_ours: bool = False) -> str:
    """The user's innermost line that an error passed, else the raising one if `or_ours`, or ""."""
    frames = list(traceback.walk_tb(error.__traceback__))
    passed = [each for each in frames if not _is_machinery(each[0])] or (frames if or_ours else [])
    return _line(*passed[-1]) if passed else ""


def _line(frame: FrameType, number: int) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return f"{code.co_filename}, line {number}, in {code.co_name}" + (f": {text}" if text else "")


def _is_machinery(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    # Code made from text may have no module.
    return package != "__main__" and (package in _MACHINERY or package.startswith("accel_") or not package)


def _meeting(frame: FrameType, module: str) -> str:
    if module == "torch.nn.parallel.distributed":
        return "the forward of DistributedDataParallel"
    if module != "torch.distributed.distributed_c10d" or frame.f_code.co_name not in _MEETINGS:
        return ""
    import torch.distributed as dist

    group, world = frame.f_locals.get("group"), dist.group.WORLD
    whole = group is None or (
        isinstance(group, dist.ProcessGroup) and world is not None and group.size() == world.size()
    )
    return f"torch.distributed.{frame.f_code.co_name}()" if whole else ""


def _machine() -> str:
    """The kernel's boot and the namespace of its process ids; empty where that cannot be read."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str]:
    """The letter of a process's state, "?" if unreadable, and its start; empty if there is none."""
    try:
        # The name of the program stands in parentheses and may hold anything.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    except OSError:  # this process has no descriptor left, for instance
        return "?", ""
    return fields[0], fields[19]

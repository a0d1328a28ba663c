"""The memory that a piece of work takes in addition to what the process already has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

PEAKS_ARE_MEASURED = Path("/proc/self/clear_refs").exists()
"""Whether the system tells the peak of a process, and lets it begin anew. Linux does."""

_MMAP_THRESHOLD = -3  # a parameter of glibc's `mallopt`


def leave_no_gaps() -> None:
    """Returns large blocks when they are freed, for gaps that are filled again are not seen."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def extra_memory(work: Callable[[], object]) -> int:
    """The peak memory during the work, in bytes above that before. See `PEAKS_ARE_MEASURED`."""
    leave_no_gaps()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # what it had at most is what it has now
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

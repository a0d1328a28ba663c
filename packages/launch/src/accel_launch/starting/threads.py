"""The number of threads with which each process computes on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"
"""Read by OpenMP, MKL and torch when a process starts."""

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """The cores that this process may use: by its affinity, and by the quota of its container.

    Args:
        cgroups: where the kernel shows the control group of this container; for tests.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroups)
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


def threads_of_each(processes: int, given: int | None, environ: Mapping[str, str]) -> int | None:
    """The threads for each of `processes` on this machine. None: the process decides, as it does without a launcher.

    A process that has the machine for itself decides, unless its container has fewer cores than it
    sees; several would each take all cores. What was `given` holds, else `OMP_NUM_THREADS`.
    """
    if given is not None:
        return given
    if environ.get(VARIABLE):
        return None
    cores = usable_cores()
    if processes == 1 and cores == usable_cores(Path(os.devnull)):
        return None
    return max(1, cores // processes)


def _quota(cgroups: Path) -> float | None:
    """Cores that the container may use on average; None if it has no limit, or is not Linux."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):  # version 2, version 1
        try:
            quota, *period = (cgroups / name).read_text().split()
            if not period:
                period = (cgroups / "cpu/cpu.cfs_period_us").read_text().split()
        except OSError:
            continue
        if quota not in {"max", "-1"}:
            return int(quota) / int(period[0])
    return None

"""The accelerators and cores of this machine, and how a run is confined to some of them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from accel_launch.errors import LaunchError

THREADS = "OMP_NUM_THREADS"
"""Read by OpenMP, MKL and torch when a process starts."""

VISIBILITY: Mapping[str, str] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
}
"""By torch's type of accelerator, the variable that says which ones a process sees."""

_HIP = "HIP_VISIBLE_DEVICES"
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Accelerators:
    """The type of this machine's accelerators that torch sees, empty if none; their number; AMD's, which torch calls "cuda"."""

    kind: str = ""
    count: int = 0
    hip: bool = False

    def __str__(self) -> str:
        return f"{self.count} of type {self.kind}" if self.count else "none"


def find_accelerators() -> Accelerators:
    """Asks torch, which is imported here."""
    import torch

    count = torch.accelerator.device_count()
    current = torch.accelerator.current_accelerator() if count else None
    return Accelerators(current.type, count, bool(torch.version.hip)) if current is not None else Accelerators()


def find_accelerators_elsewhere() -> Accelerators:
    """Asks torch in another process: a driver reads once which devices a process sees, and that is to change in this one."""
    program = [sys.executable, "-m", __name__]
    printed = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout
    kind, count, hip = printed.splitlines()[-1].split(" ")
    return Accelerators(kind, int(count), hip == "True")


def confined(ids: Sequence[int], found: Accelerators, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets processes see only some of the accelerators.

    `ids` counts among those visible here, and so in the list of the variable if a scheduler, for
    instance, has set it already. Raises `LaunchError` for an accelerator that is not there or is
    named twice, and for a type whose variable is not known.
    """
    asked = f"device_ids={','.join(map(str, ids))} was given"
    if not ids or len({*ids} & {*range(found.count)}) < len(ids):
        raise LaunchError(
            f"{asked}, and the accelerators of this machine that torch sees are: {found}. Give their numbers, from 0, each "
            "once; or leave it out to use all, or with --cpu none."
        )
    variable = _HIP if found.hip else VISIBILITY.get(found.kind)
    if variable is None:
        raise LaunchError(
            f"{asked}, and for accelerators of type {found.kind} it is not known which variable selects some of them. "
            "Set it yourself, and leave device_ids out."
        )
    # Where the driver of AMD's finds no list of its own, it takes that of "cuda".
    listed = environ.get(variable) or (environ.get(VISIBILITY[found.kind], "") if found.hip else "")
    visible = [each.strip() for each in listed.split(",") if each.strip()]
    # A list that is longer than what torch found has entries behind an invalid one, which do not count.
    names = visible[: found.count] if len(visible) >= found.count else [str(each) for each in range(found.count)]
    return {variable: ",".join(names[each] for each in ids)}


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """The number of usable cores: by affinity, and by the quota of the container in `cgroups`."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroups)
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


def threads_of_each(processes: int, given: int | None, environ: Mapping[str, str]) -> int | None:
    """The threads for each of `processes` here. None: the process decides, as without a launcher.

    A process that has the machine for itself decides, unless its container has fewer cores than it
    sees; several would each take all cores. What was `given` holds, else `OMP_NUM_THREADS`.
    """
    if given is not None or environ.get(THREADS):
        return given
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


if __name__ == "__main__":
    print(*astuple(find_accelerators()))  # noqa: T201  (what `find_accelerators_elsewhere` reads)

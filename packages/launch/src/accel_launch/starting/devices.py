"""The accelerators of this machine, and how a run is confined to some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_launch.starting.errors import LaunchError

VISIBILITY: Mapping[str, str] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
}
"""By torch's type of accelerator, the variable that says which ones a process sees."""


@dataclass(frozen=True)
class Accelerators:
    """The accelerators of this machine that torch sees: their type, empty if none, and their number."""

    kind: str = ""
    count: int = 0

    def __str__(self) -> str:
        return f"{self.count} of type {self.kind}" if self.count else "none"


def find_accelerators() -> Accelerators:
    """Asks torch, which is imported here."""
    import torch

    count = torch.accelerator.device_count()
    current = torch.accelerator.current_accelerator() if count else None
    return Accelerators(current.type, count) if current is not None else Accelerators()


def confined(ids: Sequence[int], found: Accelerators, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets processes see only some of the accelerators.

    `ids` counts among those that are visible here, and so in the list of the variable if a scheduler,
    for instance, has set it already. Raises `LaunchError` for an accelerator that is not there or is
    named twice, and for a type whose variable is not known.
    """
    asked = f"device_ids={','.join(map(str, ids))} was given"
    wrong = [each for each in ids if not 0 <= each < found.count]
    if not ids or wrong:
        if not found.count:
            raise LaunchError(f"{asked}, and this machine has no accelerator that torch sees. Leave it out.")
        raise LaunchError(
            f"{asked}, and the accelerators of this machine are 0 to {found.count - 1} ({found}). Give one or more of these; or "
            f"leave it out to use all, or with --cpu none."
        )
    if len(set(ids)) < len(ids):
        raise LaunchError(f"{asked}, which names an accelerator twice. Give each one once: one process uses one.")
    variable = VISIBILITY.get(found.kind)
    if variable is None:
        raise LaunchError(
            f"{asked}, and for accelerators of type {found.kind} it is not known which variable selects some of them (known: "
            f"{', '.join(VISIBILITY)}). Set the variable yourself, and leave device_ids out."
        )
    visible = [each.strip() for each in environ.get(variable, "").split(",") if each.strip()]
    # A list that is longer than what torch found has entries behind an invalid one, which do not count.
    names = visible[: found.count] if len(visible) >= found.count else [str(each) for each in range(found.count)]
    return {variable: ",".join(names[each] for each in ids)}

"""Whether the ranks together read each sample once, in the order of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from accel_launch.checking.steps import CheckError, Passed

if TYPE_CHECKING:
    from accel_core import Accelerator, Shard

_ROUNDS, _ROWS = 5, 2
_FAULT = "The loader is at fault: `accel plugins` says who brings it."


def check_order(accelerator: Accelerator, shard: Shard) -> Passed:
    """Checks that `gather_for_metrics` over a loader gives what one process reads. Collective."""
    rows = _ROWS * shard.count if accelerator.split_batches else _ROWS
    # A tail that does not divide has to be filled up, and not counted; where nothing is filled up, ranks would come apart.
    samples = _ROWS * shard.count * _ROUNDS + (0 if accelerator.even_batches is False else 3)
    data: Any = torch.arange(samples)
    plain, shuffled = accelerator.prepare(
        DataLoader(data, batch_size=rows), DataLoader(data, batch_size=rows, shuffle=True)
    )
    in_order = _read(accelerator, plain)
    epochs = [_read(accelerator, shuffled) for _ in range(2)]
    if in_order != list(range(samples)):
        found = _difference(in_order, samples)
        raise CheckError(f"Of {samples} samples without shuffling, all were expected in order. Found {found}. {_FAULT}")
    for number, epoch in enumerate(epochs):
        if sorted(epoch) != list(range(samples)):
            found = _difference(epoch, samples)
            raise CheckError(
                f"Of {samples} shuffled samples, each was expected once in epoch {number}. Found {found}. {_FAULT}"
            )
    if epochs[0] == epochs[1]:
        raise CheckError(f"Two epochs of {samples} shuffled samples came in the same order. {_FAULT}")
    return Passed(f"{samples} samples, each once, in the order of one process; shuffled, too")


def _read(accelerator: Accelerator, loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in accelerator.gather_for_metrics(batch)]


def _difference(found: list[int], samples: int) -> str:
    missing = sorted({*range(samples)} - {*found})
    twice = sorted({sample for sample in found if found.count(sample) > 1})
    if not missing and not twice:
        return f"the order {found}"
    return f"{len(missing)} missing ({_some(missing)}), {len(twice)} more than once ({_some(twice)})"


def _some(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:8])) + (", …" if len(samples) > 8 else "") or "none"

"""Memory that runs out is found out, and memory that is given back is there again."""

from __future__ import annotations

import gc

import torch
from acceptance.registry import ALL, Run, check
from acceptance.training import Shape, Trainer

MIB = 1 << 20


def allocated() -> int:
    torch.accelerator.synchronize()
    return int(torch.accelerator.memory.memory_allocated())


def limit(run: Run) -> int:
    """How much may be allocated, in MiB: 4 GiB where torch can set a limit, else what the device has."""
    module = torch.get_device_module(run.device)
    total = torch.accelerator.memory.get_memory_info(run.device)[1]
    if hasattr(module, "set_per_process_memory_fraction"):
        module.set_per_process_memory_fraction(min(1.0, 4096 * MIB / total))
        total = min(total, 4096 * MIB)
    return int(total // MIB)


def search(run: Run) -> str:
    """Batches of 16 MiB a sample: the size that is found fits, and the next one did not."""
    from accel_core import find_executable_batch_size

    accelerator, room, tried = run.accelerator(), limit(run), []
    start = 2 * room // 16

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        accelerator.free_memory()
        batch = torch.empty(batch_size, 16 * MIB, dtype=torch.uint8, device=run.device)
        batch[:, 0] = 1
        accelerator.reduce(batch[:, 0].float().sum())
        return batch_size

    found = train()
    assert found == tried[-1] < start, tried
    assert found * 16 <= room, f"{found} samples of 16 MiB do not fit into {room} MiB"
    gc.collect()
    assert allocated() < 64 * MIB, f"{allocated() / MIB:.0f} MiB of failed attempts are still there"
    return f"{found} of {start} after {len(tried)} attempts"


@check(on="accelerator", seconds=120)
def batch_size(run: Run) -> str:
    """`find_executable_batch_size` after memory has really run out."""
    return search(run)


@check(on="accelerator", devices=ALL, seconds=120)
def batch_size_ddp(run: Run) -> str:
    """The same on all devices: all agree on a size."""
    return search(run)


@check(on="accelerator")
def free_memory(run: Run) -> str:
    """After `free_memory` the device holds what it held before, but for workspaces of libraries, which stay from a first time on."""
    trained_and_freed(run)
    before = allocated()
    held = trained_and_freed(run) - before
    assert held > 8 * MIB, f"a model and its gradients take {held / MIB:.1f} MiB?"
    left = allocated() - before
    assert left < held / 20, f"{left / MIB:.1f} of {held / MIB:.1f} MiB are left"
    return f"{held / MIB:.0f} MiB given back"


def trained_and_freed(run: Run) -> int:
    """What the device held between the two."""
    trainer = Trainer(run, 2, {}, Shape(width=512, layers=4))
    trainer.train()
    held = allocated()
    trainer.model, trainer.optimizer, trainer.loader = trainer.accelerator.free_memory(
        trainer.model, trainer.optimizer, trainer.loader
    )
    gc.collect()
    return held

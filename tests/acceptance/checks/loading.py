"""Batches reach their device whole, once, and while it computes."""

from __future__ import annotations

import time

import torch
from acceptance.checks.waits import no_waits
from acceptance.registry import ALL, ANY, Run, check
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    """A stream: ranks cannot read parts of it, so one reads and sends."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(torch.arange(float(self.count)).view(-1, 1))


def read(run: Run, loader: DataLoader) -> list[float]:
    """What all ranks have read, sorted."""
    accelerator = run.accelerator()
    mine = []
    for batch in accelerator.prepare(loader):
        assert batch.device == run.device, batch.device
        mine.append(batch.flatten() * 1)
    return sorted(accelerator.gather(torch.cat(mine)).tolist())


@check(devices=ANY)
def workers(run: Run) -> str:
    """Two workers a rank, pinned memory where there is some: each sample once."""
    count = 32 * run.size
    data = torch.arange(float(count)).view(-1, 1)
    pinned = run.device.type != "cpu"
    found = read(run, DataLoader(data, batch_size=4, num_workers=2, pin_memory=pinned, shuffle=True))
    assert found == [float(number) for number in range(count)], found[:20]
    return f"{count} samples"


@check(devices=ALL)
def dispatch(run: Run) -> str:
    """A stream that rank 0 reads and sends: each sample once."""
    count = 32 * run.size
    accelerator = run.accelerator(dispatch_batches=True)
    mine = [batch * 1 for batch in accelerator.prepare(DataLoader(Numbers(count), batch_size=4))]
    assert all(batch.device == run.device for batch in mine)
    found = sorted(accelerator.gather(torch.cat(mine)).flatten().tolist())
    assert found == [float(number) for number in range(count)], found[:20]
    return f"{count} samples"


@check(on="accelerator", seconds=120)
def values_behind_work(run: Run) -> str:
    """Pinned batches that are copied while the device is busy have their values, also when the host has gone on."""
    accelerator = run.accelerator()
    data = torch.arange(64 * 262144, dtype=torch.int32).view(64, -1)
    loader = accelerator.prepare(DataLoader(data, batch_size=4, pin_memory=True))
    busy = torch.randn(1024, 1024, device=run.device)
    sums = []
    for batch in loader:
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append(batch[:, 0].clone())
        del batch  # its memory is used again
    assert torch.cat(sums).tolist() == data[:, 0].tolist()
    return f"{len(sums)} batches"


@check(on="cuda", seconds=120)
def overlap(run: Run) -> str:
    """The host waits for no copy out of pinned memory; how fast the batches come beside computing."""
    accelerator = run.accelerator()
    data = torch.zeros(32, 16 << 20, dtype=torch.uint8)
    loader = accelerator.prepare(DataLoader(data, batch_size=4, pin_memory=True))
    a = torch.randn(4096, 4096, device=run.device)
    for _ in range(2):  # the first epoch makes the memory
        batches = iter(loader)
        next(batches)
        torch.cuda.synchronize()
        began = time.perf_counter()
        with no_waits(run):
            copied = 0
            for batch in batches:
                copied += batch.nbytes
                for _ in range(4):
                    a @ a
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return f"{copied / seconds / 1e9:.1f} GB/s beside computing"

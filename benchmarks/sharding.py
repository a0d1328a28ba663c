"""P11: what a step costs under fully sharded training on ranks of one machine. Run by `run.py` under torchrun."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from libraries import BATCH, WIDTH, Epoch
from steps import timed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from worker import alternate, arguments, finish, join

BLOCKS = 4


class Blocks(nn.Module):
    """Four equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Job:
    """What every loop trains: the same blocks, data and AdamW."""

    def __init__(self, batches: int, world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(batches * BATCH * world, WIDTH, generator=generator)
        self.data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
        torch.manual_seed(2)
        self.model = Blocks()

    def weights(self) -> torch.Tensor:
        """All weights, whole and flat. Collective."""
        return torch.cat(
            [value.full_tensor().flatten() for value in self.model.state_dict().values() if isinstance(value, DTensor)]
        )


def plain(job: Job) -> Epoch:
    """torch's own, block by block, as its tutorial does it."""
    mesh = init_device_mesh("cpu", (job.world,))
    for block in job.model.blocks:
        fully_shard(block, mesh=mesh)
    model = fully_shard(job.model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(job.data, job.world, job.rank, shuffle=False)
    loader, device = DataLoader(job.data, batch_size=BATCH, sampler=sampler), torch.device("cpu")

    def epoch() -> None:
        for inputs, targets in loader:
            loss = mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def accel(job: Job) -> Epoch:
    """Ours."""
    from accel_core import Accelerator

    accelerator = Accelerator(strategy="fsdp", cpu=True)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(job.model, optimizer, DataLoader(job.data, batch_size=BATCH))

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    return epoch


LOOPS: dict[str, Callable[[Job], Epoch]] = {"plain": plain, "accel": accel}


def main() -> None:
    options = arguments()
    rank, world = join()
    warnings.filterwarnings("ignore")
    jobs = {name: Job(options.batches, world, rank) for name in options.libraries if name in LOOPS}
    epochs = {name: LOOPS[name](job) for name, job in jobs.items()}
    for name, job in jobs.items():
        epochs[name]()
        difference = f"after an epoch, {name} has other weights than plain"
        torch.testing.assert_close(job.weights(), jobs["plain"].weights(), msg=difference)
    turns = {name: timed(epoch, options.batches) for name, epoch in epochs.items()}
    dist.barrier()
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()

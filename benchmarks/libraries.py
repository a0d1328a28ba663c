"""The same training loop, written as each library asks for it.

A function of `LOOPS` takes a `Job` and returns a function that runs one epoch. The data, the initial weights, the optimizer
and the schedule are those of the job; `weights()` of the job's model afterwards shows that all did the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, BATCH = 32, 8
Epoch = Callable[[], None]


@dataclass
class Job:
    """What a loop trains: an MLP, 32 wide, on batches of 8, with AdamW and a schedule.

    Args:
        batches: in an epoch of one process; a multiple of `accumulation`.
        accumulation: micro-batches in a step.
        world: how many processes there are; the default process group runs if there are more than one.
        rank: of this process.
    """

    batches: int
    accumulation: int
    world: int = 1
    rank: int = 0
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.batches * BATCH * self.world, WIDTH, generator=generator)
        self.data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
        torch.manual_seed(2)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = LambdaLR(self.optimizer, lambda _: 1.0)  # so that steps of different libraries stay the same
        self.loader = DataLoader(self.data, batch_size=BATCH)

    def raw(self) -> tuple[nn.Module, DataLoader]:
        """Model and loader as plain torch has them in this world."""
        if self.world == 1:
            return self.model, self.loader
        sampler = DistributedSampler(self.data, self.world, self.rank, shuffle=False)
        return DistributedDataParallel(self.model), DataLoader(self.data, batch_size=BATCH, sampler=sampler)

    def weights(self) -> torch.Tensor:
        """All weights, flat."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def plain(job: Job) -> Epoch:
    """The loop as it is usually written: the loss divided always, the batch moved to where it is."""
    model, loader = job.raw()
    steps, device = job.accumulation, torch.device("cpu")

    def epoch() -> None:
        for index, (inputs, targets) in enumerate(loader, start=1):
            closes = index % steps == 0
            if job.world > 1:
                model.require_backward_grad_sync = closes
            loss = mse_loss(model(inputs.to(device)), targets.to(device)) / steps
            loss.backward()
            if closes:
                job.optimizer.step()
                job.scheduler.step()
                job.optimizer.zero_grad()

    return epoch


def lean(job: Job) -> Epoch:
    """The loop of somebody who counts microseconds: nothing is moved, and the backward begins with 1/steps."""
    model, loader = job.raw()
    steps = job.accumulation
    seed = torch.tensor(1 / steps) if steps > 1 else None

    def epoch() -> None:
        for index, (inputs, targets) in enumerate(loader, start=1):
            closes = index % steps == 0
            if job.world > 1:
                model.require_backward_grad_sync = closes
            mse_loss(model(inputs), targets).backward(seed)
            if closes:
                job.optimizer.step()
                job.scheduler.step()
                job.optimizer.zero_grad()

    return epoch


def accel(job: Job) -> Epoch:
    """Ours."""
    from accel_core import Accelerator

    return _prepared(job, Accelerator(cpu=True, gradient_accumulation_steps=job.accumulation))


def accelerate(job: Job) -> Epoch:
    """Hugging Face Accelerate, whose loop is the same."""
    from accelerate import Accelerator

    return _prepared(job, Accelerator(cpu=True, gradient_accumulation_steps=job.accumulation))


def _prepared(job: Job, accelerator: object) -> Epoch:
    model, optimizer, loader, scheduler = accelerator.prepare(job.model, job.optimizer, job.loader, job.scheduler)

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return epoch


def fabric(job: Job) -> Epoch:
    """Lightning Fabric, which leaves accumulation to the user."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=job.world, strategy="ddp" if job.world > 1 else "auto")
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer)
    loader = fabric.setup_dataloaders(job.loader)
    steps = job.accumulation

    def epoch() -> None:
        for index, (inputs, targets) in enumerate(loader, start=1):
            closes = index % steps == 0
            with fabric.no_backward_sync(model, enabled=not closes):
                fabric.backward(mse_loss(model(inputs), targets) / steps)
            if closes:
                optimizer.step()
                job.scheduler.step()
                optimizer.zero_grad()

    return epoch


LOOPS: dict[str, Callable[[Job], Epoch]] = {
    "plain": plain,
    "lean": lean,
    "accel": accel,
    "accelerate": accelerate,
    "fabric": fabric,
}

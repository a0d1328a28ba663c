"""Runs that go on from folders of the peer: what data/write_folders.txt trained, in ours."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_compat.checkpoints import load_peer_state
from accel_core import Accelerator

DATA = Path(__file__).parent / "data"
ROWS = 24


def facts(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())


class Net(nn.Module):
    def __init__(self, drop: float = 0.0, layer_norm: bool = False, width: int = 4):
        super().__init__()
        self.frozen = nn.Linear(4, width)
        self.first = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if layer_norm else nn.BatchNorm1d(width)
        self.drop = nn.Dropout(drop)
        self.last = nn.Linear(width, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(self.frozen(x)).tanh())))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x[:, 0].long() % 7)).logsumexp(-1, keepdim=True)


class Counter:
    def __init__(self):
        self.value, self.array = 0, np.zeros(3)

    def state_dict(self):
        return {"value": self.value, "array": self.array, "tensor": torch.zeros(2), "names": ["a", "b"]}

    def load_state_dict(self, state):
        self.value, self.array = state["value"], state["array"]


def data() -> TensorDataset:
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x * 3, x.sum(1, keepdim=True))


def groups(model: nn.Module) -> list[dict]:
    others = [*model.norm.parameters(), *model.last.parameters()]
    return [{"params": model.first.parameters(), "lr": 0.02}, {"params": others}]


def made(name: str, strategy=None, registers: bool = True, **options):
    """The objects of a run, prepared; weights are others than in the folder."""
    accelerator = Accelerator(
        cpu=True,
        step_scheduler_per_process=not name.startswith(("fsdp", "deepspeed")),
        **({"strategy": strategy} if strategy else {}),
        **options,
    )
    torch.manual_seed(99)
    model = Net(0.5 if name.startswith("sgd") else 0.0, layer_norm=name.startswith(("fsdp", "deepspeed")))
    if name.startswith("sgd"):
        optimizer = torch.optim.SGD(groups(model), lr=0.5, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups(model), lr=0.5)
    if name.startswith(("sgd", "fsdp", "deepspeed")):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.03], total_steps=24)
    loader = DataLoader(data(), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    if registers and not name.startswith("fsdp"):
        accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, scheduler, loader, counter


def steps(
    accelerator, model, optimizer, scheduler, batches, counter, engine: bool, clip: bool = False
) -> list[list[float]]:
    losses = []
    for x, y in batches:
        noise = torch.randn(()).item() * 0.01
        if not engine:
            noise += np.random.rand() * 0.01 + random.random() * 0.01
        loss = ((model(x) - y) ** 2).mean() + noise
        optimizer.zero_grad()
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        counter.value += 1
        losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    return losses


def goes_on(name: str, folder: str | None = None, strategy=None, own: bool = False):
    """The next losses, learning rates and count of a run that loaded a folder."""
    run = made(name, strategy)
    accelerator, model, optimizer, scheduler, loader, counter = run
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if own:
            accelerator.load_state(folder)
        else:
            load_peer_state(accelerator, folder or DATA / name)
    said = [str(each.message) for each in caught if "load_state" in str(each.message)]
    streams = torch.get_rng_state(), np.random.get_state(), random.getstate()
    batches = list(loader)[6:12:2] if name.startswith("deepspeed") else list(loader)[3:6]  # in the order of the dataset
    torch.set_rng_state(streams[0])
    np.random.set_state(streams[1])
    random.setstate(streams[2])
    losses = steps(
        accelerator,
        model,
        optimizer,
        scheduler,
        batches,
        counter,
        name.startswith("fsdp"),
        name.startswith("deepspeed"),
    )
    return losses, scheduler.get_last_lr(), counter.value, said

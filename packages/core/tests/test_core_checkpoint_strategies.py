"""What one strategy saves on any number of ranks, every other loads on any number: all of a run, to the bit."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from sharded_strategies import Flat, Rows, Uneven
from torch import nn
from torch.nn import functional as F

from accel_core import Accelerator
from accel_core.checkpoint.assembling import whole
from accel_core.collectives import gather_objects
from accel_core.strategies import DDP, Single
from accel_core.testing import models, run_ranks
from accel_core.world import World

WORLDS = (1, 2, 4)
STRATEGIES = {"single": Single, "ddp": DDP, "rows": Rows, "uneven": Uneven, "flat": Flat}
PLACES = [
    (name, world) for world in WORLDS for name in STRATEGIES if name != ("single" if world > 1 else "ddp")
]  # ddp refuses a world of one
BEFORE, AFTER = range(3), range(3, 6)  # steps up to the checkpoint, and from there
ROWS = 8  # of a global batch, whatever the number of ranks
OPTIMIZERS = {
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, foreach=True),
    "fused AdamW": partial(torch.optim.AdamW, fused=True, amsgrad=True),
}


class Mixed(nn.Module):
    """Parameters of many shapes, two of them tied, some frozen, one never used, and buffers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.cube = nn.Parameter(torch.randn(5, 3, 6) / 10)
        self.row = nn.Parameter(torch.ones(1, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 3)
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.forwards += 1
        hidden = torch.tanh(self.decoder(torch.tanh(self.encoder(x))) * self.row + self.frozen(x) * self.scale)
        return self.head(hidden) + torch.einsum("bf,rcf->bc", hidden, self.cube) + self.offset


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(3, 1)

    def forward(self, y):
        return self.score(y)


class Notes:
    """Something of the user's."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state):
        self.losses = state["losses"]


class Run:
    """Two models, of which one has two optimizers, under a strategy."""

    def __init__(self, strategy, name, seed=0, lr=0.02):
        self.accelerator = Accelerator(strategy=STRATEGIES[strategy](), cpu=True)
        self.world = World.current(cpu=True)
        made = partial(OPTIMIZERS[name], lr=lr)
        self.model, critic = models.built(Mixed, seed).double(), models.built(Critic, seed).double()
        matrices = [p for p in self.model.parameters() if p.dim() > 1 and p.requires_grad]
        others = [p for p in self.model.parameters() if p.dim() <= 1 or not p.requires_grad]
        trunk, head = others[:-2], others[-2:]
        optimizers = [
            made([{"params": matrices, "weight_decay": 0.1 * lr}, {"params": trunk, "lr": lr / 2}]),
            made(head),
            made(critic.parameters()),
        ]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
        prepared = self.accelerator.prepare(self.model, critic, *optimizers, scheduler)
        self.called, self.critic, *self.optimizers, self.scheduler = prepared
        self.models = [self.model, critic]
        self.notes = Notes()
        self.accelerator.register_for_checkpointing(self.notes)

    def train(self, steps):
        for step in steps:
            x, y = models.samples(step * ROWS, ROWS)
            part = [t.double().chunk(self.world.size)[self.world.rank] for t in (x, y)]
            output = self.called(part[0])
            loss = F.mse_loss(output, part[1]) + self.critic(output).square().mean()
            self.accelerator.backward(loss)
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.notes.losses.append(step)

    def state(self):
        """All that a checkpoint brings back, whole, by the user's names."""
        return {
            "models": [{name: value.clone() for name, value in model.state_dict().items()} for model in self.models],
            "optimizers": [self._optimizer(optimizer) for optimizer in self.optimizers],
            "scheduler": self.scheduler.state_dict(),
            "rates": [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers],
            "notes": self.notes.losses[:],
            "random": torch.rand(2, dtype=torch.float64),
        }

    def _optimizer(self, optimizer):
        state = self.accelerator._checkpoints._run.optimizer_state(optimizer)
        values = {}
        for part in gather_objects([state.values], self.world):
            values.update(part)
        tensors = {name: whole(entry, self.world).clone() for name, entry in state.entries.items()}
        return {"kind": state.kind, "groups": state.groups, "values": values, **tensors}


def saved_by_ranks(folder, strategies, name):
    """What was saved under each strategy, and where the run that went on came to."""
    found = {}
    for strategy in strategies:
        run = Run(strategy, name)
        torch.manual_seed(run.world.rank)
        run.train(BEFORE)
        place = strategy, run.world.size
        run.accelerator.save_state(f"{folder}/{strategy}-{run.world.size}")
        at = run.state()
        run.train(AFTER)
        found[place] = at, run.state()
    return found


def loaded_by_ranks(folder, strategies, sources, name):
    """What each strategy made of each checkpoint, and where it went on to; of models that began elsewhere."""
    found = {}
    for strategy in strategies:
        for source in sources:
            run = Run(strategy, name, seed=1, lr=0.5)
            run.train(range(1))  # so that there is state that has to go
            run.accelerator.load_state("{}/{}-{}".format(folder, *source))
            tied = run.model.encoder.weight.data_ptr() == run.model.decoder.weight.data_ptr()
            weights = run.accelerator.get_state_dict(run.called)
            if run.accelerator.is_main_process:
                models.built(Mixed).double().load_state_dict(weights, strict=True)
            at = run.state()
            run.train(AFTER)
            found[strategy, source] = tied, at, run.state()
    return found


@cache
def exchanged(name):
    """For each world what was saved and loaded by its ranks."""
    strategies = {world: [strategy for strategy, size in PLACES if size == world] for world in WORLDS}
    with tempfile.TemporaryDirectory() as folder:
        saved = {world: run_ranks(saved_by_ranks, world, folder, strategies[world], name) for world in WORLDS}
        loaded = {
            world: run_ranks(loaded_by_ranks, world, folder, strategies[world], sources_of(world, name), name)
            for world in WORLDS
        }
        assert not list(Path(folder).glob("*/*.tmp"))
    return saved, loaded


def sources_of(world, name):
    del world, name
    return PLACES


def assert_close(found, expected, where, tolerance=0.0):
    """Nested structures are equal, tensors up to a relative error of the largest of each."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where} {key}", tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_close(found[index], value, f"{where} {index}", tolerance)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        error = (found.double() - expected.double()).abs().max() if expected.numel() else 0.0
        assert error <= tolerance * expected.double().abs().max() if expected.numel() else True, where
    else:
        assert found == expected, where


def pairs(name):
    saved, loaded = exchanged(name)
    for world, ranks in loaded.items():
        for rank, found in enumerate(ranks):
            for (strategy, source), facts in found.items():
                at_rank = rank if source[1] == world else 0
                where = f"{source} loaded by {(strategy, world)} on rank {rank}:"
                yield where, (strategy, world) == source, saved[source[1]][at_rank][source], facts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whatever_is_saved_is_loaded_to_the_bit_under_any_strategy_and_world(name):
    for where, _, (at, _), (_, found, _) in pairs(name):
        same_world = True
        assert_close({k: v for k, v in found.items() if k != "random"}, {k: v for k, v in at.items() if k != "random"}, where)
        assert same_world

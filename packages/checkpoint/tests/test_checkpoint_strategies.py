"""What one strategy saves on any number of ranks, every other loads on any number: all of a run, to the bit."""

from __future__ import annotations

import itertools
import tempfile
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from sharded_strategies import Flat, Rows, Uneven
from torch import nn
from torch.nn import functional as F

from accel_checkpoint import gather_entry
from accel_core import DDP, Accelerator, Single, World
from accel_core.api.component import gather_objects
from accel_testing import models, run_ranks

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
ASYNCHRONOUS = dict(zip(OPTIMIZERS, (False, "eager", "lazy"), strict=True))


class Mixed(nn.Module):
    """Parameters of many shapes, two of them tied and some frozen, and buffers."""

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
    """Two models, of which one has two optimizers, under a strategy; `optimizer` names what they are."""

    def __init__(self, strategy, optimizer, seed=0, lr=0.02):
        self.accelerator = Accelerator(strategy=STRATEGIES[strategy](), cpu=True)
        self.world = World.current(cpu=True)
        made = partial(OPTIMIZERS[optimizer], lr=lr)
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
            "optimizers": [self._optimizer(state) for state in self.accelerator._run.optimizer_states()],
            "scheduler": self.scheduler.state_dict(),
            "rates": [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers],
            "notes": self.notes.losses[:],
            "random": torch.rand(2, dtype=torch.float64),
        }

    def _optimizer(self, state):
        values = {}
        for part in gather_objects([state.values], self.world):
            values.update(part)
        tensors = {name: gather_entry(name, entry, self.world).clone() for name, entry in state.entries.items()}
        return {"kind": state.kind, "groups": state.groups, "values": values, **tensors}


class Source(NamedTuple):
    """A checkpoint: the strategy and the number of ranks that saved it, and the optimizer."""

    strategy: str
    world: int
    optimizer: str

    def within(self, folder):
        return f"{folder}/{self.strategy}-{self.world}-{self.optimizer}"


def saved_by_ranks(folder, sources):
    """What each source saved, and where the run that went on came to."""
    found = {}
    for source in sources:
        run = Run(source.strategy, source.optimizer)
        torch.manual_seed(run.world.rank)
        run.train(BEFORE)
        run.accelerator.save_state(source.within(folder), asynchronous=ASYNCHRONOUS[source.optimizer])
        at = run.state()
        run.train(AFTER)
        run.accelerator.wait_for_checkpoint()
        found[source] = at, run.state()
    return found


def loaded_by_ranks(folder, cases):
    """What a strategy made of a checkpoint, whether ties and strict loading survived, and where it went on to."""
    found = {}
    for strategy, _, source in cases:
        run = Run(strategy, source.optimizer, seed=1, lr=0.5)
        run.train(range(1))  # so that there is state that has to go
        run.accelerator.load_state(source.within(folder))
        weights = run.accelerator.get_state_dict(run.called)
        if run.accelerator.is_main_process:
            models.built(Mixed).double().load_state_dict(weights, strict=True)
        tied = run.model.encoder.weight.data_ptr() == run.model.decoder.weight.data_ptr()
        at = run.state()
        run.train(AFTER)
        found[strategy, source] = tied, at, run.state()
    return found


class Case(NamedTuple):
    """A checkpoint, and the strategy and the number of ranks that load it."""

    strategy: str
    world: int
    source: Source


def cases_of(whole):
    """Every checkpoint by every strategy and world; or one for each pair of strategies, and at every place its own."""
    if whole:
        return [Case(*to, Source(*by, optimizer)) for to in PLACES for by in PLACES for optimizer in OPTIMIZERS]
    optimizers, strategies = list(OPTIMIZERS), list(enumerate(STRATEGIES))
    cases = [Case(*place, Source(*place, optimizers[i % 3])) for i, place in enumerate(PLACES)]
    for (i, strategy), (j, other) in itertools.product(strategies, strategies):
        to, by = ([place for place in PLACES if place[0] == name] for name in (strategy, other))
        cases.append(Case(*to[(i + j) % len(to)], Source(*by[(i + 2 * j) % len(by)], optimizers[(i + j) % 3])))
    return list(dict.fromkeys(cases))


class Load(NamedTuple):
    """One checkpoint that was loaded on one rank: what was there when it was saved, and what came of it."""

    where: str
    same_world: bool
    same_place: bool
    saved: dict
    uninterrupted: dict
    tied: bool
    loaded: dict
    resumed: dict


@cache
def loads(whole):
    """Launches every world once to save, and once to load."""
    cases, saved, found = cases_of(whole), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            sources = list(dict.fromkeys(case.source for case in cases if case.source.world == world))
            saved[world] = run_ranks(saved_by_ranks, world, folder, sources, timeout=200)
        for world in WORLDS:
            here = [case for case in cases if case.world == world]
            for rank, loaded in enumerate(run_ranks(loaded_by_ranks, world, folder, here, timeout=500)):
                found += compared(saved, loaded, world, rank)
    return found


def compared(saved, found, world, rank):
    for (strategy, source), (tied, loaded, resumed) in found.items():
        same_world = source.world == world
        at, uninterrupted = saved[source.world][rank if same_world else 0][source]
        where = f"{source} under {strategy} on rank {rank} of {world}:"
        same_place = same_world and source.strategy == strategy
        yield Load(where, same_world, same_place, at, uninterrupted, tied, loaded, resumed)


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
        assert not ((found - expected).abs() > tolerance * expected.abs().max()).any(), where
    else:
        assert found == expected, where


def of_all_ranks(state):
    return {name: value for name, value in state.items() if name != "random"}


amounts = pytest.mark.parametrize(
    "whole",
    [
        pytest.param(False, id="sampled", marks=pytest.mark.full),
        pytest.param(True, id="whole", marks=pytest.mark.soak),
    ],
)


@amounts
@pytest.mark.timeout(900)
def test_what_one_strategy_saves_every_other_loads_to_the_bit(whole):
    for load in loads(whole):
        assert_close(of_all_ranks(load.loaded), of_all_ranks(load.saved), load.where)


@amounts
def test_ties_survive(whole):
    assert all(load.tied for load in loads(whole))


@amounts
def test_random_streams_go_on_where_as_many_ranks_load(whole):
    for load in loads(whole):
        if load.same_world:
            assert_close(load.loaded["random"], load.saved["random"], load.where)


@amounts
def test_a_run_goes_on_as_if_it_had_not_stopped(whole):
    """To the bit where it was saved; elsewhere up to the order in which sums are taken."""
    for load in loads(whole):
        tolerance = 0.0 if load.same_place else 1e-6
        assert_close(of_all_ranks(load.resumed), of_all_ranks(load.uninterrupted), load.where, tolerance)


def test_the_sample_leaves_out_no_pair():
    """Of strategies, of worlds, or of a strategy and an optimizer; and every place loads what it saved."""
    cases = cases_of(whole=False)
    assert {(case.strategy, case.source.strategy) for case in cases} == set(itertools.product(STRATEGIES, STRATEGIES))
    assert {(case.world, case.source.world) for case in cases} == set(itertools.product(WORLDS, WORLDS))
    assert {(case.strategy, case.source.optimizer) for case in cases} == set(itertools.product(STRATEGIES, OPTIMIZERS))
    assert {case[:2] for case in cases if case[:2] == case.source[:2]} == set(PLACES)

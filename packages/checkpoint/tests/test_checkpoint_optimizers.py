"""Optimizers of every kind, saved on two ranks, loaded and saved by one, and loaded on four: training ends at the same bits."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from sharded_strategies import Rows
from torch import nn
from torch.nn import functional as F

from accel_core import DDP, Accelerator, CheckpointError, World
from accel_testing import models, run_ranks

WIDTH = 96  # 8-bit optimizers keep small parameters in full precision
BEFORE, AFTER = range(3), range(3, 6)


class Adapted(nn.Module):
    """A base with low-rank adapters, of which one is not used in the first steps."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.late = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, late):
        hidden = torch.tanh(self.base(x))
        hidden = torch.tanh(self.wide(hidden)) + self.up(self.down(hidden))
        return self.head(hidden + self.late if late else hidden)


def all_of(model):
    return model.parameters()


def adapters_of(model):
    model.requires_grad_(False)
    adapters = [*model.down.parameters(), *model.up.parameters(), model.late]
    for parameter in adapters:
        parameter.requires_grad_(True)
    return adapters


def adam(model):
    return torch.optim.AdamW(all_of(model), lr=0.01)


def low_rank(model):
    return torch.optim.AdamW(adapters_of(model), lr=0.01)


def partitioned(model):
    """Of one process it is the optimizer inside."""
    if World.current(cpu=True).size == 1:
        return adam(model)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(all_of(model), torch.optim.AdamW, lr=0.01)


def factored(model):
    return torch.optim.Adafactor(all_of(model), lr=0.01)


def orthogonal(model):
    return torch.optim.Muon([p for p in adapters_of(model) if p.dim() == 2], lr=0.01)


def eight_bit(model):
    from bitsandbytes.optim import Adam8bit

    return Adam8bit(all_of(model), lr=0.01)


def low_bit(model):
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    return AdamW8bit(all_of(model), lr=0.01)


def schedule_free(model):
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(all_of(model), lr=0.01, warmup_steps=4)
    optimizer.train()
    return optimizer


NEEDS = {eight_bit: "bitsandbytes", low_bit: "torchao", schedule_free: "schedulefree"}
OPAQUE = [make for make, package in NEEDS.items() if importlib.util.find_spec(package)]
PLAIN = [adam, low_rank, partitioned, factored, orthogonal]


class Run:
    def __init__(self, strategy, make, seed=0):
        self.accelerator = Accelerator(strategy=strategy, cpu=True)
        self.user_model = models.built(Adapted, seed)
        self.model, self.optimizer = self.accelerator.prepare(self.user_model, make(self.user_model))

    def train(self, steps):
        """On the same batch on every rank, so that sums over ranks are exact."""
        for step in steps:
            x, y = models.samples(step * 8, 8)
            self.accelerator.backward(F.mse_loss(self.model(x, late=step in AFTER), y))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        return {name: value.clone() for name, value in self.user_model.state_dict().items()}


def distributed():
    return "single" if World.current(cpu=True).size == 1 else DDP(find_unused_parameters=True)


def saved_by_two(folder, optimizers):
    found = {}
    for make in optimizers:
        run = Run(distributed(), make)
        run.train(BEFORE)
        run.accelerator.save_state(f"{folder}/{make.__name__}")
        run.train(AFTER)
        found[make.__name__] = run.state()
    return found


def passed_on(folder, optimizers):
    """Loads what was there, saves it again, and trains on."""
    found = {}
    for make in optimizers:
        run = Run(distributed(), make, seed=1)
        run.train(BEFORE[:1])
        run.accelerator.load_state(f"{folder}/{make.__name__}")
        run.accelerator.save_state(f"{folder}/{make.__name__}")
        run.train(AFTER)
        found[make.__name__] = run.state()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("optimizers"))


@pytest.fixture(scope="module")
def ended(folder):
    """The states in which the runs of two, one and four ranks ended, each of which began with what the one before saved."""
    return [
        state
        for function, world in ((saved_by_two, 2), (passed_on, 1), (passed_on, 4))
        for state in run_ranks(function, world, folder, [*PLAIN, *OPAQUE], timeout=100)
    ]


@pytest.mark.parametrize("make", [*PLAIN, *NEEDS], ids=lambda make: make.__name__)
def test_training_goes_on_to_the_bit_on_any_number_of_ranks(make, ended):
    if make in NEEDS:
        pytest.importorskip(NEEDS[make])
    first, *others = [found[make.__name__] for found in ended]
    for state in others:
        for name, tensor in first.items():
            assert torch.equal(state[name], tensor), name


def under_rows(folder, optimizers):
    """What training under a sharding strategy came to, and why what it saved, or was saved elsewhere, does not fit."""
    found = {}
    for make in optimizers:
        path = f"{folder}/{make.__name__}"
        run = Run(Rows(), make)
        run.train(BEFORE)
        run.accelerator.save_state(f"{path}-rows")
        run.train(AFTER)
        other = Run(Rows(), make, seed=1)
        other.train(BEFORE[:1])
        before = other.state()
        refusal = None
        try:
            other.accelerator.load_state(path)
        except CheckpointError as error:
            refusal = str(error)
        unchanged = all(torch.equal(value, before[name]) for name, value in other.state().items())
        other.accelerator.load_state(f"{path}-rows")
        other.train(AFTER)
        found[make.__name__] = run.state(), other.state(), refusal, unchanged
    return found


def what_one_process_says(folder, optimizers):
    found = {}
    for make in optimizers:
        run = Run("single", make, seed=1)
        with pytest.raises(CheckpointError) as refusal:
            run.accelerator.load_state(f"{folder}/{make.__name__}-rows")
        found[make.__name__] = str(refusal.value)
    return found


@pytest.fixture(scope="module")
def of_rows(folder, ended):
    """What two ranks saw, for whom there is what the runs above have saved; and one process that finds what these two saved."""
    uncut = [factored, *OPAQUE]
    return run_ranks(under_rows, 2, folder, uncut, timeout=100), run_ranks(what_one_process_says, 1, folder, uncut)[0]


@pytest.mark.parametrize("make", [factored, *NEEDS], ids=lambda make: make.__name__)
def test_state_that_cannot_be_cut_comes_back_where_it_was_and_is_refused_by_name_elsewhere(make, of_rows):
    if make in NEEDS:
        pytest.importorskip(NEEDS[make])
    ranks, of_one = of_rows
    for state, resumed, refusal, unchanged in (rank[make.__name__] for rank in ranks):
        assert all(torch.equal(resumed[name], tensor) for name, tensor in state.items())
        assert unchanged
        assert "the state '0.wide.weight" in refusal
    assert "the state '0.wide.weight" in of_one[make.__name__]

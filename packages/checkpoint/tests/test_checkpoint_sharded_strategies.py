"""The strategies that stand for sharding ones are right: they train as one process does, and present their shards truly."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from sharded_strategies import Flat, Rows, Uneven
from torch import nn
from torch.nn import functional as F

from accel_checkpoint import Whole, capture_optimizer, uncovered
from accel_core import Accelerator, CheckpointError, World
from accel_core.api.checkpoint import SavedEntry, names_of
from accel_core.api.component import gather_objects
from accel_core.api.layouts import Alias, Box, Elementwise, Replicated
from accel_testing import StrategySuite, models, run_ranks

STRATEGIES = (Rows, Uneven, Flat)
WORLDS = (1, 2, 4)
BEFORE, AFTER = 3, 1  # steps up to the checkpoint, and from there


class TestRows(StrategySuite):
    strategy = Rows


class TestUneven(StrategySuite):
    strategy = Uneven


class TestFlat(StrategySuite):
    strategy = Flat


class Mixed(nn.Module):
    """Parameters of many shapes, two of them tied, some frozen, and a buffer."""

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

    def forward(self, x):
        hidden = torch.tanh(self.decoder(torch.tanh(self.encoder(x))) * self.row + self.frozen(x) * self.scale)
        return self.head(hidden) + torch.einsum("bf,rcf->bc", hidden, self.cube) + self.offset


OPTIMIZERS = ("SGD", "AdamW")
ROWS = 8  # of a global micro-batch, whatever the number of ranks


def built(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Mixed().double()


def optimizer_of(model, name, lr=0.05):
    """Two groups: matrices, and the rest with the frozen ones among it."""
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() <= 1 or not p.requires_grad]
    groups = [{"params": matrices, "lr": lr, "weight_decay": 0.1}, {"params": others, "lr": lr / 2}]
    return torch.optim.SGD(groups, momentum=0.9) if name == "SGD" else torch.optim.AdamW(groups)


def batch(micro_batch, rank=0, count=1):
    x, y = models.samples(micro_batch * ROWS, ROWS)
    return x.double().chunk(count)[rank], y.double().chunk(count)[rank]


@cache
def reference(name, steps):
    """What one process without a strategy makes of it, and the optimizer with its model."""
    model = built()
    optimizer = optimizer_of(model, name)
    for step in range(steps):
        for micro_batch in (2 * step, 2 * step + 1):
            x, y = batch(micro_batch)
            (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Run:
    """A prepared model with its optimizer under a strategy."""

    def __init__(self, strategy, name, seed=0, lr=0.05):
        self.strategy = strategy()
        self.accelerator = Accelerator(strategy=self.strategy, cpu=True, gradient_accumulation_steps=2)
        self.world = World.current(cpu=True)
        self.user_model = built(seed)
        optimizer = optimizer_of(self.user_model, name, lr)
        self.model, self.optimizer = self.accelerator.prepare(self.user_model, optimizer)
        self.names = names_of({0: self.user_model})

    def train(self, steps):
        for micro_batch in range(2 * steps.start, 2 * steps.stop):
            x, y = batch(micro_batch, self.world.rank, self.world.size)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(F.mse_loss(self.model(x), y))
                self.optimizer.step()
                self.optimizer.zero_grad()

    def state(self):
        return {name: value.clone() for name, value in self.user_model.state_dict().items()}

    def save(self):
        state = self.strategy.optimizer_state(self.optimizer, self.names)
        values = {}
        for part in gather_objects([state.values], self.world):
            values.update(part)
        optimizer = Saved(state.kind, state.groups, values, assembled(state.entries, self.world))
        return assembled(self.strategy.model_state(self.user_model), self.world), optimizer

    def misfits(self, optimizer):
        return self.strategy.optimizer_misfits(self.optimizer, self.names, optimizer)

    def load(self, checkpoint):
        model, optimizer = checkpoint
        for name, entry in self.strategy.model_state(self.user_model).items():
            fill(entry, model[name])
        self.strategy.model_loaded(self.user_model)
        assert not self.misfits(optimizer)
        self.strategy.load_optimizer_state(self.optimizer, self.names, optimizer)


@dataclass
class Saved:
    """A checkpoint of an optimizer, in memory."""

    kind: str
    groups: list
    values: dict
    tensors: dict  # a name to what kind of entry it is, and the whole tensor
    whole: None = None

    def described(self):
        return {n: SavedEntry(kind, tuple(t.shape), t.dtype, {}) for n, (kind, t) in self.tensors.items()}

    def read(self, name, entry):
        fill(entry, self.tensors[name])


def fill(entry, saved):
    kind, tensor = saved
    assert kind == type(entry).__name__.lower()
    if isinstance(entry, Replicated):
        entry.data.copy_(tensor)
    for piece in entry.pieces if isinstance(entry, Elementwise) else ():
        piece.data.copy_(tensor[piece.box.slices])


def assembled(entries, world):
    """Whole tensors out of what each rank presents, which has to fit together."""
    ranks = gather_objects([{name: plain(entry) for name, entry in entries.items()}], world)
    return {name: joined([rank[name] for rank in ranks if name in rank]) for rank in ranks for name in rank}


def plain(entry):
    if isinstance(entry, Alias):
        return "alias", entry.of, None, {}
    if isinstance(entry, Replicated):
        entry, kind = Elementwise.whole(entry.data), "replicated"
    else:
        kind = "elementwise"
    assert all(tuple(piece.data.shape) == piece.box.sizes for piece in entry.pieces)
    return kind, entry.shape, entry.dtype, {piece.box: piece.data.clone() for piece in entry.pieces}


def joined(parts):
    [(kind, shape, dtype)] = {part[:3] for part in parts}
    if kind == "alias":
        return kind, shape
    boxes = {box: data for *_, pieces in parts for box, data in pieces.items()}
    assert uncovered(shape, list(boxes)) is None
    whole = torch.empty(shape, dtype=dtype)
    for box, data in boxes.items():
        whole[box.slices] = data
    return kind, whole


def saved_everywhere():
    """For each strategy and optimizer the state after some steps, its checkpoint, and what this rank holds."""
    found = {}
    for strategy, name in itertools.product(STRATEGIES, OPTIMIZERS):
        run = Run(strategy, name)
        run.train(range(BEFORE))
        state = run.strategy.optimizer_state(run.optimizer, run.names).entries
        held = {n: [p.box for p in entry.pieces] for n, entry in state.items() if isinstance(entry, Elementwise)}
        found[strategy, name] = run.state(), run.save(), held
    return found


def continued(checkpoints):
    """For each strategy and checkpoint the state after some steps more, of a model that began elsewhere."""
    found = {}
    for strategy, (source, checkpoint) in itertools.product(STRATEGIES, checkpoints.items()):
        run = Run(strategy, source[1], seed=1, lr=0.5)
        run.load(checkpoint)
        run.train(range(BEFORE, BEFORE + AFTER))
        found[strategy, source] = run.state()
    return found


@cache
def saved(world):
    return run_ranks(saved_everywhere, world)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("world", WORLDS)
def test_training_is_that_of_one_process(world):
    for rank in saved(world):
        for (_, name), (state, *_) in rank.items():
            assert_equal(state, reference(name, BEFORE)[0].state_dict())


@pytest.mark.parametrize("world", WORLDS)
def test_what_the_ranks_present_is_the_state_of_one_process(world):
    for (_, name), (state, (entries, optimizer), _) in saved(world)[0].items():
        model, plain_optimizer = reference(name, BEFORE)
        assert {n: kind for n, (kind, _) in entries.items() if kind != "elementwise"} == {
            "decoder.weight": "alias",
            "offset": "replicated",
        }
        for entry, (kind, tensor) in entries.items():
            assert kind == "alias" or torch.equal(tensor, state[entry])  # masters and what is computed with agree
        expected = capture_optimizer(plain_optimizer, names_of({0: model}), Whole())
        assert (optimizer.kind, optimizer.groups, optimizer.values) == (expected.kind, expected.groups, expected.values)
        assert_equal(
            {n: tensor for n, (_, tensor) in optimizer.tensors.items()},
            {n: e.data if isinstance(e, Replicated) else e.pieces[0].data for n, e in expected.entries.items()},
        )


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_of_any_strategy_and_world_goes_on_under_any_other(world):
    sources = [("AdamW", n) for n in WORLDS] + [("SGD", 2)]
    checkpoints = {(one, name, n): saved(n)[0][one, name][1] for one in STRATEGIES for name, n in sources}
    for rank in run_ranks(continued, world, checkpoints):
        assert len(rank) == len(STRATEGIES) * len(checkpoints)
        for (_, source), state in rank.items():
            assert_equal(state, reference(source[1], BEFORE + AFTER)[0].state_dict())


@pytest.mark.parametrize("world", (2, 4))
def test_optimizer_state_is_shared_out(world):
    total = sum(p.numel() for p in built().parameters() if p.requires_grad)
    for strategy in STRATEGIES:
        held = [sum(box.numel for boxes in rank[strategy, "SGD"][2].values() for box in boxes) for rank in saved(world)]
        assert sum(held) == total
        assert max(held) < 0.8 * total


def held_by_rank(strategy, name, world):
    return [rank[strategy, "SGD"][2][f"0.{name}/momentum_buffer"] for rank in saved(world)]


def test_rows_are_cut_as_chunks_are():
    sizes = [[box.sizes for box in boxes] for boxes in held_by_rank(Rows, "cube", 4)]
    assert sizes == [[tuple(part.shape)] for part in torch.empty(5, 3, 6).chunk(4)] + [[]]
    assert held_by_rank(Rows, "scale", 4) == [[Box((), ())], [], [], []]


def test_uneven_ranks_may_have_nothing():
    assert held_by_rank(Uneven, "row", 2) == [[], [Box((0, 0), (1, 6))]]
    assert [sum(box.sizes[0] for box in boxes) for boxes in held_by_rank(Uneven, "cube", 4)] == [0, 1, 2, 2]


def test_flat_ranges_begin_and_end_inside_of_parameters():
    parameters = [name for name, p in built().named_parameters() if p.requires_grad]
    boxes = {name: held_by_rank(Flat, name, 4) for name in parameters}
    assert any(sum(map(bool, ranks)) > 1 for ranks in boxes.values())  # a parameter on several ranks
    assert sum(bool(ranks[1]) for ranks in boxes.values()) > 1  # a rank with several parameters
    assert any(len(of_rank) > 1 for ranks in boxes.values() for of_rank in ranks)  # a range that is no box


def prepared(strategy, optimizer_first=False):
    model = built()
    optimizer = optimizer_of(model, "SGD")
    accelerator = Accelerator(strategy=strategy, cpu=True)
    parts = (
        (accelerator.prepare(optimizer), accelerator.prepare(model))
        if optimizer_first
        else accelerator.prepare(optimizer, model)
    )
    return accelerator, model, *parts


@pytest.mark.parametrize("optimizer_first", (False, True))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_grad_clears_what_the_model_computes_with(strategy, optimizer_first):
    accelerator, model, optimizer, wrapper = prepared(strategy(), optimizer_first)
    accelerator.backward(wrapper(batch(0)[0]).sum())
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)
    accelerator.backward(wrapper(batch(0)[0]).sum())
    assert model.scale.grad.any()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_closure_is_refused():
    accelerator, _, optimizer, wrapper = prepared(Rows())
    accelerator.backward(wrapper(batch(0)[0]).sum())
    with pytest.raises(NotImplementedError, match="closure computes never reach the masters"):
        optimizer.step(lambda: 0.0)


def test_an_optimizer_that_has_taken_steps_is_refused():
    model, optimizer = copy.deepcopy(reference("SGD", 1))
    with pytest.raises(ValueError, match="SGD that has taken steps"):
        Accelerator(strategy=Flat(), cpu=True).prepare(model, optimizer)


def without(saved, name):
    saved.tensors.pop(name)


def with_another_step(saved, name):
    saved.tensors[name] = ("replicated", torch.tensor(7.0))


def with_another_kind(saved, name):
    saved.kind = name


def as_opaque(saved, name):
    saved.tensors[name] = ("opaque", torch.zeros(6, 6))


@pytest.mark.parametrize(
    ("change", "name", "line"),
    (
        (
            without,
            "0.row/exp_avg",
            "'0.row' has the state .*'exp_avg_sq'.*, and '0.cube', in the same buffer, .*'exp_avg':",
        ),
        (with_another_step, "0.row/step", "'0.row' has the state .*'step': 7.0.*, and '0.cube', .*'step': 1.0"),
        (with_another_kind, "torch.optim:SGD", "the optimizer is a torch.optim:AdamW of .* has a torch.optim:SGD of"),
        (
            as_opaque,
            "0.frozen.weight/exp_avg",
            "'0.frozen.weight' has opaque state, which means nothing in a flat buffer",
        ),
    ),
)
def test_flat_lists_what_has_no_place_in_one_buffer(change, name, line):
    run = Run(Flat, "AdamW")
    run.train(range(1))
    _, optimizer = run.save()
    assert run.misfits(optimizer) == []
    change(optimizer, name)
    [found] = run.misfits(optimizer)
    assert re.search(line, found)


def test_flat_refuses_state_that_is_not_declared():
    run = Run(Flat, "SGD")
    run.train(range(1))
    run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]["codes"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="0.cube/codes was to be saved, but nobody declared"):
        run.save()

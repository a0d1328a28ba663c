"""A model that is too large for one process is built without data, and each rank is given its part."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_checkpoint import write_weights
from accel_core import Accelerator, CheckpointError, World
from accel_fsdp import FSDP
from accel_fsdp.meta_init import Recipes, is_meta
from accel_testing import run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED, extra_memory

WIDTH, WORDS = 6, 11


class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gate = nn.Parameter(torch.rand(1))

    def forward(self, x):
        return x + self.scale * self.gate * self.down(torch.tanh(self.up(x)))


class Tiny(nn.Module):
    """A head tied to the embedding, a number that cannot be cut, buffers of all kinds, and a factory that reads tensors."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(scale) for scale in torch.linspace(0.5, 1, 3).tolist())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.rand(5))
        self.register_buffer("table", torch.arange(WIDTH) * 0.1, persistent=False)
        self.register_buffer("again", self.table, persistent=False)
        self.turns = torch.arange(WIDTH) % 2

    def forward(self, x):
        hidden = self.embed(x) * self.seen[0] + self.table * self.turns
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.temperature


def seeded(seed, factory=Tiny):
    torch.manual_seed(seed)
    return factory()


def accelerator_of(**options):
    return Accelerator(strategy=FSDP(**options), cpu=True)


def full(model):
    """All tensors of a model, whole."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone() for name, value in named
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def tokens():
    return torch.arange(12).view(3, 4) % WORDS


def is_filled_by_its_factory():
    """As if it had been built whole on rank 0: the same values, the same random numbers afterwards."""
    accelerator, rank = accelerator_of(), World.current().rank
    plain = seeded(0)
    numbers = torch.rand(4), random.random()
    torch.manual_seed(0 if rank == 0 else 1)
    random.seed(rank)
    before = torch.get_rng_state(), random.getstate()
    model = accelerator.build_model(Tiny)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.dim())
    assert model.head.weight is model.embed.weight
    model.requires_grad_(True).blocks[0].gate.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert_equal(full(model), full(plain))
    assert model.head.weight is model.embed.weight
    assert model.again is model.table
    assert not model.blocks[0].gate.requires_grad
    assert isinstance(model.blocks[1].up.weight, DTensor)
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == {*map(id, model.parameters())}
    found = torch.rand(4)
    assert torch.equal(found, numbers[0]) == (rank == 0)
    loss = prepared(tokens()).square().mean()
    assert torch.allclose(loss, plain(tokens()).square().mean(), atol=1e-6)
    accelerator.backward(loss)
    optimizer.step()
    plain(tokens()).square().mean().backward()
    moved = plain.blocks[1].up.weight - 0.1 * plain.blocks[1].up.weight.grad
    torch.testing.assert_close(model.blocks[1].up.weight.full_tensor(), moved)
    accelerator.free_memory()


def streams_stay_together():
    """Two models in a row differ, and ranks that draw the same numbers go on doing so."""
    accelerator = accelerator_of()
    torch.manual_seed(3)
    plain = [full(Tiny()) for _ in range(2)]
    expected = torch.rand(3)
    torch.manual_seed(3)
    models = accelerator.prepare(*(accelerator.build_model(Tiny) for _ in range(2)))
    for model, wanted in zip(models, plain, strict=True):
        assert_equal(full(model), wanted)
    assert torch.equal(torch.rand(3), expected)
    accelerator.free_memory()


def is_filled_by_a_checkpoint(folders):
    plain, rank = seeded(5), World.current().rank
    for name, folder in folders.items():
        for options in ({}, {"activation_checkpointing": True}) if name == "parts" else ({},):
            accelerator = accelerator_of(**options)
            torch.manual_seed(rank)
            before = torch.get_rng_state()
            model = accelerator.prepare(accelerator.build_model(Tiny, folder))
            assert torch.equal(torch.get_rng_state(), before), name
            assert_equal(full(model), full(plain))
            assert model.head.weight is model.embed.weight
            accelerator.free_memory()


def is_cast(folder):
    accelerator = accelerator_of()
    model = accelerator.build_model(lambda: Tiny().bfloat16(), folder)
    model = accelerator.prepare(model)
    plain = seeded(5).bfloat16()
    assert_equal(full(model), {**full(plain), "table": full(model)["table"]})
    accelerator.free_memory()


def is_whole_where_it_is_only_evaluated(folder):
    accelerator = accelerator_of()
    for checkpoint, wanted in ((None, 0), (folder, 5)):
        torch.manual_seed(0)
        model = accelerator.prepare_model(accelerator.build_model(Tiny, checkpoint), evaluation_mode=True)
        assert_equal(full(model), full(seeded(wanted)))
        assert type(model.embed.weight) is nn.Parameter
        assert model.head.weight is model.embed.weight
    accelerator.free_memory()


def keeps_nothing_alive():
    accelerator = accelerator_of()
    recipes, model = Recipes(), None
    model = recipes.build(Tiny, None)
    factory_of = weakref.ref(model)
    other = accelerator.build_model(Tiny)
    seen = weakref.ref(other)
    del model, other
    gc.collect()
    assert factory_of() is None
    assert seen() is None
    accelerator.free_memory()


class Changing(nn.Module):
    """Is another one each time."""

    width = itertools.count(3)

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, next(Changing.width))
        self.extra = nn.Linear(2, 2)


class Derived(nn.Module):
    """Computes from its weights what stands in no checkpoint."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.register_buffer("first", self.body.weight.detach().clone(), persistent=False)


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.norm = self.body.weight.norm().item()


def failing_on_main():
    if World.current().is_main and failing_on_main.again:
        raise OSError(5, "the disk is gone")
    failing_on_main.again = True
    return nn.Linear(2, 2)


failing_on_main.again = False


def message(kind, work):
    with pytest.raises(kind) as error:
        work()
    return str(error.value)


def refusals(folders):
    accelerator = accelerator_of()
    build, prepare = accelerator.build_model, accelerator.prepare
    with torch.device("meta"):
        stranger = Block(1.0)
    return {
        "stranger": message(RuntimeError, lambda: prepare(stranger)),
        "reading": message(RuntimeError, lambda: build(Reading)),
        "changing": message(RuntimeError, lambda: prepare(build(Changing))),
        "failing": message(OSError, lambda: prepare(build(failing_on_main))),
        "derived": message(RuntimeError, lambda: prepare(build(Derived, folders["parts"]))),
        "misfit": message(CheckpointError, lambda: prepare(build(lambda: nn.Linear(3, 2), folders["parts"]))),
        "nowhere": message(FileNotFoundError, lambda: prepare(build(Tiny, folders["parts"] / "nowhere"))),
    }


def jobs(folders):
    is_filled_by_its_factory()
    streams_stay_together()
    is_filled_by_a_checkpoint(folders)
    is_cast(folders["parts"])
    is_whole_where_it_is_only_evaluated(folders["parts"])
    keeps_nothing_alive()
    return refusals(folders)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What was refused, on each rank; all else is asserted there."""
    folder = tmp_path_factory.mktemp("weights")
    with torch.random.fork_rng(devices=[]):
        model = seeded(5)
        write_weights(model.state_dict(), folder / "one")
        write_weights(model.state_dict(), folder / "parts", 400)
        write_weights(model.state_dict(), folder / "bin", safe_serialization=False)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.save_state(folder / "checkpoint")
        accelerator.free_memory()
    return run_ranks(jobs, 2, {path.name: path for path in folder.iterdir()})


def test_models_without_data_are_filled_on_every_rank(ran):
    """By their factory and by files of every form, cut and whole, with ties, buffers and random streams: asserted there."""
    assert ran[0].keys() == ran[1].keys()


@pytest.mark.parametrize("name, parts", {
    "stranger": ["parameters on the meta device, and nobody knows their data: gate, up.weight,",
                 "Build it by accelerator.build_model(factory, checkpoint=...)"],
    "reading": ["runs the factory with parameters that have no data yet, and it failed: RuntimeError",
                "it cannot read the values of parameters (.item()", "pass the whole model to prepare()"],
    "changing": ["ran again, to give Changing its data", "body.weight has the shape [4, 2], and had [3, 2]",
                 "Let it build the same each time"],
    "failing": ["the disk is gone (on rank 0)"],
    "derived": ["Derived is to get the weights of", "stand in no checkpoint: first.", "or make them persistent"],
    "misfit": ["was asked to fill Linear from", "missing in the file (2): weight; bias", "Pass the weights of the same model"],
    "nowhere": ["is neither a file nor a directory", "nowhere"],
}.items())  # fmt: skip
def test_what_cannot_be_filled_is_refused_on_every_rank(ran, name, parts):
    for refused in ran:
        for part in parts:
            assert part in refused[name]


def test_a_model_that_the_factory_had_keeps_its_data_and_gets_its_weights(tmp_path):
    kept, other = nn.Linear(2, 2), nn.Linear(2, 2)
    safetensors.torch.save_file(other.state_dict(), tmp_path / "model.safetensors")
    recipes = Recipes()
    assert recipes.build(lambda: kept, None) is kept
    assert not is_meta(kept)
    recipes.build(lambda: kept, tmp_path)
    assert torch.equal(kept.weight, other.weight)


def test_what_else_a_factory_does_is_left_alone():
    """Only parameters of its own go: other attributes, what is frozen, and what other modules have afterwards stay."""

    def factory():
        model = Tiny()
        model.temperature.requires_grad_(False)
        model.embed.weight.kind = "words"
        return model

    model = Recipes().build(factory, None)
    assert not model.temperature.requires_grad
    assert model.embed.weight.kind == "words"
    assert model.turns.tolist() == [0, 1, 0, 1, 0, 1]
    assert model.blocks[2].scale == 1
    assert not is_meta(nn.Linear(2, 2))


def is_filled_where_it_is_not_cut():
    accelerator = accelerator_of(ignored_modules=["blocks.0"])
    torch.manual_seed(0)
    model = accelerator.build_model(Tiny)
    weight = model.blocks[0].up.weight
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.blocks[0].up.weight is weight
    assert type(weight.detach()) is torch.Tensor
    assert_equal(full(model), full(seeded(0)))
    before = weight.detach().clone()
    accelerator.backward(prepared(tokens()).square().mean())
    optimizer.step()
    assert not torch.equal(weight, before)
    accelerator.free_memory()


def test_modules_that_are_not_cut_are_filled_too():
    run_ranks(is_filled_where_it_is_not_cut, 2)


# Memory

LAYERS, SIZE = 6, 2048
WEIGHT = 4 * SIZE * SIZE
SHARDS = LAYERS * WEIGHT // 2
SLACK = 6 << 20


def deep(size):
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(LAYERS)))


def filling(folders):
    found = {}
    for checkpoint in (None, *folders):
        accelerator = accelerator_of()
        small = None if checkpoint is None else checkpoint / "small"
        accelerator.prepare(accelerator.build_model(lambda: deep(4), small))  # imports
        large = None if checkpoint is None else checkpoint / "large"
        models = []

        def fill(accelerator=accelerator, large=large, models=models):
            models.append(accelerator.prepare(accelerator.build_model(lambda: deep(SIZE), large)))

        found["factory" if checkpoint is None else checkpoint.name] = extra_memory(fill)
        assert isinstance(models[0][0].weight, DTensor)
        accelerator.free_memory()
    return found


@pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="the kernel does not measure peaks")
def test_a_rank_never_has_more_than_its_shards_and_a_buffer(tmp_path):
    for name, size in {"small": 4, "large": SIZE}.items():
        state = {f"{index}.weight": torch.zeros(size, size) for index in range(LAYERS)}
        write_weights(state, tmp_path / "files" / name, 4 * WEIGHT)
    main, other = run_ranks(filling, 2, [tmp_path / "files"])
    assert other["factory"] <= SHARDS + WEIGHT + SLACK, other
    assert main["factory"] <= 2 * SHARDS + SHARDS + WEIGHT + SLACK, main
    for rank in (main, other):
        assert rank["files"] <= SHARDS + SLACK, rank

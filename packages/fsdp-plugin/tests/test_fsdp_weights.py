"""Weights of a model that is cut into shards go to plain files in one call, and come from them."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_checkpoint import write_weights
from accel_core import Accelerator, CheckpointError, World, load_checkpoint_in_model
from accel_fsdp import FSDP
from accel_testing import run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED, extra_memory

WIDTH, WORDS = 6, 11


class Tied(nn.Module):
    """A head tied to the embedding, rows that do not divide, a number, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)
        )
        self.gate = nn.Parameter(torch.rand(1))
        self.temperature = nn.Parameter(torch.rand(()))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x):
        return self.head(self.gate * self.body(self.embed(x))) * self.temperature


def seeded(seed):
    torch.manual_seed(seed)
    return Tied()


def prepared(model, **options):
    strategy = FSDP(**options)
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = accelerator.prepare(model)
    if not hasattr(model, "accel_state"):
        model.accel_state = lambda: strategy.model_state(model)
    return accelerator, model


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_filled(model, expected):
    model.reshard()
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(whole(state[name]), value.to(state[name].dtype)), name


def tokens():
    return torch.arange(8) % WORDS


def exports(folder):
    accelerator, model = prepared(seeded(0))
    expected = seeded(0).state_dict()
    state = accelerator.get_state_dict(model)
    assert list(state) == (list(expected) if World.current().is_main else [])
    for name, value in state.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, expected[name])
    if state:
        assert state["head.weight"] is state["embed.weight"]
    accelerator.save_model(model, folder / "saved")
    accelerator.save_model(model, folder / "in parts", max_shard_size=200)
    accelerator.save_model(model, folder / "pickled", safe_serialization=False)
    accelerator.save_model(model.body, folder / "a part")
    accelerator.free_memory()


def imports(folders):
    """Every form, also after a forward that leaves parameters gathered; what is trained afterwards is what was read."""
    expected = seeded(5).state_dict()
    for name, folder in folders.items():
        accelerator, model = prepared(seeded(1), reshard_after_forward=name != "parts")
        held = {name: id(parameter) for name, parameter in model.named_parameters()}
        model.eval()
        before = model(tokens()).detach()
        load_checkpoint_in_model(model, folder)
        assert_filled(model, expected)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == held
        assert model.head.weight is model.embed.weight
        other = seeded(5).eval()
        after = model(tokens()).detach()
        assert not torch.allclose(after, before)
        torch.testing.assert_close(after, other(tokens()).detach())
        accelerator.free_memory()


def narrowed(folder):
    """Values are cast to what the parameters are."""
    accelerator, model = prepared(seeded(1).bfloat16())
    load_checkpoint_in_model(model, folder)
    assert_filled(model, seeded(5).state_dict())
    accelerator.free_memory()


def told(work, kind):
    with pytest.raises(kind) as error:
        work()
    return str(error.value)


def refusals(folder):
    accelerator, model = prepared(seeded(1))
    other, linear = prepared(nn.Linear(3, 2))
    before = whole(linear.weight).clone()
    found = {
        "misfit": told(lambda: load_checkpoint_in_model(linear, folder), CheckpointError),
        "dtype": told(lambda: load_checkpoint_in_model(model, folder, dtype="bfloat16"), ValueError),
    }
    assert torch.equal(whole(linear.weight), before)
    for each in (accelerator, other):
        each.free_memory()
    return found


def jobs(folder, folders):
    exports(folder)
    imports(folders)
    narrowed(folders["parts"])
    return refusals(folders["parts"])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    source = tmp_path_factory.mktemp("weights")
    with torch.random.fork_rng(devices=[]):
        model = seeded(5)
        state = model.state_dict()
        write_weights(state, source / "one")
        write_weights(state, source / "parts", 200)
        write_weights(state, source / "bin", safe_serialization=False)
        safetensors.torch.save_file(
            {name: value for name, value in state.items() if name != "embed.weight"}, source / "foreign.safetensors"
        )
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.save_state(source / "checkpoint")
        accelerator.free_memory()
    return run_ranks(jobs, 2, folder, {path.name: path for path in source.iterdir()}), folder


def expected():
    with torch.random.fork_rng(devices=[]):
        return seeded(0).state_dict()


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_one_call_writes_what_any_library_reads(ran):
    """Whole tensors, ties once, nothing of a wrapper in the names."""
    _, folder = ran
    wanted = expected()
    del wanted["head.weight"]
    assert_same(safetensors.torch.load_file(folder / "saved" / "model.safetensors"), wanted)
    with safetensors.safe_open(folder / "saved" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embed.weight"}
    index = json.loads((folder / "in parts" / "model.safetensors.index.json").read_text())
    parts = {*index["weight_map"].values()}
    assert len(parts) > 1
    found = {}
    for part in parts:
        found.update(safetensors.torch.load_file(folder / "in parts" / part))
    assert_same(found, wanted)


def test_a_part_of_a_model_and_torch_s_own_format_can_be_had_too(ran):
    _, folder = ran
    assert_same(torch.load(folder / "pickled" / "pytorch_model.bin", weights_only=True), expected())
    body = {name.removeprefix("body."): value for name, value in expected().items() if name.startswith("body.")}
    assert_same(safetensors.torch.load_file(folder / "a part" / "model.safetensors"), body)


def test_what_was_exported_loads_into_the_plain_model(ran):
    _, folder = ran
    for name in ("saved", "in parts", "pickled"):
        model = Tied()
        load_checkpoint_in_model(model, folder / name)
        assert_same(model.state_dict(), expected())


def test_what_does_not_fit_is_said_alike_on_every_rank(ran):
    (first, second), _ = ran
    assert first == second
    assert "was asked to fill Linear from" in first["misfit"]
    assert "missing in the file (2): weight; bias" in first["misfit"]
    assert "dtype='bfloat16', but this model is cut into shards" in first["dtype"]


# Memory

LAYERS, SIZE = 6, 2048
WEIGHT = 4 * SIZE * SIZE
SLACK = 8 << 20


def deep(size):
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(LAYERS)))


def measured(folder):
    other, small = prepared(deep(4))
    accelerator, large = prepared(deep(SIZE))
    other.save_model(small, folder / "small")  # imports
    load_checkpoint_in_model(small, folder / "small")
    found = {
        "saving": extra_memory(lambda: accelerator.save_model(large, folder / "large", max_shard_size=2 * WEIGHT)),
        "loading": extra_memory(lambda: load_checkpoint_in_model(large, folder / "large")),
        "gathering": extra_memory(lambda: accelerator.get_state_dict(large)),
    }
    for each in (accelerator, other):
        each.free_memory()
    return found


@pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="the kernel does not measure peaks")
def test_memory_of_exporting_and_importing(tmp_path):
    """What is read goes into the shards, without a copy. What is written is put together where it is written, one by one."""
    first, second = run_ranks(measured, 2, tmp_path)
    assert max(first["loading"], second["loading"]) <= SLACK
    assert max(first["saving"], second["saving"]) <= WEIGHT + SLACK, (first, second)
    assert first["gathering"] <= (LAYERS + 1) * WEIGHT + SLACK
    assert second["gathering"] <= WEIGHT + SLACK

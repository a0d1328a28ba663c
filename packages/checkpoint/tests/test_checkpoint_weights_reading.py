"""Weights are read into a model whole or not at all, and nothing in a file is ever run."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import pickle
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from sharded_strategies import Flat, Rows, Uneven
from torch import nn

from accel_checkpoint import load_checkpoint_in_model, stored_in, write_weights
from accel_checkpoint.reading import Checkpoint
from accel_checkpoint.weights import loading
from accel_core import Accelerator, CheckpointError, NotInstalledError
from accel_core.api.component import how_to_install
from accel_core.api.layouts import Box
from accel_testing import run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED, extra_memory

EVERY_FORM = {
    "one file": {},
    "parts": {"max_shard_size": 100},
    "bin": {"safe_serialization": False},
    "parts of bin": {"safe_serialization": False, "max_shard_size": 100},
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("scratch", torch.rand(2), persistent=False)


class Mixed(nn.Module):
    """Of every kind of dtype; written as they are, and with views that cannot be filled in one piece."""

    def __init__(self):
        super().__init__()
        self.bf16 = nn.Parameter(torch.randn(3, 5).bfloat16())
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scalar = nn.Parameter(torch.randn(()))
        for name, dtype in {
            "z": torch.complex64,
            "fp8": torch.float8_e4m3fn,
            "long": torch.int64,
            "odd": torch.uint16,
        }.items():
            self.register_buffer(name, (torch.rand(7) * 100).to(dtype))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("conj", torch.randn(2, dtype=torch.complex64).conj())
        self.register_buffer("empty", torch.empty(0, 3))


def bits(model):
    state = {name: tensor.detach().resolve_conj() for name, tensor in model.state_dict().items()}
    return {
        name: (tensor.dtype, tensor.contiguous().view(-1).view(torch.uint8).tolist()) for name, tensor in state.items()
    }


def save_checkpoint(folder, *models):
    """What `save_state` writes of some models."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*models)
    accelerator.save_state(folder)
    accelerator.free_memory()


@pytest.fixture
def saved(tmp_path):
    """A model, and the directory in which its weights are."""
    model = Tied()
    write_weights(model.state_dict(), tmp_path / "saved")
    return model, tmp_path / "saved"


# What is read


@pytest.mark.parametrize("form", [*EVERY_FORM, "checkpoint"])
@pytest.mark.parametrize("kind", [Tied, Mixed])
def test_what_save_model_and_save_state_write_comes_back_bit_for_bit(tmp_path, form, kind):
    """Ties survive, `data_ptr` equal."""
    model, other = kind(), kind()
    if form == "checkpoint":
        save_checkpoint(tmp_path, model)
    else:
        write_weights(model.state_dict(), tmp_path, **EVERY_FORM[form])
    held = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    load_checkpoint_in_model(other, tmp_path)
    assert bits(other) == bits(model)
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == held


@pytest.mark.parametrize("name", [
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter.safetensors",
])  # fmt: skip
def test_a_file_may_be_named_itself_or_found_in_its_directory(tmp_path, name):
    model = nn.Linear(3, 2)
    if "index" in name:
        write_weights(model.state_dict(), tmp_path, 10, "safetensors" in name)
    elif name.endswith(".bin"):
        torch.save(model.state_dict(), tmp_path / name)
    else:
        safetensors.torch.save_file(model.state_dict(), tmp_path / name)
    for path in (tmp_path, tmp_path / name, str(tmp_path / name)):
        other = nn.Linear(3, 2)
        load_checkpoint_in_model(other, path)
        assert bits(other) == bits(model)


def test_safetensors_are_preferred_and_the_single_file_to_an_index(tmp_path):
    first, second, third = (nn.Linear(3, 2) for _ in range(3))
    model = nn.Linear(3, 2)
    torch.save(third.state_dict(), tmp_path / "pytorch_model.bin")
    safetensors.torch.save_file(third.state_dict(), tmp_path / "zzz.safetensors")
    load_checkpoint_in_model(model, tmp_path)
    assert bits(model) == bits(third)
    os.remove(tmp_path / "pytorch_model.bin")
    write_weights(second.state_dict(), tmp_path, 10)
    torch.save(third.state_dict(), tmp_path / "pytorch_model.bin")
    load_checkpoint_in_model(model, tmp_path)
    assert bits(model) == bits(second)
    safetensors.torch.save_file(first.state_dict(), tmp_path / "model.safetensors")
    load_checkpoint_in_model(model, tmp_path)
    assert bits(model) == bits(first)


def test_a_bin_of_an_old_torch_is_read(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    load_checkpoint_in_model(other, tmp_path / "old.bin")
    assert bits(other) == bits(model)


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model))])
def test_what_is_inside_a_wrapper_is_filled(saved, wrap):
    model, folder = saved
    other = Tied()
    load_checkpoint_in_model(wrap(other), folder)
    assert bits(other) == bits(model)


def test_what_is_inside_a_ddp_model_is_filled(saved):
    model, folder = saved
    other = Tied()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapper = nn.parallel.DistributedDataParallel(other)
    load_checkpoint_in_model(wrapper, folder)
    del wrapper
    dist.destroy_process_group()
    assert bits(other) == bits(model)


def test_an_optimizer_trains_on_what_was_read(saved):
    model, folder = saved
    other = Tied()
    optimizer = torch.optim.SGD(other.parameters(), 1.0)
    load_checkpoint_in_model(other, folder, dtype=torch.float64)
    other.body(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert torch.equal(other.body.bias, model.body.bias.double() - 1)


def memory_of_reading(form, folder):
    model = nn.Sequential(*[nn.Linear(1 << 10, 1 << 11, bias=False) for _ in range(16)])  # 8 MiB each
    if form == "checkpoint":
        save_checkpoint(folder, model)
    else:
        write_weights(model.state_dict(), folder, "20MB")
    load_checkpoint_in_model(model, folder)  # imports what it needs
    direct = extra_memory(lambda: load_checkpoint_in_model(model, folder))
    cast = extra_memory(lambda: load_checkpoint_in_model(model, folder, dtype=torch.bfloat16))
    return direct, cast


@pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="the system does not tell the peak of a process")
@pytest.mark.parametrize("form", ["files", "checkpoint"])
def test_reading_takes_no_memory_beside_the_model(tmp_path, form):
    """At most one shard plus a buffer. The peak is that of a process of its own: earlier tests leave gaps in this one."""
    ((direct, cast),) = run_ranks(memory_of_reading, 1, form, tmp_path)
    assert direct < 2 << 20
    assert cast < 20 << 20  # the file's tensor, and the new memory of a parameter


@pytest.mark.parametrize("form", ["files", "checkpoint"])
def test_a_change_is_seen_by_autograd(saved, form):
    model, folder = saved
    if form == "checkpoint":
        save_checkpoint(folder, model)
    versions = [parameter._version for parameter in model.parameters()]
    load_checkpoint_in_model(model, folder)
    assert all(after._version > before for after, before in zip(model.parameters(), versions, strict=True))


# Ties


@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
@pytest.mark.parametrize("share", ["parameter", "memory"])
def test_a_tied_weight_needs_one_of_its_names(tmp_path, kept, share):
    model, other = Tied(), Tied()
    if share == "memory":
        other.head.weight = nn.Parameter(other.embedding.weight.data)
    state = model.state_dict()
    del state[{"embedding.weight": "head.weight", "head.weight": "embedding.weight"}[kept]]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    load_checkpoint_in_model(other, tmp_path, {"": "cpu"}, dtype=torch.bfloat16)
    assert other.head.weight.data_ptr() == other.embedding.weight.data_ptr()
    assert torch.equal(other.head.weight, model.head.weight.bfloat16())


def test_weights_that_are_tied_in_the_file_only_fill_both(saved):
    model, folder = saved
    other = Tied()
    other.head.weight = nn.Parameter(torch.zeros(10, 4))
    load_checkpoint_in_model(other, folder)
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert other.head.weight.data_ptr() != other.embedding.weight.data_ptr()


def test_two_values_for_a_tied_weight_are_refused_and_equal_ones_are_not(tmp_path):
    model, state = Tied(), Tied().state_dict()
    state["head.weight"] = state["embedding.weight"].clone()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    load_checkpoint_in_model(model, tmp_path)
    before = bits(model)
    state["head.weight"][0, 0] += 1
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="head.weight: tied to embedding.weight in the model, but of another value in the file"
    ):
        load_checkpoint_in_model(model, tmp_path)
    assert bits(model) == before


# Checkpoints


def seeded(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tied()


SHARDING = {"rows": Rows, "uneven": Uneven, "flat": Flat}


def saved_in_shards(folder):
    for name, strategy in SHARDING.items():
        accelerator = Accelerator(cpu=True, strategy=strategy())
        model = seeded(0)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.save_state(f"{folder}/{name}")
        accelerator.free_memory()


def test_what_a_strategy_cut_into_shards_is_put_together(tmp_path):
    """Any strategy, any number of ranks."""
    run_ranks(saved_in_shards, 3, str(tmp_path))
    model = seeded(0)
    for name in SHARDING:
        with Checkpoint(tmp_path / name) as checkpoint:
            assert max(len(record["parts"]) for record in checkpoint.index.tensors.values()) >= 2, name
        other, cast = seeded(1), seeded(1)
        load_checkpoint_in_model(other, tmp_path / name)
        assert bits(other) == bits(model), name
        load_checkpoint_in_model(cast, tmp_path / name, dtype="bfloat16", keep_in_fp32_modules=["norm"])
        assert torch.equal(cast.body.weight, model.body.weight.bfloat16())
        assert torch.equal(cast.norm.weight, model.norm.weight)
        assert cast.head.weight is cast.embedding.weight


def test_what_else_a_checkpoint_holds_is_left_alone(tmp_path):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.body(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)
    other, stream = Tied(), torch.get_rng_state()
    load_checkpoint_in_model(other, tmp_path)
    assert bits(other) == bits(model)
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path):
    save_checkpoint(tmp_path, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    model = nn.Sequential(nn.Linear(4, 2), nn.PReLU())
    before = bits(model)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_in_model(model, tmp_path)
    different = [
        "0.weight: float32[2, 3] in the file, float32[2, 4] in the model",
        "1.weight: float32[2, 2] in the file, float32[1] in the model",
    ]
    assert str(error.value).splitlines()[1:-1] == [
        "  not in the model (1): 1.bias",
        f"  different (2): {'; '.join(different)}",
    ]
    assert bits(model) == before


class Remembering(nn.Module):
    """Has what is no tensor in its state dict."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}scale": [1.0]}))


def test_what_a_checkpoint_keeps_whole_is_refused_by_name(tmp_path):
    save_checkpoint(tmp_path, Remembering())
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    model.register_buffer("scale", torch.zeros(1))
    with pytest.raises(
        CheckpointError, match=r"scale: opaque \(list\), no plain tensor, in the file, float32\[1\] in the model"
    ):
        load_checkpoint_in_model(model, tmp_path)


def test_a_checkpoint_of_several_models_is_refused_with_their_sizes(tmp_path):
    save_checkpoint(tmp_path, nn.Linear(3, 2), nn.Linear(3, 2, bias=False))
    with pytest.raises(
        ValueError,
        match=r"this checkpoint has 2: model.0 \(2 tensors\), model.1 \(1 tensors\)\. Choose one .* or restore all with",
    ):
        load_checkpoint_in_model(nn.Linear(3, 2), tmp_path)


def saved_with_a_hook(folder, models, taken):
    """A checkpoint from which a hook of the user's has taken the last models."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*models)
    accelerator.register_save_state_pre_hook(lambda _, weights, __: [weights.pop() for _ in range(taken)])
    accelerator.save_state(folder)
    accelerator.free_memory()


def test_a_model_that_was_left_to_a_hook_is_read_from_what_lies_beside(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    saved_with_a_hook(tmp_path / "all", [nn.Linear(3, 2)], 1)
    with pytest.raises(
        FileNotFoundError, match="a checkpoint, but it has none of the models: all were left to hooks; or"
    ):
        load_checkpoint_in_model(other, tmp_path / "all")
    write_weights(model.state_dict(), tmp_path / "all")
    load_checkpoint_in_model(other, tmp_path / "all")
    assert bits(other) == bits(model)
    saved_with_a_hook(tmp_path / "one", [nn.Linear(3, 2), nn.Linear(3, 2)], 1)
    with pytest.raises(ValueError, match=r"has 2: model.0 \(2 tensors\), model.1 \(left to a hook\)"):
        load_checkpoint_in_model(other, tmp_path / "one")


def test_a_checkpoint_goes_before_the_weights_beside_it_unless_their_file_is_named(saved):
    model, folder = saved
    later, other = Tied(), Tied()
    save_checkpoint(folder, later)
    load_checkpoint_in_model(other, folder)
    assert bits(other) == bits(later)
    load_checkpoint_in_model(other, folder / "model.safetensors")
    assert bits(other) == bits(model)


def test_a_manifest_of_another_kind_is_not_in_the_way_of_weights(saved):
    model, folder = saved
    for content in (b"", b"{}", b"[]", b"\xff", b'{"format": "webpack"}'):
        (folder / "manifest.json").write_bytes(content)
        other = Tied()
        load_checkpoint_in_model(other, folder)
        assert bits(other) == bits(model)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match='it holds a manifest of another kind: its "format" is .webpack.*; or weights'
    ):
        load_checkpoint_in_model(Tied(), folder)


def test_an_unfinished_or_newer_checkpoint_is_refused(tmp_path):
    save_checkpoint(tmp_path, nn.Linear(1, 1))
    path = tmp_path / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="was written by a newer accel-core: its format has version 2"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint: a save into it was not finished; or weights"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


def test_a_flipped_byte_is_found_and_what_it_left_of_the_model_is_said(tmp_path):
    """By hashes, before anything is changed or in the values themselves."""
    model = nn.Linear(30, 20)
    save_checkpoint(tmp_path, model)
    part_seen = False
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for at in range(0, len(content), 1 + len(content) // 40):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            other = nn.Linear(30, 20)
            before = bits(other)
            try:
                load_checkpoint_in_model(other, tmp_path)
            except (CheckpointError, FileNotFoundError) as error:
                partly = "Linear is filled in part: fill it anew before it is used." in str(error)
                part_seen |= partly
                assert partly or bits(other) == before
            else:
                assert path.suffix == ".safetensors"  # in what is no model
                assert bits(other) == bits(model)
        path.write_bytes(content)
    assert part_seen


# What does not fit


def misfit(tmp_path):
    state = Tied().state_dict()
    del state["body.bias"], state["norm.running_mean"]
    state["mask"] = torch.ones(3)
    state["body.weight"] = torch.ones(4, 5)
    state["more"] = torch.ones(1)
    write_weights(state, tmp_path)
    return state


def test_what_does_not_fit_is_listed_before_anything_is_changed(tmp_path):
    """Law 8: no partial restore."""
    misfit(tmp_path)
    model = Tied()
    before = bits(model)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype=torch.bfloat16)
    assert str(error.value) == (
        f"load_checkpoint_in_model() was asked to fill Tied from {tmp_path}, but they do not fit:\n"
        "  missing in the file (2): body.bias; norm.running_mean\n"
        "  not in the model (1): more\n"
        "  different (2): mask: float32[3] in the file, bool[3] in the model; "
        "body.weight: float32[4, 5] in the file, float32[4, 4] in the model\n"
        "Read those of the same model, or pass strict=False to read what fits."
    )
    assert bits(model) == before


def test_without_strict_what_fits_is_read_and_the_rest_is_warned_of_once(tmp_path):
    state = misfit(tmp_path)
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(
        UserWarning, match=r"missing in the file \(2\): body.bias; .*\n.*\n.*\nThe rest was read"
    ) as warned:
        load_checkpoint_in_model(model, tmp_path, strict=False)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    kept = {"body.bias", "norm.running_mean", "mask", "body.weight"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name in kept else state[name]), name


def test_of_many_names_the_first_are_shown(tmp_path):
    write_weights({f"new{i:02}": torch.ones(1) for i in range(20)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"not in the model \(20\): new00; new01; .*; new07 and 12 more\n"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


@pytest.mark.parametrize(
    "theirs, ours, fits",
    [
        (torch.bfloat16, torch.float32, True), (torch.float32, torch.float8_e5m2, True), (torch.int32, torch.int64, True),
        (torch.float32, torch.int64, False), (torch.int64, torch.float32, False), (torch.uint8, torch.bool, True),
        (torch.int8, torch.bool, False), (torch.bool, torch.uint8, False), (torch.complex64, torch.float32, False),
    ],
)  # fmt: skip
def test_values_are_cast_within_a_kind_only(tmp_path, theirs, ours, fits):
    model = nn.Module()
    model.register_buffer("x", torch.zeros(3, dtype=ours))
    write_weights({"x": torch.ones(3, dtype=theirs)}, tmp_path)
    if fits:
        load_checkpoint_in_model(model, tmp_path)
        assert torch.equal(model.x, torch.ones(3, dtype=ours))
        assert model.x.dtype == ours
    else:
        with pytest.raises(
            CheckpointError, match=rf"different \(1\): x: {str(theirs)[6:]}\[3\] in the file, {str(ours)[6:]}"
        ):
            load_checkpoint_in_model(model, tmp_path)


@pytest.mark.parametrize("written", ["safetensors", "torch", "checkpoint"])
def test_masks_of_numbers_are_true_where_a_number_is_not_zero(tmp_path, written):
    old, model = nn.Module(), nn.Module()
    old.register_buffer("mask", torch.tensor([0, 1, 2, 255], dtype=torch.uint8))
    model.register_buffer("mask", torch.zeros(4, dtype=torch.bool))
    accelerator = Accelerator(cpu=True)
    if written == "checkpoint":
        accelerator.prepare(old)
        accelerator.save_state(tmp_path / "saved")
    else:
        accelerator.save_model(old, tmp_path / "saved", safe_serialization=written == "safetensors")
    load_checkpoint_in_model(model, tmp_path / "saved")
    assert model.mask.view(torch.uint8).tolist() == [0, 1, 1, 1]


class WithExtra(nn.Linear):
    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        raise NotImplementedError


def test_state_that_is_no_parameter_or_buffer_is_refused_by_name(tmp_path):
    model = nn.Sequential(WithExtra(2, 2))
    write_weights(model.state_dict(), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"0\._extra_state: neither a parameter nor a buffer of the model, which fills it"
    ):
        load_checkpoint_in_model(model, tmp_path)


def test_parameters_that_are_no_plain_tensors_are_refused_by_name(tmp_path):
    class Codes(torch.Tensor):
        def __tensor_flatten__(self):
            raise NotImplementedError

    model = nn.Module()
    model.register_buffer("codes", torch.ones(2).as_subclass(Codes))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    write_weights({"codes": torch.ones(2), "sparse": torch.eye(2)}, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"codes: a Codes of layout torch.strided in the model; sparse: a .* torch.sparse_coo"
    ):
        load_checkpoint_in_model(model, tmp_path)


def test_a_model_without_memory_is_refused(saved):
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(
        ValueError, match=r"2 of the 2 .* Linear are on the meta device .*: weight, bias\. Call model.to_empty"
    ):
        load_checkpoint_in_model(model, saved[1])


# Arguments


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_one_device_for_the_whole_model_is_where_it_goes(saved, device):
    """The example of the seeds: load_checkpoint_in_model(unwrapped_model, save_directory, device_map={"": device})."""
    model, folder = saved
    other = Tied()
    load_checkpoint_in_model(other, folder, device_map={"": device})
    assert bits(other) == bits(model)


@pytest.mark.parametrize("option", [
    {"device_map": "auto"}, {"device_map": {"embedding": "cpu", "": "cpu"}}, {"device_map": {"": "disk"}}, {"device_map": {}},
    {"offload_folder": "here"}, {"offload_state_dict": True}, {"offload_buffers": True},
])  # fmt: skip
def test_models_in_several_places_are_left_to_their_package(saved, option, monkeypatch):
    """It is called with what was asked for, and named where it is not installed."""
    (name, value), *_ = option.items()
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    with pytest.raises(NotInstalledError) as error:
        load_checkpoint_in_model(Tied(), saved[1], **option)
    assert f"load_checkpoint_in_model() with {name}={value!r} needs accel-big-model" in str(error.value)
    assert how_to_install("accel-big-model") in str(error.value)
    calls = []
    offer = SimpleNamespace(load=lambda: lambda *given, **options: calls.append((given, options)))
    monkeypatch.setattr(loading, "find_default", lambda *_: offer)
    model = Tied()
    load_checkpoint_in_model(nn.DataParallel(model), saved[1], dtype="bfloat16", strict=False, **option)
    ((given, options),) = calls
    usual = {"device_map": None, "offload_folder": None, "offload_state_dict": False, "offload_buffers": False}
    assert given == (model, saved[1])
    assert options == {**usual, "dtype": "bfloat16", "keep_in_fp32_modules": None, "strict": False, **option}


@pytest.mark.parametrize("options, message", [
    ({"device_map": {"": "meta"}}, r"device_map=\{'': 'meta'\} leaves no memory to read weights into\. Pass another"),
    ({"offload_8bit_bnb": True}, "asked for offload_8bit_bnb=True, but 8-bit weights stay in memory. Leave it out"),
    ({"full_state_dict": False}, "asked for full_state_dict=False, but every rank reads what it has by itself"),
    ({"broadcast_from_rank0": True}, "asked for broadcast_from_rank0=True, but every rank reads what it has by itself"),
    ({"dtype": torch.int8}, r"dtype=torch.int8 is no floating dtype\. Pass one such as torch.bfloat16"),
    ({"dtype": "float33"}, "dtype='float33' is no floating dtype"),
    ({"keep_in_fp32_modules": ["norm"]}, r"keep_in_fp32_modules=\['norm'\] was given without dtype"),
    ({"keep_in_fp32_modules": ["nor"], "dtype": "bfloat16"}, "names no weights: nor. The state dict begins with"),
])  # fmt: skip
def test_arguments_that_cannot_be_followed_are_refused(saved, options, message):
    model = Tied()
    before = bits(model)
    with pytest.raises(ValueError, match=message):
        load_checkpoint_in_model(model, saved[1], **options)
    assert bits(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"], ids=str)
def test_floating_tensors_are_cast_but_for_the_modules_named(saved, dtype):
    model, folder = saved
    other = Tied().to(torch.float64)
    other.body.weight.grad = torch.ones(4, 4, dtype=torch.float64)
    parameters = [id(parameter) for parameter in other.parameters()]
    load_checkpoint_in_model(other, folder, dtype=dtype, keep_in_fp32_modules=["norm"])
    assert [id(parameter) for parameter in other.parameters()] == parameters
    assert {name: tensor.dtype for name, tensor in other.state_dict().items()} == {
        **dict.fromkeys(("embedding.weight", "head.weight", "body.weight", "body.bias"), torch.bfloat16),
        **{f"norm.{name}": torch.float32 for name in ("weight", "bias", "running_mean", "running_var")},
        "norm.num_batches_tracked": torch.int64,
        "mask": torch.bool,
    }
    assert other.scratch.dtype == torch.float64  # is in no file
    assert torch.equal(other.body.weight, model.body.weight.bfloat16())
    assert other.body.weight.grad.dtype == torch.bfloat16
    assert other.head.weight is other.embedding.weight


# Files that are none


def test_paths_that_lead_nowhere_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="is neither a file nor a directory. Pass .* that save_model wrote into.*missing"
    ):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path / "missing")
    with pytest.raises(
        FileNotFoundError,
        match=r"a checkpoint, but it has no manifest.json, .*; or weights \(.*, but there is none of these\. Pass",
    ):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    for name in ("b.safetensors", "a.safetensors", "c.pt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match="several files, a.safetensors, b.safetensors, and no index. Pass the file"
    ):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    with pytest.raises(
        ValueError,
        match="c.pt was to be read, which is neither a .safetensors, nor a .bin, nor an .index.json file. Pass one",
    ):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path / "c.pt")


@pytest.mark.parametrize("content", [
    b"", b"not json", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"weight": 3}}', b"\xff",
    b'{"weight_map": {"weight": "/etc/passwd"}}', b'{"weight_map": {"weight": "../saved/model.safetensors"}}',
])  # fmt: skip
def test_an_index_that_is_none_or_leads_elsewhere_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(
        CheckpointError, match="should be an index of weights, a JSON object whose weight_map .* Save or download"
    ):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


def test_an_index_that_lies_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    write_weights(model.state_dict(), tmp_path, 10)
    before = bits(model)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    parts = index["weight_map"]
    path.write_text(json.dumps({"weight_map": {"weight": parts["bias"], "bias": parts["weight"]}}))
    with pytest.raises(
        CheckpointError, match=r"index.json names tensors of model-0000.* that it does not hold: .*\. The files are of"
    ):
        load_checkpoint_in_model(model, tmp_path)
    path.write_text(json.dumps(index))
    os.remove(tmp_path / parts["weight"])
    with pytest.raises(FileNotFoundError, match=parts["weight"]):
        load_checkpoint_in_model(model, tmp_path)
    assert bits(model) == before


def test_damaged_safetensors_are_refused_before_anything_is_changed(tmp_path):
    """As far as a file without hashes shows it."""
    model = nn.Linear(3, 2)
    write_weights(model.state_dict(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    before = bits(model)
    for content in (b"", whole[:5], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:], whole[:8] + b"x" + whole[9:]):
        path.write_bytes(content)
        with pytest.raises(
            CheckpointError, match="should hold weights as safetensors, but it does not: .* damaged or cut short"
        ):
            load_checkpoint_in_model(model, tmp_path)
    assert bits(model) == before


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NEXT = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


@pytest.mark.parametrize("header, nbytes", [
    ({"a": F32}, 4), ({"a": F32}, 12), ({"a": NEXT}, 16), ({"a": F32, "b": F32}, 8), ({"a": F32, "b": F32}, 16), ([F32], 8), ({"a": 3}, 8),
    ({"a": {**F32, "shape": [3]}}, 8), ({"a": {**F32, "shape": [-2]}}, 8), ({"a": {**F32, "shape": [2.0]}}, 8), ({"a": {**F32, "shape": 2}}, 8),
    ({"a": {**F32, "shape": [1 << 63, 4, 0], "data_offsets": [0, 0]}}, 0), ({"a": {**F32, "dtype": "F33"}}, 8), ({"a": {**F32, "dtype": []}}, 8),
    ({"a": {**F32, "data_offsets": [0]}}, 8), ({"a": {**F32, "data_offsets": [8, 0]}}, 8), ({"a": {**F32, "data_offsets": [-8, 0]}}, 8),
    ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8), ({"a": F32, "__metadata__": {"x": 1}}, 8), ({"a": F32, "__metadata__": [1]}, 8),
    ("[" * 20_000, 0), ('{"a": ' * 20_000, 0), ("nul", 0), ("\ud800", 8),
])  # fmt: skip
def test_a_header_that_the_format_forbids_is_refused(tmp_path, header, nbytes):
    """The library refuses the same ones."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode(errors="surrogatepass")
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, framework="pt"):
        pass
    with pytest.raises(CheckpointError, match="should hold weights as safetensors, but it does not: "):
        load_checkpoint_in_model(nn.Linear(1, 1), path)


def test_a_header_that_the_format_allows_is_read(tmp_path):
    """Tensors in any order, several of them empty, spaces after the header, and metadata that is null."""
    empty = {"dtype": "I64", "shape": [0, 3], "data_offsets": [8, 8]}
    text = (
        json.dumps({"__metadata__": None, "weight": NEXT, "bias": F32, "none": empty, "nil": empty}).encode() + b"   "
    )
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + torch.arange(4.0).numpy().tobytes())
    model = nn.LayerNorm(2)
    model.register_buffer("none", torch.zeros(0, 3, dtype=torch.long))
    model.register_buffer("nil", torch.zeros(0, 3, dtype=torch.long))
    load_checkpoint_in_model(model, path)
    assert (model.weight.tolist(), model.bias.tolist()) == ([2, 3], [0, 1])


def test_a_file_that_is_written_to_while_it_is_open_is_not_believed(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(4)}, path)
    with ExitStack() as files:
        stored, target = stored_in(path, files)["weight"], torch.zeros(4)
        stored.read_box(Box.whole((4,)), target)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        with pytest.raises(CheckpointError, match="was written to while its weights are in use. Load them again"):
            stored.read_box(Box.whole((4,)), target)


@pytest.mark.parametrize("aliases", ["x", "[]", '{"a": "b"}', '{"weight": "weight"}', '{"a": ["weight"]}', "{"])
def test_metadata_that_names_no_tensors_is_refused(tmp_path, aliases):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(nn.Linear(1, 1).state_dict(), path, {"aliases": aliases})
    with pytest.raises(
        CheckpointError, match="should name tied weights in its metadata, as JSON .* It is damaged; save or"
    ):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


# Pickles


class Hostile:
    """Makes a directory where it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def hostile_files(folder, harm):
    """Every way in which a pickle could lie where weights are looked for."""
    content = {**nn.Linear(1, 1).state_dict(), "x": Hostile(harm)}
    torch.save(content, folder / "zip.bin")
    torch.save(content, folder / "old.bin", _use_new_zipfile_serialization=False)
    (folder / "plain.bin").write_bytes(pickle.dumps({"x": Hostile(harm)}, 2))
    (folder / "plain.safetensors").write_bytes(pickle.dumps(content, 2))
    (folder / "x.index.json").write_bytes(pickle.dumps(content, 2))
    (folder / "to.bin.index.json").write_text(json.dumps({"weight_map": {"weight": "zip.bin"}}))
    return sorted(path.name for path in folder.iterdir())


def test_a_hostile_pickle_is_refused_in_our_words_and_does_nothing(tmp_path):
    harm, folder, model = tmp_path / "harm", tmp_path / "files", nn.Linear(1, 1)
    folder.mkdir()
    before = bits(model)
    pickle.loads(pickle.dumps(Hostile(harm)))
    assert harm.is_dir()  # it does what it is made for
    harm.rmdir()
    for name in hostile_files(folder, harm):
        with pytest.raises(CheckpointError, match=r"(download (it|the weights) again)") as error:
            load_checkpoint_in_model(model, folder / name)
        assert not harm.exists(), name
        assert "weights_only" not in str(error.value)
        if "bin" in name:
            assert "its pickle asks for posix.mkdir. Nothing of it was run, and nothing was loaded" in str(error.value)
    assert bits(model) == before


def test_a_bin_that_torch_cannot_read_is_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(nn.Linear(1, 1).state_dict(), path)
    for content, kind in (
        (b"", "EOFError"),
        (b"garbage" * 9, "UnpicklingError"),
        (path.read_bytes()[:-30], "RuntimeError"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"torch cannot read it \({kind}\)\. Nothing of it was run"):
            load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


def test_a_bin_that_is_no_state_dict_is_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for content, found in (([torch.ones(1)], "list"), ({1: torch.ones(1)}, "dict")):
        torch.save(content, path)
        with pytest.raises(
            CheckpointError, match=rf"a mapping from names to tensors, but it holds a {found}\. Save model.state"
        ):
            load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # torch 2.15's, in torch.load
def test_entries_of_a_bin_that_are_no_plain_tensors_are_named(tmp_path):
    torch.save({"weight": torch.eye(1).to_sparse(), "bias": [1.0]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match="weight: a Tensor, no plain tensor, in the file, .*; bias: a list, no plain tensor, in"
    ):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)

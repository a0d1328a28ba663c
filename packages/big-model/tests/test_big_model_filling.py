"""Models are filled in the places of a map, from every form of weights, and run when they are dispatched."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from small_models import IDS, Small, empty, seeded

import accel_core
from accel_big_model import (
    align_module_device,
    dispatch_model,
    has_offloaded_params,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    weights,
)
from accel_checkpoint import write_weights
from accel_core import Accelerator, CheckpointError

MAP = {"embedding": "cpu", "middle": "disk", "head": "cpu"}


def net() -> Small:
    return seeded(Small)


def saved_state(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net())
    accelerator.save_state(folder)


FORMS = {
    "folder": lambda folder: write_weights(net().state_dict(), folder),
    "index": lambda folder: write_weights(net().state_dict(), folder, max_shard_size=300),
    "bin": lambda folder: write_weights(net().state_dict(), folder, safe_serialization=False),
    "checkpoint": saved_state,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("places", [MAP, {"": "disk"}, {"embedding": "disk", "middle": "cpu", "head": "cpu"}])
def test_a_model_is_filled_and_then_dispatched(form, places, tmp_path):
    FORMS[form](tmp_path / "weights")
    model = empty(net)
    load_checkpoint_in_model(model, tmp_path / "weights", places, offload_folder=tmp_path / "offloaded")
    assert {parameter.device.type for parameter in model.middle.parameters()} == {
        places.get("middle", "disk").replace("disk", "meta")
    }
    assert model.head.weight is model.embedding.weight
    model = dispatch_model(model, places, offload_dir=tmp_path / "offloaded")
    for _ in range(2):
        assert torch.equal(model(IDS), net()(IDS))


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_written_to_a_folder_needs_its_files_no_longer(form, tmp_path):
    FORMS[form](tmp_path / "weights")
    options = {"device_map": MAP, "offload_folder": tmp_path / "offloaded", "dtype": torch.bfloat16}
    model = load_checkpoint_and_dispatch(empty(net), tmp_path / "weights", **options)
    shutil.rmtree(tmp_path / "weights")
    for _ in range(2):
        assert torch.equal(model(IDS), net().bfloat16()(IDS))


@pytest.fixture
def reads(monkeypatch):
    """The names of weights, as they are read from files."""
    names, stored_in = [], weights.stored_in

    def noting(*given):
        def noted(name, read):
            return lambda *box: names.append(name) or read(*box)

        found = stored_in(*given)
        return {name: each._replace(read_box=noted(name, each.read_box)) for name, each in found.items()}

    monkeypatch.setattr(weights, "stored_in", noting)
    return names


def test_what_is_offloaded_to_main_memory_is_not_read_again(tmp_path, reads, monkeypatch):
    """It computes on another device, for which meta stands here."""
    monkeypatch.setattr("accel_big_model.device_map.check_place", lambda *_: None)
    monkeypatch.setattr("accel_big_model.align_hook._empty", lambda _: None)
    FORMS["folder"](tmp_path)
    places = {"embedding": "meta", "middle.0": "cpu", "middle.1": "disk", "head": "meta"}
    model = load_checkpoint_and_dispatch(empty(net), tmp_path, device_map=places)
    reads.clear()
    assert has_offloaded_params(model.middle[0])
    model(IDS.to("meta"))
    assert set(reads) == {"middle.1.weight", "middle.1.bias"}
    expected = net().middle[0]
    with align_module_device(model.middle[0], "cpu"):
        assert torch.equal(model.middle[0].weight, expected.weight)


@pytest.mark.parametrize(
    "form, name",
    [("folder", "model.safetensors"), ("index", "model.safetensors.index.json"), ("bin", "pytorch_model.bin")],
)
def test_a_file_may_be_named(form, name, tmp_path):
    FORMS[form](tmp_path)
    model = empty(net)
    load_checkpoint_in_model(model, tmp_path / name)
    assert torch.equal(model(IDS), net()(IDS))


def test_what_is_offloaded_is_written_once_and_in_its_dtype(tmp_path):
    FORMS["folder"](tmp_path)
    offloaded = tmp_path / "offloaded"
    load_checkpoint_in_model(empty(net), tmp_path, {"": "disk"}, offloaded, dtype="bfloat16", offload_state_dict=True)
    index = json.loads((offloaded / "index.json").read_text())
    assert [*index] == ["embedding.weight", "middle.0.weight", "middle.0.bias", "middle.1.weight", "middle.1.bias"]
    assert {entry["dtype"] for entry in index.values()} == {"bfloat16"}
    assert {path.stem for path in offloaded.glob("*.dat")} == {*index}


def test_buffers_are_written_where_asked_for(tmp_path):
    FORMS["folder"](tmp_path)
    model = empty(net)
    load_checkpoint_in_model(model, tmp_path, {"": "disk"}, tmp_path / "a", offload_buffers=True)
    assert (tmp_path / "a" / "middle.1.running_mean.dat").is_file()
    assert model.middle[1].running_mean.is_meta
    model = dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "a", offload_buffers=True)
    assert torch.equal(model(IDS), net()(IDS))


def test_modules_stay_wide(tmp_path):
    FORMS["folder"](tmp_path)
    model = empty(net)
    load_checkpoint_in_model(
        model, tmp_path, MAP, tmp_path / "a", dtype=torch.bfloat16, keep_in_fp32_modules=["middle"]
    )
    assert model.embedding.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.middle.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="keep_in_fp32_modules= names no weights of this Small: muddle"):
        load_checkpoint_in_model(empty(net), tmp_path, dtype=torch.bfloat16, keep_in_fp32_modules=["muddle"])


def test_a_model_in_memory_is_filled_where_it_is(tmp_path):
    FORMS["folder"](tmp_path)
    model = Small().eval()
    parameters = [*model.parameters()]
    load_checkpoint_in_model(model, tmp_path)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(IDS), net()(IDS))


def test_what_does_not_fit_is_refused_or_told(tmp_path):
    state = net().state_dict()
    del state["middle.0.bias"]
    write_weights({**state, "other": torch.ones(1)}, tmp_path)
    words = "1 missing: middle.0.bias; 1 unknown to the model: other"
    with pytest.raises(CheckpointError, match=f"{words}. Pass strict=False"):
        load_checkpoint_in_model(empty(net), tmp_path, {"": "cpu"})
    model = Small()
    before = model.middle[0].bias.clone()
    with pytest.warns(UserWarning, match=f"{words}. The rest is read, because of strict=False"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=False)
    assert torch.equal(model.middle[0].bias, before)
    assert torch.equal(model.head.weight, net().head.weight)


def filled(model, files):
    load_checkpoint_in_model(model, files, {"": "cpu"})
    return model


LOADERS = {
    "dispatched": lambda model, files: load_checkpoint_and_dispatch(model, files, {"": "cpu"}),
    "on disk": lambda model, files: load_checkpoint_and_dispatch(model, files, MAP),
    "filled": filled,
}


@pytest.mark.parametrize("name, dtype", [
    ("middle.0.weight", torch.int8),
    ("middle.0.weight", torch.bool),
    ("middle.0.weight", torch.complex64),
    ("middle.1.num_batches_tracked", torch.float32),
    ("middle.1.num_batches_tracked", torch.bool),
])  # fmt: skip
@pytest.mark.parametrize("load", LOADERS.values(), ids=[*LOADERS])
def test_values_of_another_kind_are_refused_or_left(load, name, dtype, tmp_path):
    """Codes of quantised weights, say, which are no weights without their scales."""
    state = net().state_dict()
    write_weights({**state, name: torch.ones(state[name].shape, dtype=dtype)}, tmp_path)
    words = rf"1 different: {name}: {str(dtype)[6:]}\[.*\] in the file, {str(state[name].dtype)[6:]}\[.*\] in the model"
    with pytest.raises(CheckpointError, match=f"{words}. Pass strict=False"):
        load(empty(net), tmp_path)
    model = Small()
    kept = model.state_dict()[name].clone()
    with pytest.warns(UserWarning, match=f"{words}. The rest is read"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=False)
    assert torch.equal(model.state_dict()[name], kept)
    assert torch.equal(model.middle[0].bias, state["middle.0.bias"])


@pytest.mark.parametrize("load", LOADERS.values(), ids=[*LOADERS])
def test_values_of_one_kind_are_cast(load, tmp_path):
    write_weights(seeded(Small).double().state_dict(), tmp_path)
    assert torch.equal(load(empty(net), tmp_path)(IDS), net()(IDS))


def test_a_value_that_is_no_plain_tensor_is_refused(tmp_path):
    state = net().state_dict()
    torch.save({**state, "middle.1.num_batches_tracked": [1]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match="1 different: middle.1.num_batches_tracked: a list, no plain tensor, in the file, int64"
    ):
        load_checkpoint_in_model(empty(net), tmp_path, {"": "cpu"})


@pytest.mark.parametrize("options, message", [
    ({"device_map": MAP}, r"device_map has middle on 'disk', and nothing says where there. Pass offload_folder=, or call load_"),
    ({"device_map": {}}, "device_map gives no place to embedding.weight"),
    ({"device_map": {"": "cpu"}, "dtype": "int7"}, "dtype='int7' is no floating dtype"),
    ({"device_map": "quick"}, "device_map='quick' is none of auto"),
])  # fmt: skip
def test_arguments_that_cannot_be_followed_are_refused(options, message, tmp_path):
    FORMS["folder"](tmp_path)
    with pytest.raises(ValueError, match=message):
        load_checkpoint_in_model(empty(net), tmp_path, **options)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    FORMS["folder"](tmp_path)
    with pytest.raises(OSError, match="model.safetensors"):
        load_checkpoint_in_model(empty(net), tmp_path, MAP, tmp_path / "model.safetensors")


def test_the_function_of_the_core_serves_maps(tmp_path):
    FORMS["folder"](tmp_path)
    model = empty(net)
    accel_core.load_checkpoint_in_model(model, tmp_path, MAP, offload_folder=tmp_path / "offloaded", dtype="bfloat16")
    assert torch.equal(dispatch_model(model, MAP, offload_dir=tmp_path / "offloaded")(IDS), net().bfloat16()(IDS))

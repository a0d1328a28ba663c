"""What is wrong with maps, files and folders is said, with the place and with what to do."""

from __future__ import annotations

import json
import os

import pytest
import torch
from small_models import loaded, seeded
from torch import nn

from accel_big_model import (
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    offload_state_dict,
)
from accel_checkpoint import write_weights
from accel_core import CheckpointError


def net() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


X = torch.ones(1, 4)


@pytest.fixture
def folder(tmp_path):
    write_weights(net().state_dict(), tmp_path)
    return tmp_path


def on_disk(checkpoint) -> nn.Module:
    return loaded(net, checkpoint, {"": "disk"})


def test_a_file_that_is_written_to_in_the_middle_of_a_run(folder):
    model = on_disk(folder)
    expected = model(X)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    with open(path, "r+b") as file:  # of the same length
        file.seek(len(content) - 8)
        file.write(b"\x01" * 8)
    with pytest.raises(CheckpointError, match="model.safetensors was written to while"):
        model(X)
    assert torch.equal(on_disk(folder)(X), on_disk(folder)(X))
    assert not torch.equal(on_disk(folder)(X), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_is_cut_short_in_the_middle_of_a_run(name, tmp_path):
    write_weights(net().state_dict(), tmp_path, safe_serialization=name.endswith(".safetensors"))
    model = on_disk(tmp_path)
    model(X)
    os.truncate(tmp_path / name, 100)
    with pytest.raises(CheckpointError, match=rf"{name} (was written to while|has become shorter)"):
        model(X)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_written_to_in_the_middle_of_a_run(replaced, tmp_path):
    model = disk_offload(net(), tmp_path)
    model(X)
    path = tmp_path / "1.weight.dat"
    content = bytes(reversed(path.read_bytes()))
    if replaced:
        path.unlink()
        (tmp_path / "other").write_bytes(b"")  # so that its number is not given again
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"1.weight.dat was written to while .* before, .* now\). .* rename it"):
        model(X)


@pytest.mark.parametrize("how", ["replace", "remove"])
def test_a_file_that_is_replaced_or_removed_is_read_on(how, folder):
    model = on_disk(folder)
    path = folder / "model.safetensors"
    if how == "replace":
        other = folder / "other"
        other.write_bytes(b"\0" * path.stat().st_size)
        other.rename(path)
    else:
        path.unlink()
    for _ in range(2):
        assert torch.equal(model(X), net()(X))


def test_a_checkpoint_that_is_damaged_in_the_middle_of_a_run(tmp_path):
    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net())
    accelerator.save_state(tmp_path / "saved")
    model = on_disk(tmp_path / "saved")
    expected = model(X)
    assert torch.equal(expected, net()(X))
    (data,) = (tmp_path / "saved").glob("data-*/*.safetensors")
    content = bytearray(data.read_bytes())
    for at in range(0, len(content), 64):
        content[at] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="data-"):
        model(X)


def test_a_folder_that_cannot_be_written(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for offload in (lambda: dispatch_model(net(), {"": "disk"}, offload_dir=path), lambda: disk_offload(net(), path)):
        with pytest.raises(OSError, match=str(path)):
            offload()
    if os.geteuid():
        os.chmod(tmp_path, 0o500)
        with pytest.raises(PermissionError, match="inner"):
            disk_offload(net(), tmp_path / "inner")


def test_a_folder_of_another_model(tmp_path):
    offload_state_dict(tmp_path, {"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)})
    with pytest.raises(ValueError, match=rf"{tmp_path} lacks 1.weight, 1.bias, which .*Pass an empty folder"):
        dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)
    offload_state_dict(tmp_path, {"1.weight": torch.ones(5, 5), "1.bias": torch.ones(4)})
    with pytest.raises(ValueError, match=rf"{tmp_path} has 1.weight in another shape, \(5, 5\) instead of \(4, 4\)"):
        disk_offload(net(), tmp_path)


def test_a_folder_whose_index_is_damaged(tmp_path):
    dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)
    (tmp_path / "index.json").write_text('{"0.weight"')
    with pytest.raises(json.JSONDecodeError):
        dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)


@pytest.mark.parametrize("places", [{"0": "cpu"}, {"0": "cpu", "1": "disk", "2": "cpu"}])
def test_a_map_that_leaves_modules_out_or_names_others(places, folder):
    for spread in (
        lambda: dispatch_model(net(), places, offload_dir=folder / "offloaded"),
        lambda: load_checkpoint_and_dispatch(net(), folder, device_map=places),
    ):
        with pytest.raises(ValueError, match=r"gives no place to 1.weight|names '2', and Sequential has no such part"):
            spread()
    assert not (folder / "offloaded").exists()


def test_a_map_of_places_that_are_none(folder):
    with pytest.raises((RuntimeError, ValueError), match="nowhere"):
        load_checkpoint_and_dispatch(net(), folder, device_map={"0": "nowhere", "1": "cpu"})


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=rf"should hold a checkpoint.*or weights.*Pass the file itself.*{tmp_path}"
    ):
        on_disk(tmp_path)


@pytest.mark.parametrize("content", [{}, {"0.weight": "model.safetensors"}, {"metadata": {}}, []])
def test_an_index_without_a_weight_map(content, folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"index.json should be an index of weights, a JSON object whose weight_map"
    ):
        on_disk(index)

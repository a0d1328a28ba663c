"""How weights are read from their files: once, checked each time, into memory that nobody else uses."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from accel_big_model import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    offload_state_dict,
    set_module_tensor_to_device,
)
from accel_big_model.weights import StoredWeights
from accel_checkpoint import write_weights
from accel_core import CheckpointError

WIDTH = 1100  # 4.6 MiB a layer: large enough for memory that is used again, and for two threads


class Layers(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Layers().requires_grad_(False)


@pytest.fixture
def file(model, tmp_path):
    write_weights(model.state_dict(), tmp_path)
    return tmp_path / "model.safetensors"


def loaded(path, places, **options):
    with init_empty_weights():
        model = Layers().requires_grad_(False)
    return load_checkpoint_and_dispatch(model, path, places, **options)


@pytest.fixture
def reads(monkeypatch):
    """The names that are read from files."""
    found, read = [], StoredWeights.read

    def noting(self, name, *args, **options):
        found.append(name)
        return read(self, name, *args, **options)

    monkeypatch.setattr(StoredWeights, "read", noting)
    return found


def test_loading_reads_what_stays_in_memory_once_and_nothing_else(file, reads):
    loaded(file, {"0": "cpu", "1": "disk", "2": "cpu", "3": "disk"})
    assert sorted(reads) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_a_question_for_a_name_reads_nothing(file, reads, tmp_path, monkeypatch):
    entry = {"safetensors_file": str(file), "weight_name": "1.bias"}
    for weights in (StoredWeights(file), OffloadedWeightsLoader(index={"0.bias": {}, "1.bias": entry})):
        assert "1.bias" in weights
        assert "7.bias" not in weights
        assert "bias" in PrefixedDataset(weights, "1.")
        assert "bias" not in PrefixedDataset(weights, "7.")
    assert reads == []


def test_a_forward_reads_each_weight_once(file, reads, model):
    dispatched = loaded(file, {"": "disk"})
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        assert torch.equal(dispatched(x), model(x))
    assert set(reads) == set(model.state_dict())
    assert all(reads.count(name) in (3, 4) for name in reads)  # one more for the next forward, which begins with it


@pytest.mark.parametrize(("harm", "message"), [
    (lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns + 1)), "was written to while its weights are in use"),
    (lambda path: os.truncate(path, path.stat().st_size // 2), "has become shorter while it was read"),
])  # fmt: skip
def test_a_file_that_is_changed_between_forwards_is_not_believed(file, harm, message):
    dispatched = loaded(file, {"": "disk"})
    dispatched(torch.ones(1, WIDTH))
    harm(file)
    with pytest.raises(CheckpointError, match=message):
        dispatched(torch.ones(1, WIDTH))
    with pytest.raises(CheckpointError, match=message):  # and again
        dispatched(torch.ones(1, WIDTH))


def test_a_file_that_is_replaced_is_read_as_it_was(file, model, tmp_path):
    dispatched = loaded(file, {"": "disk"})
    other = tmp_path / "other"
    write_weights(Layers().state_dict(), other)
    (other / "model.safetensors").replace(file)
    x = torch.ones(1, WIDTH)
    assert torch.equal(dispatched(x), model(x))


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_weight_that_is_kept_after_its_call_keeps_its_value(file, form, model, tmp_path):
    """Its memory is not given to the next one."""
    kept = []
    if form == "file":
        dispatched = loaded(file, {"": "disk"})
    else:
        from accel_big_model import disk_offload

        dispatched = disk_offload(loaded(file, {"": "cpu"}), tmp_path / "folder", "cpu")
    for layer in dispatched:
        inner = layer._old_forward

        def keeping(x, layer=layer, inner=inner):
            kept.append(layer.weight[:5])
            return inner(x)

        layer._old_forward = keeping
    for _ in range(3):
        dispatched(torch.ones(1, WIDTH))
    assert len(kept) == 12
    assert all(torch.equal(part, model[index % 4].weight[:5]) for index, part in enumerate(kept))


def test_attributes_and_gradients_of_a_weight_are_as_they_were_set(file):
    dispatched, seen = loaded(file, {"": "disk"}), []
    dispatched[1].weight.note = "mine"
    dispatched[1].weight.requires_grad_(True)
    inner = dispatched[1]._old_forward

    def looking(x):
        weight = dispatched[1].weight
        seen.append((type(weight), weight.note, weight.requires_grad, weight.shape))
        return inner(x)

    dispatched[1]._old_forward = looking
    dispatched(torch.ones(1, WIDTH))
    dispatched[1].weight.requires_grad_(False)
    dispatched(torch.ones(1, WIDTH))
    shape = torch.Size([WIDTH, WIDTH])
    assert seen == [(nn.Parameter, "mine", True, shape), (nn.Parameter, "mine", False, shape)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_on_disk_are_cast_as_those_in_memory(file, dtype):
    x = torch.ones(3, WIDTH, dtype=dtype)
    assert torch.equal(loaded(file, {"": "disk"}, dtype=dtype)(x), loaded(file, {"": "cpu"}, dtype=dtype)(x))


def test_a_folder_of_another_shape_is_refused(tmp_path):
    offload_state_dict(tmp_path, {"weight": torch.ones(3, 2)})
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ValueError, match=r"weight has shape \(2, 2\), and value= has \(3, 2\)"):
        set_module_tensor_to_device(nn.Linear(2, 2), "weight", "cpu", value=weights["weight"])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_large_tensors_of_any_form_are_whole(tmp_path, form, threads, monkeypatch):
    """Also where gradients are forbidden for good, and where the tensor has fewer rows than there are threads."""
    monkeypatch.setattr("accel_big_model.weights._LOADING", threads)
    torch.manual_seed(2)
    tensors = {
        "a": torch.randn(1, 1 << 20),
        "b": torch.randn(3, 1 << 19),
        "c": torch.randn(1 << 20),
        "d": torch.randn(5, 600, 700),
    }
    write_weights(tensors, tmp_path, safe_serialization=form == "safetensors")
    stored = StoredWeights(tmp_path)
    with torch.inference_mode():
        assert all(torch.equal(stored[name], value) for name, value in tensors.items())
        assert all(torch.equal(stored.lend(name), value) for name, value in tensors.items())

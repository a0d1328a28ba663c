"""A rank that has parts of a model reads those parts, whatever the files are and however they are cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from accel_checkpoint import flat_range, load_checkpoint_in_model, load_weights, write_weights
from accel_checkpoint.weights import sources
from accel_core import Accelerator, CheckpointError
from accel_core.api.layouts import Alias, Box, Elementwise, Opaque, Piece, Replicated

SHAPES = {"matrix": (6, 8), "cube": (4, 3, 5), "row": (7,), "number": (), "nothing": (0, 3)}
FORMS = ("one file", "parts", "bin", "checkpoint")
CUTS = {
    "whole": lambda shape: [Box.whole(shape)],
    "rows": lambda shape: [Box((shape[0] // 3, *(0 for _ in shape[1:])), (shape[0] // 3, *shape[1:]))],
    "columns": lambda shape: [Box((*(0 for _ in shape[1:]), shape[-1] // 2), (*shape[:-1], shape[-1] // 2))],
    "a block": lambda shape: [Box(tuple(size // 3 for size in shape), tuple(-(-size // 3) for size in shape))],
    "a flat range": lambda shape: flat_range(shape, 3, max(torch.Size(shape).numel() - 2, 3)),
    "nothing": lambda shape: [],
}


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("steps", torch.tensor(7))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("saved"), Shapes()
    state = model.state_dict()
    write_weights(state, folder / "one file")
    write_weights(state, folder / "parts", 150)
    write_weights(state, folder / "bin", safe_serialization=False)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(folder / "checkpoint")
    accelerator.free_memory()
    return folder, {name: value.detach() for name, value in state.items()}


def cut(shape, boxes, dtype=torch.float32):
    """The entry of a rank that has these boxes."""
    return Elementwise(shape, dtype, tuple(Piece(box, torch.zeros(box.sizes, dtype=dtype)) for box in boxes))


def state_of(boxes_of, dtype=torch.float32):
    shapes = SHAPES if boxes_of in (CUTS["whole"], CUTS["nothing"]) else {"matrix": (6, 8), "cube": (4, 3, 5)}
    wholes = {name: cut(shape, [Box.whole(shape)]) for name, shape in SHAPES.items()}
    return {
        **wholes,
        **{name: cut(shape, boxes_of(shape), dtype) for name, shape in shapes.items()},
        "steps": Replicated(torch.tensor(0)),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CUTS)
def test_every_box_is_read_from_every_form(saved, form, name):
    folder, values = saved
    for dtype in (torch.float32, torch.bfloat16):
        state = state_of(CUTS[name], dtype)
        load_weights(state, folder / form, "Shapes")
        for key, entry in state.items():
            for box, data in entry.pieces if isinstance(entry, Elementwise) else [(Box((), ()), entry.data)]:
                assert torch.equal(data, values[key][box.slices].to(data.dtype)), (key, box)


def test_only_what_is_asked_for_is_read(saved, monkeypatch):
    """Two of six rows of a matrix, in one piece; and of each of its rows, two columns."""
    folder, _ = saved
    counted = []

    def counting(file, position, place):
        counted.append(len(place))
        return read(file, position, place)

    read = sources.SafetensorsFile.read
    monkeypatch.setattr(sources.SafetensorsFile, "read", counting)
    others = {name: cut(shape, []) for name, shape in SHAPES.items()}
    for boxes, expected in (([Box((2, 0), (2, 8))], [64]), ([Box((0, 4), (6, 2))], [8] * 6)):
        counted.clear()
        state = {**others, "matrix": cut((6, 8), boxes), "steps": Replicated(torch.tensor(0))}
        load_weights(state, folder / "one file", "Shapes")
        assert sorted(counted) == sorted([*expected, 8])  # and the number of steps


def test_a_tie_needs_one_of_its_names_and_one_value(tmp_path, monkeypatch):
    weight = torch.randn(5, 4)
    monkeypatch.setattr("accel_checkpoint.weights.loading._SLAB", 20)  # so that it is compared row by row
    for names in (["first"], ["second"], ["first", "second"]):
        safetensors.torch.save_file({name: weight.clone() for name in names}, tmp_path / "model.safetensors")
        state = {"first": cut((5, 4), [Box((3, 0), (2, 4))]), "second": Alias("first")}
        load_weights(state, tmp_path, "Tied")
        assert torch.equal(state["first"].pieces[0].data, weight[3:])
    other = weight.clone()
    other[0, 0] += 1  # on another rank
    safetensors.torch.save_file({"first": weight, "second": other}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="second: tied to first in the model, but of another value in the file"):
        load_weights(state, tmp_path, "Tied")


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(4, 2), "c": torch.ones(1)}, tmp_path / "model.safetensors")
    state = {"a": cut((6, 2), [Box((0, 0), (3, 2))]), "b": cut((2,), []), "codes": Opaque({}, "dict")}
    with pytest.raises(CheckpointError) as error:
        load_weights(state, tmp_path, "Net")
    assert str(error.value).splitlines() == [
        f"load_checkpoint_in_model() was asked to fill Net from {tmp_path}, but they do not fit:",
        "  missing in the file (2): b; codes",
        "  not in the model (1): c",
        "  different (1): a: float32[4, 2] in the file, float32[6, 2] in the model",
        "Pass the weights of the same model.",
    ]
    assert not state["a"].pieces[0].data.any()


def test_a_value_that_is_no_tensor_of_the_model_says_so(tmp_path):
    safetensors.torch.save_file({"codes": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="codes: neither a parameter nor a buffer of the model"):
        load_weights({"codes": Opaque({}, "dict")}, tmp_path, "Net")


def test_a_file_that_is_cut_short_while_it_is_read_leaves_the_model_filled_in_part(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(4, 2)}, path)

    read = sources.SafetensorsFile.read

    def short(file, position, place):
        os.truncate(path, path.stat().st_size - 1)
        read(file, position, place)

    monkeypatch.setattr(sources.SafetensorsFile, "read", short)
    with pytest.raises(CheckpointError, match=r"has become shorter while it was read\. .* Net is filled in part"):
        load_weights({"a": cut((4, 2), [Box((1, 0), (2, 2))])}, path, "Net")


class Half(nn.Module):
    """As a strategy leaves a model of which this rank has the lower half."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def accel_state(self):
        return {"weight": Elementwise((4, 3), torch.float32, (Piece(Box((2, 0), (2, 3)), self.weight.detach()),))}


def test_a_model_says_itself_which_parts_it_has(tmp_path):
    weight = torch.randn(4, 3)
    safetensors.torch.save_file({"weight": weight}, tmp_path / "model.safetensors")
    model = Half()
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.weight, weight[2:])
    other = nn.DataParallel(Half())
    load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(other.module.weight, weight[2:])
    safetensors.torch.save_file({"weight": weight + 1, "more": weight}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="not in the model"):
        load_checkpoint_in_model(model, tmp_path, strict=False)
    assert torch.equal(model.weight, weight[2:] + 1)


@pytest.mark.parametrize("options, named", [
    ({"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16"),
    ({"device_map": {"": "cpu"}}, r"device_map=\{'': 'cpu'\}"),
    ({"dtype": "bfloat16", "keep_in_fp32_modules": ["norm"]}, r"dtype='bfloat16' and keep_in_fp32_modules=\['norm'\]"),
])  # fmt: skip
def test_shards_stay_where_they_are_and_as_they_are(tmp_path, options, named):
    with pytest.raises(
        ValueError, match=f"was asked for {named}, but this model is cut into shards.* Choose dtypes before"
    ):
        load_checkpoint_in_model(Half(), Path(tmp_path), **options)

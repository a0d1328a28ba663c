"""Tied weights that are offloaded: read as seldom as memory allows, and one object again afterwards."""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch
from small_models import IDS, Net, loaded, seeded
from torch import nn

from accel_big_model import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
    weights,
)
from accel_checkpoint import write_weights
from accel_core import CheckpointError

SOME = {"embedding": "cpu", "blocks": "disk", "norm": "cpu", "head": "disk"}


def net() -> Net:
    return seeded(partial(Net, nn.LayerNorm)).train()


@pytest.fixture
def files(tmp_path):
    write_weights(net().state_dict(), tmp_path)
    return tmp_path


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


def test_tied_weights_are_read_once_a_pass(files, reads):
    """The last module of a pass has the weight that the first one needs next."""
    model = loaded(net, files, {"": "disk"})
    with torch.no_grad():
        model(IDS), model(IDS)
        reads.clear()
        for _ in range(5):
            assert torch.equal(model(IDS), net()(IDS))
    assert sum(name in ("embedding.weight", "head.weight") for name in reads) == 5


def test_tied_weights_are_read_once_for_a_module_that_has_several_names(files, reads):
    model = loaded(net, files, {"": "disk"}, preload_module_classes=["Net"])
    reads.clear()
    seen = []
    model.norm.register_forward_pre_hook(
        lambda *_: seen.append((model.embedding.weight.data_ptr(), model.head.weight.data_ptr()))
    )
    assert torch.equal(model(IDS), net()(IDS))
    assert sum(name in ("embedding.weight", "head.weight") for name in reads) == 1
    assert seen[0][0] == seen[0][1]


def test_tied_weights_are_not_read_where_one_name_is_in_memory(files, reads):
    model = loaded(net, files, SOME)
    reads.clear()
    for trained in (model, copy.deepcopy(model)):
        with torch.no_grad():
            trained.embedding.weight.mul_(2)  # the head computes with it, too
            expected = net()
            expected.embedding.weight.mul_(2)
            assert torch.equal(trained(IDS), expected(IDS))
            trained.embedding.weight.div_(2)
    assert not {"embedding.weight", "head.weight"} & set(reads)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embedding.weight


def test_tied_weights_get_gradients_where_one_name_is_in_memory(files):
    model = loaded(net, files, {"embedding": "cpu", "blocks": "cpu", "norm": "cpu", "head": "disk"})
    expected = net()
    for each in (model, expected):
        for _ in range(2):
            each(IDS).square().sum().backward()
    assert torch.equal(model.embedding.weight.grad, expected.embedding.weight.grad)


@pytest.mark.parametrize("offload", [
    lambda folder: cpu_offload(net()),
    lambda folder: disk_offload(net(), folder),
    lambda folder: dispatch_model(net(), {"": "disk"}, offload_dir=folder),
    lambda folder: dispatch_model(net(), SOME, offload_dir=folder),
])  # fmt: skip
def test_tied_weights_are_one_again_without_hooks(offload, tmp_path):
    model = offload(tmp_path)
    model(IDS)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(IDS), net()(IDS))


def test_tied_weights_are_one_while_they_are_away(files):
    model = loaded(net, files, {"": "disk"})
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(net().parameters()))
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("preload", [None, ["Net"]])
@pytest.mark.parametrize("places", [{"": "disk"}, SOME])
def test_all_weights_are_read_for_writing(places, preload, files):
    model = loaded(net, files, places, preload_module_classes=preload)
    state, expected = get_state_dict_offloaded_model(model), net().state_dict()
    model(IDS)  # whose weights come and go
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


def test_buffers_of_a_module_that_has_several_names_are_read_for_writing(tmp_path):
    norm = seeded(lambda: nn.BatchNorm1d(8))
    norm.running_mean.uniform_()
    expected = {name: value.clone() for name, value in nn.Sequential(norm, norm).state_dict().items()}
    model = dispatch_model(nn.Sequential(norm, norm), {"": "disk"}, offload_dir=tmp_path, offload_buffers=True)
    state = get_state_dict_offloaded_model(model)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert all(state[f"1.{name}"] is state[f"0.{name}"] for name in norm.state_dict())


def test_all_that_does_not_fit_is_told_at_once(tmp_path):
    """A tie that disagrees hides neither missing weights nor others."""
    state = net().state_dict()
    del state["blocks.0.0.bias"]
    write_weights({**state, "head.weight": state["head.weight"] + 1, "other": torch.ones(1)}, tmp_path)
    words = (
        "1 missing: blocks.0.0.bias; 1 unknown to the model: other; 1 different: head.weight: tied to "
        "embedding.weight in the model, but of another value in the file"
    )
    with pytest.warns(UserWarning, match=f"{words}. The rest is read"):
        load_checkpoint_and_dispatch(net(), tmp_path, strict=False)
    with pytest.raises(CheckpointError, match=f"{words}. Pass strict=False"):
        load_checkpoint_and_dispatch(net(), tmp_path)


def test_tied_weights_are_compared_bit_by_bit(tmp_path):
    state = net().state_dict()
    value = state["embedding.weight"].clone()
    value[0] = float("nan")
    write_weights({**state, "embedding.weight": value, "head.weight": value.clone()}, tmp_path)
    model = load_checkpoint_and_dispatch(net(), tmp_path)
    assert torch.equal(model.head.weight.view(torch.uint8), value.view(torch.uint8))
    write_weights({**state, "head.weight": state["head.weight"].bfloat16()}, tmp_path)
    with pytest.raises(CheckpointError, match="1 different: head.weight: tied to embedding.weight"):
        load_checkpoint_and_dispatch(net(), tmp_path)


def test_tied_weights_are_found_under_any_name_in_an_index(tmp_path):
    dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    del index["head.weight"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert torch.equal(dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)(IDS), net()(IDS))

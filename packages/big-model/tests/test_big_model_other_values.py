"""Offloaded weights compute with the values that the model was given, or an error says which are not used."""

from __future__ import annotations

import pytest
import torch
from small_models import IDS, Net, Small, empty, loaded, seeded
from torch import nn

from accel_big_model import (
    align_module_device,
    attach_layerwise_casting_hooks,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    loading,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from accel_checkpoint import write_weights


class Plain(Small):
    """Of which nothing is tied."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)


def net(build=Plain) -> nn.Module:
    return seeded(build)


@pytest.fixture
def files(tmp_path):
    write_weights(net().state_dict(), tmp_path / "files")
    return tmp_path / "files"


OFFLOADED = {
    "main memory": lambda folder: cpu_offload(net()),
    "disk": lambda folder: disk_offload(net(), folder / "offloaded"),
    "both": lambda folder: dispatch_model(
        net(), {"embedding": "cpu", "middle": "disk", "head": "cpu"}, offload_dir=folder / "offloaded"
    ),
}


@pytest.mark.parametrize("offloaded", OFFLOADED)
def test_a_model_that_is_dispatched_is_not_filled(offloaded, files, tmp_path):
    model = OFFLOADED[offloaded](tmp_path)
    for fill in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
        with pytest.raises(ValueError, match=r"is dispatched already.*Build the model anew"):
            fill(model, files, {"": "cpu"})
    assert torch.equal(model(IDS), net()(IDS))


GIVEN = {
    "assigned by load_state_dict": lambda model: model.load_state_dict(net().state_dict(), assign=True),
    "assigned": lambda model: setattr(model.middle[0], "weight", nn.Parameter(torch.zeros(8, 8))),
    "taken away": lambda model: setattr(model.middle[0], "bias", None),
    "by name": lambda model: set_module_tensor_to_device(model, "middle.0.weight", "cpu", value=torch.zeros(8, 8)),
}


@pytest.mark.parametrize("given", GIVEN)
def test_another_value_of_an_offloaded_weight_is_refused(given, tmp_path):
    model = disk_offload(net(), tmp_path)
    model(IDS)
    GIVEN[given](model)
    with pytest.raises(RuntimeError, match=r"(weight|bias) of \w+ is offloaded, and was given another value"):
        model(IDS)


def test_a_call_with_other_weights_is_refused_and_leaves_the_model_as_it_was(tmp_path):
    model = disk_offload(net(), tmp_path)
    zeros = {name: torch.zeros_like(value) for name, value in net().state_dict().items()}
    with pytest.raises(RuntimeError, match="was given another value"):
        torch.func.functional_call(model, zeros, (IDS,))
    assert torch.equal(model(IDS), net()(IDS))


def test_a_folder_is_that_of_the_last_model_alone(files, tmp_path):
    """The first one has a weight under a name that is another's in the second one."""
    offloaded = tmp_path / "offloaded"
    loaded(Plain, files, {"": "disk"}, offload_folder=offloaded)
    write_weights(net(Small).state_dict(), tmp_path / "tied")
    model = loaded(Small, tmp_path / "tied", {"": "disk"}, offload_folder=offloaded)
    assert torch.equal(model.eval()(IDS), net(Small)(IDS))


def test_a_folder_that_was_half_written_again_has_no_values(files, tmp_path, monkeypatch):
    offloaded = tmp_path / "offloaded"
    load_checkpoint_in_model(empty(Plain), files, {"": "disk"}, offloaded)
    write_weights(seeded(Plain, seed=4).state_dict(), tmp_path / "others")
    written, write = [], loading.offload_weight

    def until_the_disk_is_full(*given):
        if len(written) == 2:
            raise OSError("No space left on device")
        written.append(write(*given))

    monkeypatch.setattr(loading, "offload_weight", until_the_disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        load_checkpoint_in_model(empty(Plain), tmp_path / "others", {"": "disk"}, offloaded)
    with pytest.raises(ValueError, match="has no value"):
        dispatch_model(empty(Plain), {"": "disk"}, offload_dir=offloaded)


@pytest.mark.parametrize(("round_off", "fits"), [(False, False), (True, True)])
def test_a_folder_of_less_precision_is_that_of_a_model_whose_values_it_has(round_off, fits, files, tmp_path):
    load_checkpoint_in_model(empty(Plain), files, {"": "disk"}, tmp_path / "offloaded", dtype="bfloat16")
    model = net().bfloat16().float() if round_off else net()
    if not fits:
        with pytest.raises(ValueError, match="has other values of embedding.weight"):
            disk_offload(model, tmp_path / "offloaded")
        return
    expected = model(IDS)
    assert torch.equal(disk_offload(model, tmp_path / "offloaded")(IDS), expected)


def test_what_the_files_lack_cannot_be_on_disk(tmp_path):
    state = net().state_dict()
    del state["middle.0.weight"]
    write_weights(state, tmp_path)
    with (
        pytest.warns(UserWarning, match="1 missing: middle.0.weight"),
        pytest.raises(ValueError, match=r"middle.0.weight of Plain would be read from 'disk', and the files have no"),
    ):
        loaded(Plain, tmp_path, {"": "disk"}, strict=False)


@pytest.mark.parametrize("offloaded", ["main memory", "disk", "both"])
def test_a_module_that_was_added_without_memory_does_not_compute(offloaded, tmp_path):
    """As adapters that take the device of the layer which they are for."""
    model = OFFLOADED[offloaded](tmp_path)
    model(IDS)
    model.middle.append(nn.Linear(8, 8, device="meta"))
    with pytest.raises(RuntimeError, match=r"weight of Linear is on the meta device and has no value.*add modules"):
        model(IDS)


@pytest.mark.parametrize("way", ["in place", "through .data"])
def test_writing_to_a_weight_that_is_only_lent_is_refused(way, tmp_path):
    model = disk_offload(net(), tmp_path)
    with pytest.raises(RuntimeError, match="wrote to"), align_module_device(model.head, "cpu"), torch.no_grad():
        (model.head.weight if way == "in place" else model.head.weight.data).fill_(0)
    with pytest.raises(ValueError, match="asked for 'meta'"), align_module_device(model.head, "meta"):
        pass
    assert torch.equal(model(IDS), net()(IDS))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([True, False, True, False]))

    def forward(self, x):
        return self.layer(x) * ~self.mask


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_mask_that_was_saved_as_numbers_is_a_mask(place, folder, tmp_path):
    state, x = net(Masked).state_dict(), torch.ones(2, 4)
    write_weights(state | {"mask": state["mask"].to(torch.uint8)}, tmp_path)
    into = tmp_path / "offloaded" if folder else None
    model = loaded(Masked, tmp_path, {"": place}, offload_buffers=True, offload_folder=into)
    assert torch.equal(model(x), net(Masked)(x))


def test_recurrent_layers_keep_nothing_of_what_was_brought(tmp_path):
    lstm = seeded(lambda: nn.LSTM(4, 8, num_layers=2))
    x = torch.ones(3, 4)
    expected = lstm(x)[0]
    model = disk_offload(lstm, tmp_path)
    for _ in range(2):
        assert torch.equal(model(x)[0], expected)
        assert all(weight.is_meta for weight in model._flat_weights)


class TwoRecurrent(nn.Module):
    """They share their weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(4, 4), nn.LSTM(4, 4)
        for name, parameter in self.first.named_parameters():
            setattr(self.second, name, parameter)

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


def test_recurrent_layers_that_share_weights_may_be_apart(tmp_path):
    x = torch.ones(3, 4)
    model = dispatch_model(net(TwoRecurrent), {"first": "cpu", "second": "disk"}, offload_dir=tmp_path)
    for _ in range(2):
        assert torch.equal(model(x), net(TwoRecurrent)(x))
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), net(TwoRecurrent)(x))


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        assert state == {"calls": 3}


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_state_that_is_no_tensor_is_left_where_it_is(offload, tmp_path):
    model = seeded(lambda: nn.Sequential(Stateful(4, 4)))
    expected = model(torch.ones(2, 4))
    model = cpu_offload(model) if offload == "cpu" else disk_offload(model, tmp_path)
    assert torch.equal(model(torch.ones(2, 4)), expected)


def test_layers_are_in_their_small_dtype_after_an_error():
    model = net()
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    with pytest.raises(RuntimeError):
        model.head(torch.ones(2, 3))
    assert model.head.weight.dtype == torch.float8_e4m3fn


class Doubled(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.other(self.again(self.first(x))))


@pytest.mark.parametrize(
    ("places", "options"),
    [
        ("auto", {"max_memory": {"cpu": 170}}),
        ({"first": "cpu", "again": "cpu", "other": "disk", "last": "disk"}, {}),
        ({"first": "disk", "again": "disk", "other": "cpu", "last": "disk"}, {}),
    ],
)
def test_a_layer_of_two_names_is_in_one_place(places, options, tmp_path):
    write_weights(net(Doubled).state_dict(), tmp_path)
    model = loaded(Doubled, tmp_path, places, **options)
    x = torch.ones(2, 4)
    assert torch.equal(model(x), net(Doubled)(x))
    assert "disk" in model.hf_device_map.values()


class Norms(nn.Module):
    """One norm, with statistics, in two modules."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.ModuleDict({"norm": nn.BatchNorm1d(4)}), nn.ModuleDict()
        self.two["norm"] = self.one["norm"]

    def forward(self, x):
        return self.two["norm"](self.one["norm"](x) + 1)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("preload", [None, ["Norms"]])
def test_a_layer_of_two_modules_is_attached_once(offload_buffers, preload, tmp_path):
    write_weights(net(Norms).state_dict(), tmp_path)
    x = torch.arange(8.0).view(2, 4)
    options = {"offload_buffers": offload_buffers, "preload_module_classes": preload}
    model = loaded(Norms, tmp_path, {"": "disk"}, **options).eval()
    assert torch.equal(model(x), net(Norms)(x))
    assert torch.equal(disk_offload(net(Norms), tmp_path / "offloaded", **options)(x), net(Norms)(x))


def test_a_layer_of_two_names_is_not_in_two_places():
    with pytest.raises(ValueError, match="first and again are one module, and device_map has several places"):
        dispatch_model(net(Doubled), {"first": "cpu", "again": "disk", "other": "cpu", "last": "cpu"})


@pytest.mark.parametrize("offloaded", OFFLOADED)
def test_a_model_is_dispatched_once(offloaded, tmp_path):
    model = OFFLOADED[offloaded](tmp_path)
    again = (
        lambda: cpu_offload(model),
        lambda: disk_offload(model, tmp_path),
        lambda: dispatch_model(model, {"": "cpu"}),
    )
    for dispatch in again:
        with pytest.raises(ValueError, match="is dispatched already"):
            dispatch()
    assert torch.equal(model(IDS), net()(IDS))


def test_weights_that_are_tied_again_are_what_they_were(tmp_path):
    model = dispatch_model(
        net(Net), {"embedding": "cpu", "blocks": "cpu", "norm": "cpu", "head": "disk"}, offload_dir=tmp_path
    )
    model.head.weight = model.embedding.weight  # as tie_weights() of transformers does it
    assert torch.equal(model(IDS), net(Net)(IDS))


def test_a_module_without_values_that_is_not_called_is_no_obstacle(tmp_path):
    model = disk_offload(net(), tmp_path)
    model.teacher = nn.Linear(8, 8, device="meta")
    assert torch.equal(model(IDS), net()(IDS))
    with pytest.raises(RuntimeError, match="weight of Linear is on the meta device and has no value"):
        model.teacher(torch.ones(1, 8))


def test_an_index_of_something_else_is_not_removed(files, tmp_path):
    other = tmp_path / "checkpoint"
    other.mkdir()
    (other / "index.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match="is no index of offloaded weights, and would be lost"):
        loaded(Plain, files, {"": "disk"}, offload_folder=other)
    assert (other / "index.json").read_text() == '{"version": 1}'


def test_a_map_that_leaves_out_a_tied_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gives no place to head.weight"):
        dispatch_model(net(Net), {"embedding": "cpu", "blocks": "cpu", "norm": "cpu"})


@pytest.mark.parametrize(
    "places",
    [
        {"": "cpu", "middle": "disk"},
        {"": "disk", "middle": "cpu"},
        {"": "cpu", "middle": "disk", "middle.0.weight": "cpu"},
        {"": "disk", "middle": "cpu", "middle.0": "disk"},
    ],
)
def test_a_module_may_have_exceptions_in_it(places, files):
    model = loaded(Plain, files, places).eval()
    assert model.hf_device_map == places
    assert torch.equal(model(IDS), net()(IDS))
    assert {name for name, value in model.named_parameters() if value.is_meta} == {
        name
        for name, _ in net().named_parameters()
        if places[max((each for each in places if f"{name}.".startswith(f"{each}." if each else "")), key=len)]
        == "disk"
    }

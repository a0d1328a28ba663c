"""Offloaded weights are saved with their values, one after the other, and compared when they are loaded."""

from __future__ import annotations

import gc

import pytest
import torch
from safetensors.torch import load_file
from small_models import IDS, Small, empty, loaded, seeded
from torch import nn

from accel_big_model import Dispatch, cpu_offload, disk_offload, load_checkpoint_and_dispatch
from accel_checkpoint import write_weights
from accel_core import Accelerator, CheckpointError
from accel_testing import run_ranks


class Net(Small):
    """With a layer that trains."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(11, 3)

    def forward(self, ids):
        return self.last(super().forward(ids))


SOME = {"embedding": "disk", "middle": "disk", "head": "disk", "last": "cpu"}
ODD = {"embedding": "cpu", "middle": "disk", "head": "disk", "last": "cpu"}  # a tie over two places


def net(seed=3) -> Net:
    model = seeded(Net, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("last"))
    return model


def on_disk(folder, places=SOME, buffers=False) -> Net:
    write_weights(net().state_dict(), folder)
    return loaded(net, folder, places, offload_buffers=buffers)


def same(found, expected=None):
    expected = net().state_dict() if expected is None else expected
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


WAYS = {
    "files": on_disk,
    "odd": lambda folder: on_disk(folder, ODD),
    "buffers": lambda folder: on_disk(folder, {"": "disk"}, buffers=True),
    "folder": lambda folder: disk_offload(net(), folder),
    "memory": lambda folder: cpu_offload(net()),
}


@pytest.fixture(params=WAYS)
def model(request, tmp_path):
    return WAYS[request.param](tmp_path / "offloaded")


def saved_of_ranks(folder):
    accelerator, model = Accelerator(cpu=True), cpu_offload(net())
    accelerator.save_model(model, folder)
    state = accelerator.get_state_dict(model)
    return same(state) if accelerator.is_main_process else state


def test_several_processes_save_an_offloaded_model_by_the_main_one(tmp_path):
    assert run_ranks(saved_of_ranks, 2, tmp_path) == [True, {}]
    assert same({**net().state_dict(), **load_file(tmp_path / "model.safetensors")})


@pytest.mark.parametrize(("strategy", "prepared"), [("single", False), ("dispatch", False), ("dispatch", True)])
def test_the_state_dict_of_an_offloaded_model_has_its_values(strategy, prepared, model):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    if prepared:
        model = accelerator.prepare_model(model, evaluation_mode=True)
    state = accelerator.get_state_dict(model)
    assert same(state)
    assert state["head.weight"] is state["embedding.weight"]
    assert model.middle[0].weight.is_meta
    assert torch.equal(model(IDS), net()(IDS))


@pytest.mark.parametrize("safe", [True, False])
def test_an_offloaded_model_is_written_as_plain_files(safe, model, tmp_path):
    accelerator = Accelerator(strategy="dispatch", cpu=True)
    for limit in ("10GB", 400):
        accelerator.save_model(model, tmp_path / "saved", max_shard_size=limit, safe_serialization=safe)
        again = Accelerator(cpu=True).build_model(Net, tmp_path / "saved")
        assert same(again.state_dict())
    if safe:
        names = [name for path in (tmp_path / "saved").glob("*.safetensors") for name in load_file(path)]
        assert len(names) == len({*names}) == len(net().state_dict()) - 1  # what is tied is written once


def test_one_weight_at_a_time_is_in_memory_while_an_offloaded_model_is_written(tmp_path, monkeypatch):
    from accel_big_model import weights

    write_weights({f"{number}.weight": torch.randn(64, 64) for number in range(6)}, tmp_path / "files")
    model = loaded(
        lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))), tmp_path / "files", {"": "disk"}
    )
    alive, read = [], weights.StoredWeights.read

    def watched(self, name, *args, **kwargs):
        gc.collect()
        alive.append(
            sum(type(each) is torch.Tensor and each.shape == (64, 64) and not each.is_meta for each in gc.get_objects())
        )
        return read(self, name, *args, **kwargs)

    monkeypatch.setattr(weights.StoredWeights, "read", watched)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "saved", max_shard_size=3 * 64 * 64 * 4)
    assert len(alive) == 6
    assert max(alive) - alive[0] <= 1
    del alive[:]
    accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.save_state(tmp_path / "state")
    assert len(alive) == 6
    assert max(alive) - alive[0] <= 1


@pytest.mark.parametrize("strategy", ["single", "dispatch"])
@pytest.mark.parametrize("places", [SOME, ODD, {"": "disk"}])
def test_a_run_with_offloaded_weights_is_saved_and_goes_on(strategy, places, tmp_path):
    model = on_disk(tmp_path / "offloaded", places, buffers=places == {"": "disk"})

    def run(model):
        accelerator = Accelerator(strategy=strategy, cpu=True)
        trains = [each for each in model.parameters() if each.requires_grad and not each.is_meta]
        optimizer = torch.optim.AdamW(trains, lr=0.1) if trains else None
        if optimizer is None:
            return accelerator, accelerator.prepare_model(model, evaluation_mode=True), None
        return accelerator, *accelerator.prepare(model, optimizer)

    def step(accelerator, model, optimizer):
        if optimizer is not None:
            accelerator.backward(model(IDS).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    here = run(model)
    step(*here)
    here[0].save_state(tmp_path / "state")
    step(*here)
    expected = here[1](IDS)
    here[0].load_state(tmp_path / "state")
    step(*here)
    assert torch.equal(here[1](IDS), expected)
    whole = net()
    elsewhere = Accelerator(cpu=True)
    elsewhere.prepare_model(whole, evaluation_mode=True)
    if here[2] is None:  # a checkpoint of any strategy is one of any other
        elsewhere.load_state(tmp_path / "state")
        assert same(whole.state_dict())
    again = load_checkpoint_and_dispatch(Net().eval(), tmp_path / "state", device_map=SOME)
    assert torch.equal(again.middle(torch.ones(2, 8)), net().middle(torch.ones(2, 8)))


def test_a_checkpoint_with_other_values_than_those_offloaded_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    other = net(seed=4)
    accelerator.prepare_model(other, evaluation_mode=True)
    accelerator.save_state(tmp_path / "state")
    accelerator = Accelerator(strategy="dispatch", cpu=True)
    model = accelerator.prepare_model(on_disk(tmp_path / "files"), evaluation_mode=True)
    before = model.last.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"'embedding.weight' is offloaded here, and has another value in the checkpoint. Build"
    ):
        accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.last.weight, before)
    built = Accelerator(strategy=Dispatch(SOME), cpu=True).build_model(Net, tmp_path / "state")
    assert torch.equal(built.eval()(IDS), other(IDS))


@pytest.mark.parametrize("asynchronous", ["eager", "lazy"])
def test_saving_behind_is_refused_with_offloaded_weights(asynchronous, tmp_path):
    accelerator = Accelerator(strategy="dispatch", cpu=True)
    accelerator.prepare_model(on_disk(tmp_path / "files"), evaluation_mode=True)
    with pytest.raises(
        CheckpointError, match=r"would bring all offloaded weights into memory. Leave asynchronous= out"
    ):
        accelerator.save_state(tmp_path / "state", asynchronous=asynchronous)
    accelerator.save_state(tmp_path / "state")


def test_a_model_without_weights_has_no_state():
    model = empty(net)
    with pytest.raises(
        CheckpointError, match=r"'embedding.weight' was to be saved or loaded, but it is on the meta dev"
    ):
        Accelerator(cpu=True).get_state_dict(model)

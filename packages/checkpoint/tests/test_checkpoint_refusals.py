"""What `save_state` and `load_state` refuse with words of their own, each where it really happens."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_checkpoint.files.folder import Draft
from accel_checkpoint.files.index import Index
from accel_checkpoint.files.manifest import read_manifest
from accel_core import Accelerator, CheckpointError, ProjectConfiguration, Strategy, World, hookimpl
from accel_testing import run_ranks


class Stubborn:
    """Gives a state, and takes none."""

    def state_dict(self):
        return {"value": 1}

    def load_state_dict(self, state):
        raise KeyError("another version")


class Silent(Strategy):
    """Does not say how it lays out models."""

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        return model


class Replacing(Silent):
    """Replaces parameters, and leaves the state of optimizers behind."""

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][:] = [nn.Parameter(each.detach()) for each in model.parameters()]
        return model


def trained(**options):
    model = nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def test_an_object_that_does_not_take_its_state_is_named_and_the_run_is_said_to_be_in_part(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Stubborn())
    accelerator.save_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"object\.0, a Stubborn, did not take the state .* KeyError") as caught:
        accelerator.load_state(tmp_path)
    assert "Part of the run was restored by then: do not train on from here." in str(caught.value)


def test_tensors_of_a_unit_that_nobody_knows_are_no_less_than_a_misfit(tmp_path):
    accelerator, *_ = trained()
    accelerator.save_state(tmp_path)
    manifest = read_manifest(tmp_path)
    index = Index.read(tmp_path, manifest)
    draft = Draft.begin(tmp_path)
    for name in manifest.files:
        (draft.data / name).write_bytes((tmp_path / manifest.data / name).read_bytes())
    tensors = {**index.tensors, "ema.0/weight": index.tensors["model.0/weight"]}
    record = replace(index, tensors=json.loads(json.dumps(tensors))).write(draft.data)
    draft.publish(replace(manifest, id=draft.id, index=record))
    with pytest.raises(CheckpointError, match=r"tensors of ema\.0, which this version does not know"):
        accelerator.load_state(tmp_path)


def test_a_strategy_that_does_not_say_how_it_lays_out_is_told_what_to_implement(tmp_path):
    accelerator, *_ = trained(strategy=Silent())
    with pytest.raises(
        CheckpointError, match=r"Silent does not say how .* hooks model_state, optimizer_state, .* replicates"
    ):
        accelerator.save_state(tmp_path)


def test_an_optimizer_whose_state_a_strategy_leaves_behind_is_refused():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"AdamW has stepped before prepare\(\), .* its state of 2 of them"):
        Accelerator(cpu=True, strategy=Replacing()).prepare(model, optimizer)


def test_a_save_between_a_backward_and_its_step_is_refused_in_a_plain_loop_too(tmp_path):
    accelerator, model, optimizer = trained()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(CheckpointError, match=r"between accelerator\.backward\(loss\) and optimizer\.step\(\)"):
        accelerator.save_state(tmp_path)
    optimizer.zero_grad()
    accelerator.save_state(tmp_path)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path)


def test_options_that_a_call_does_not_have_are_refused(tmp_path):
    accelerator, *_ = trained()
    with pytest.raises(TypeError, match=r"save_state\(\) got tag, and has no such options"):
        accelerator.save_state(tmp_path, tag="a")
    with pytest.raises(TypeError, match=r"load_state\(\) got strict, and has no such options"):
        accelerator.load_state(tmp_path, {"strict": False})


def _as_nodes(project, each_node=True):
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    World.current(cpu=True)
    config = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=1, save_on_each_node=each_node)
    return trained(project_config=config)


def _on_some_ranks(root):
    rank = World.current(cpu=True).rank
    accelerator, *_ = trained(project_config=ProjectConfiguration(save_on_each_node=bool(rank)))
    with pytest.raises(CheckpointError, match="save_on_each_node=True on some ranks, and without it on others"):
        accelerator.save_state(root)


def _sharing(root):
    accelerator, *_ = _as_nodes(root)
    with pytest.raises(CheckpointError, match="another node has made .*: the nodes share this folder"):
        accelerator.save_state()


def _one_cannot_publish(root):
    """The index cannot be written on node 1, where something stands in its place."""
    rank = int(os.environ["RANK"])
    accelerator, prepared, _ = _as_nodes(f"{root}/{rank}")
    model = accelerator.unwrap_model(prepared)
    accelerator.save_state()
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)

    def stand_in_the_way(models, weights, folder):
        (draft,) = Path(folder).glob("data-*")
        (draft / "index.json").write_text("")

    if rank == 1:
        accelerator.register_save_state_pre_hook(stand_in_the_way)
    with pytest.raises(OSError, match=r"\(on rank 1\)"):
        accelerator.save_state()
    accelerator.load_state()
    return torch.equal(model.weight, weight)


def test_nodes_that_differ_or_share_a_folder_are_told(tmp_path):
    run_ranks(_on_some_ranks, 2, str(tmp_path / "some"))
    run_ranks(_sharing, 2, str(tmp_path / "shared"))


def test_a_node_that_cannot_publish_costs_no_node_what_it_had(tmp_path):
    assert run_ranks(_one_cannot_publish, 2, str(tmp_path)) == [True, True]

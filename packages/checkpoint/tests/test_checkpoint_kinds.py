"""One tensor may be a parameter where it is saved and a buffer where it is loaded; ties are what the model here says."""

from __future__ import annotations

import pytest
import torch
from sharded_strategies import BeginsEveryPartAtTheFirstRow, Rows
from torch import nn

from accel_core import Accelerator, CheckpointError
from accel_testing import models, run_ranks


class Scaled(nn.Module):
    def __init__(self, learned, value):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        scale = torch.full((3,), value)
        if learned:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, x):
        return self.layer(x) * self.scale


def loaded_as_the_other_kind(folder):
    """For each kind that was saved, what was loaded as the other one."""
    found = {}
    for learned in (True, False):
        runs = []
        for model in (Scaled(learned, 3.0), Scaled(not learned, 1.0)):
            strategy = Rows()
            accelerator = Accelerator(strategy=strategy, cpu=True)
            accelerator.prepare(model)
            strategy.adopt(torch.optim.SGD(model.parameters()))  # so that parameters are cut, and no optimizer is saved
            runs.append((accelerator, model))
        runs[0][0].save_state(f"{folder}/{learned}")
        runs[1][0].load_state(f"{folder}/{learned}")
        found[learned] = runs[1][1].scale.tolist()
    return found


def test_a_buffer_is_loaded_as_a_parameter_and_the_reverse(tmp_path):
    assert run_ranks(loaded_as_the_other_kind, 2, tmp_path) == [{True: [3.0] * 3, False: [3.0] * 3}] * 2


def put_together(seen):
    accelerator = Accelerator(strategy=BeginsEveryPartAtTheFirstRow(), cpu=True)
    model = nn.Linear(6, 4)
    prepared, _ = accelerator.prepare(model, models.sgd(model.parameters()))
    with pytest.raises(CheckpointError, match=seen):
        accelerator.get_state_dict(prepared)


def test_parts_that_do_not_make_a_whole_are_not_put_together():
    run_ranks(put_together, 2, r"shape \[4, 6\] was to be put together, .* \[2:4, 0:6\] is missing")


class Two(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        if tied:
            self.second.weight = self.first.weight


@pytest.mark.parametrize("tied", (True, False))
def test_what_was_tied_is_loaded_wherever_it_goes(tied, tmp_path):
    saving, loading = Accelerator(cpu=True), Accelerator(cpu=True)
    saved, loaded = saving.prepare(Two(tied=True)), loading.prepare(Two(tied))
    saving.save_state(tmp_path)
    loading.load_state(tmp_path)
    assert torch.equal(loaded.first.weight, saved.first.weight)
    assert torch.equal(loaded.second.weight, saved.first.weight)


def test_two_tensors_are_not_loaded_into_one(tmp_path):
    saving, loading = Accelerator(cpu=True), Accelerator(cpu=True)
    saving.prepare(Two(tied=False))
    saving.save_state(tmp_path)
    model = loading.prepare(Two(tied=True))
    before = model.first.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"'second\.weight' is one tensor with 'first\.weight' here, and another one"
    ):
        loading.load_state(tmp_path)
    assert torch.equal(model.first.weight, before)

"""A prepared model saves and loads DeepSpeed's own checkpoints, as transformers' Trainer asks of an engine."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed, add_engine_names
from accel_testing import run_ranks

STEPS, WIDTH = 4, 6
NORM = 0.01
CONFIG = {"zero_optimization": {"stage": "of the test"}, "gradient_clipping": NORM}


class Run:
    """A model, its optimizer, and a schedule that the loop steps."""

    def __init__(self, stage, seed):
        self.accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        add_engine_names(self.model, CONFIG)

    def train(self, first, behind):
        for step in range(first, behind):
            rows = torch.arange(4.0 * WIDTH).view(4, WIDTH).add(step + 7 * self.accelerator.process_index).sin()
            self.accelerator.backward(self.model(rows).square().mean())
            self.accelerator.clip_grad_norm_(self.model.parameters(), NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def weights(self):
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def saved_and_gone_on(stage, folder):
    """The weights of a run, and of one that loads in the middle what it has saved; what was loaded beside; and `config`."""
    run = Run(stage, seed=0)
    run.train(0, 2)
    assert run.model.save_checkpoint(folder, client_state={"note": "two steps"})
    run.train(2, STEPS)
    other = Run(stage, seed=1)
    path, state = other.model.load_checkpoint(folder)
    rate = other.optimizer.param_groups[0]["lr"]
    other.train(2, STEPS)
    found = run.weights(), other.weights(), (Path(path).parent.name, state["note"], rate)
    return found, other.model.config is CONFIG, os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")


@pytest.mark.parametrize("stage", [1, 2])
def test_files_have_the_norm_to_which_the_loop_clips(stage, tmp_path):
    """DeepSpeed goes on with the norm that it reads there."""
    run_ranks(saved_and_gone_on, 2, stage, str(tmp_path))
    for path in tmp_path.glob("global_step2/zero_pp_rank_*"):
        assert torch.load(path, weights_only=False)["optimizer_state_dict"]["clip_grad"] == NORM


@pytest.mark.parametrize("stage", range(4))
def test_a_run_goes_on_from_what_an_engine_has_saved(stage, tmp_path):
    for (whole, resumed, beside), has_config, forced in run_ranks(saved_and_gone_on, 2, stage, str(tmp_path)):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
        assert beside[1:] == ("two steps", 0.025)  # the schedule's rate of the next step
        assert has_config
        assert forced is None


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def loaded_with_code(folder):
    run = Run(2, seed=0)
    run.train(0, 1)
    run.model.save_checkpoint(folder)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        for path in Path(folder).glob("global_step1/mp_rank*"):
            torch.save({**torch.load(path, weights_only=False), "more": Code(f"{folder}/ran")}, path)
    run.accelerator.wait_for_everyone()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run.model.load_checkpoint(folder)


def test_code_in_a_file_is_not_run(tmp_path):
    run_ranks(loaded_with_code, 2, str(tmp_path))
    assert not (tmp_path / "ran").exists()


def ended(folder):
    run = Run(2, seed=0)
    run.accelerator.end_training()
    run.accelerator.free_memory()
    with pytest.raises(RuntimeError, match="of a model that has no engine") as caught:
        run.model.save_checkpoint(folder)
    return str(caught.value)


def test_without_an_engine_there_is_nothing_to_save(tmp_path):
    assert all("accelerator.save_model(model)" in said for said in run_ranks(ended, 2, str(tmp_path)))


def test_another_model_stays_as_it_is():
    model = nn.Linear(2, 2)
    add_engine_names(model, CONFIG)
    assert not hasattr(model, "save_checkpoint")

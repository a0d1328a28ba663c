"""A run that every tracker records at once: each has all of it, none gets in the way of another, and the training is what it is without."""

from __future__ import annotations

import json
import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from services import needs, offline  # noqa: F401 - a fixture of every test in this module
from torch import nn

from accel_core import Accelerator, TrackingKwargs
from accel_trackers.jsonl import read

STEPS = 12
CONFIG = {"lr": 0.01, "layers": [4, 8, 1], "nothing": None}
READERS = {}  # name → what reads the numbers of a run back: (folder of the test, Accelerator, state of the tracker) → name → records


def reads(name, module=None):
    def register(function):
        if find_spec(module or name) is not None:
            READERS[name] = function
        return function

    return register


@reads("jsonl", "accel_trackers")
def of_jsonl(folder, project, state):
    (directory,) = (path.parent for path in project.glob("*/metrics.jsonl"))
    records = [
        (name, record["step"], value) for record in read(directory) for name, value in record.get("values", {}).items()
    ]
    return {name: [(step, value) for each, step, value in records if each == name] for name, _, _ in records}


@reads("tensorboard")
def of_tensorboard(folder, project, state):
    from read_tensorboard import read_events

    (directory,) = {path.parent for path in project.glob("*/events.out.tfevents.*")}
    return read_events(directory).numbers


@reads("mlflow")
def of_mlflow(folder, project, state):
    from read_mlflow import read_run

    return read_run(f"sqlite:///{project / 'mlflow.db'}", state["run_id"]).numbers


@reads("wandb")
def of_wandb(folder, project, state):
    from read_wandb import read_runs, recorded

    read_runs(folder)
    return recorded(folder, state["id"]).numbers


@reads("comet_ml")
def of_comet_ml(folder, project, state):
    from read_comet_ml import recorded

    return recorded(folder, state["experiment_key"]).numbers


@reads("aim")
def of_aim(folder, project, state):
    from read_aim import read_run

    return read_run(project, state["run_hash"]).numbers


@reads("clearml")
def of_clearml(folder, project, state):
    from read_clearml import read_run

    return read_run(Path(os.environ["CLEARML_CACHE_DIR"], "offline"), state["task_id"], is_open=False).numbers


@reads("dvclive")
def of_dvclive(folder, project, state):
    from read_dvclive import read_run

    (directory,) = (path.parent for path in project.glob("*/metrics.json"))
    return read_run(directory).numbers


@reads("swanlab")
def of_swanlab(folder, project, state):
    from read_swanlab import read_run

    return read_run(folder, state["id"]).numbers


@reads("trackio")
def of_trackio(folder, project, state):
    from read_trackio import recorded

    return recorded("together", state["name"]).numbers


@pytest.fixture(autouse=True)
def no_service_is_left():
    """wandb keeps a process for as long as the program lives."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def train(accelerator):
    """A loop that draws from the streams of the program; its losses and its weights."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(8, 4) * random.random()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.log({"train": {"loss": loss, "samples": 8 * (step + 1)}}, step=step)
        if step == STEPS // 2:
            accelerator.log_images({"noise": torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(1))})
            accelerator.log_table("rows", ["a", "b"], [[1, "x"], [2, "y"]])
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*:pytest.PytestUnraisableExceptionWarning"
)
def test_all_trackers_record_one_run(tmp_path, monkeypatch):
    for name in filter(None, os.environ.get("ACCEL_SERVICES", "").split(",")):
        assert name == "playwright" or name in READERS, needs(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    expected = train(Accelerator(cpu=True))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "WANDB__MODE": "offline",
            "WANDB__DIR": tmp_path,
            "COMET_ML__ONLINE": "no",
            "COMET_ML__OFFLINE_DIRECTORY": tmp_path,
            "CLEARML__OFFLINE": "yes",
            "SWANLAB__MODE": "offline",
            "SWANLAB__LOG_DIR": tmp_path,
        }.items():
            if name.partition("__")[0].lower() in READERS:
                patch.setenv(f"ACCELERATE_{name}", str(value))
        accelerator = Accelerator(
            cpu=True,
            log_with=list(READERS),
            project_dir=tmp_path / "out",
            kwargs_handlers=[TrackingKwargs(strict=True)],  # so that a tracker that fails does not do so in a warning
        )
    accelerator.init_trackers("together", CONFIG)
    losses, weights = train(accelerator)
    accelerator.save_state(tmp_path / "checkpoint")
    accelerator.end_training()
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))

    (recorded,) = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["record"]["tracking"]
    project = tmp_path / "out" / "together"
    for name, reader in READERS.items():
        numbers = reader(tmp_path, project, recorded["trackers"].get(name, {}))
        assert [step for step, _ in numbers["train/loss"]] == list(range(STEPS)), name
        assert [value for _, value in numbers["train/loss"]] == pytest.approx(losses), name
        assert numbers["train/samples"] == [(step, 8 * (step + 1)) for step in range(STEPS)], name

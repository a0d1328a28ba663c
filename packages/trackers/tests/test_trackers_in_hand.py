"""One tracker in the user's hands, as scripts use it that were written for wrappers around services."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
from read_tensorboard import read_events
from read_wandb import read_runs
from services import Offline, needs, offline  # noqa: F401 - a fixture of every test in this module

from accel_core import Accelerator

NAMES = {
    "aim": "writer",
    "clearml": "task",
    "comet_ml": "writer",
    "dvclive": "live",
    "mlflow": "active_run",
    "swanlab": "run",
    "tensorboard": "writer",
    "trackio": "run",
    "wandb": "run",
}
IMAGES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)


@pytest.fixture(autouse=True)
def wandb_stopped():
    """wandb keeps a process and two threads until the program ends."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.mark.parametrize("name", NAMES)
def test_the_object_of_a_service_has_the_name_that_scripts_know(name):
    (offered,) = entry_points(group="accel.trackers", name=name)
    kind = offered.load()
    assert getattr(kind, NAMES[name]) is kind.tracker


@needs("tensorboard")
@needs("wandb")
def test_a_loop_over_trackers_that_tells_services_apart_works_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_WANDB__MODE", "offline")
    monkeypatch.setenv("ACCELERATE_WANDB__DIR", str(tmp_path / "wandb"))
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "wandb"], project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 1.0})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3)
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.writer.add_images("validation", IMAGES, 3, dataformats="NHWC")
        if tracker.name == "wandb":
            import wandb

            tracker.log({"validation": [wandb.Image(image, caption="a caption") for image in IMAGES], "score": 7})
            tracker.run.summary["best"] = 0.25
    accelerator.end_training()
    [folder] = (tmp_path / "project").iterdir()
    found = read_events(folder)
    assert found.numbers == {"loss": [(3, 0.5)]}
    [(step, (_, _, *images))] = found.images["validation"]  # behind their width and height
    assert (step, len(images)) == (3, 2)
    [run] = read_runs(tmp_path / "wandb")
    assert run.values("loss") == [(3, 0.5)]
    assert run.values("score") == [(4, 7)]
    [(step, images)] = run.values("validation")
    assert (step, images["count"], images["captions"]) == (4, 2, ["a caption"] * 2)

"""Options of one record that a service does not have are refused by name, and before anything of the record is written."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from services import needs, offline, record  # noqa: F401 - a fixture of every test in this module

from accel_core import Bins, Table, TrackedRun

OFFLINE = {
    "aim": {},
    "clearml": {"offline": True},
    "comet_ml": {"online": False, "offline_directory": Path()},
    "dvclive": {},
    "jsonl": {},
    "mlflow": {},
    "swanlab": {"mode": "offline", "log_dir": Path()},
    "tensorboard": {},
    "trackio": {},
    "wandb": {"mode": "offline", "dir": Path()},
}
IMAGE = torch.zeros(2, 2, 3, dtype=torch.uint8)
RECORDS = [
    ("log", ({"loss": 1.0, "note": "a"},)),
    ("log_images", ({"drawn": [IMAGE]},)),
    ("log_table", ("rows", Table(("a",), ((1,),)))),
    ("log_histograms", ({"bins": Bins((1, 2), (0.0, 1.0, 2.0), 0.0, 0.0)},)),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield tmp_path
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def tracked(**given):
    return TrackedRun(
        **{"project": "a project", "run_id": "run-1", "directory": Path("runs", "run-1").absolute(), **given}
    )


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "name", [name if name == "jsonl" else pytest.param(name, marks=needs(name)) for name in OFFLINE]
)
def test_an_option_that_a_record_does_not_have_is_refused_before_it_is_written(name):
    def work(tracker):
        before = tracker.state()
        for method, arguments in RECORDS:
            if (name, method) == ("mlflow", "log_histograms"):
                continue
            with pytest.raises(TypeError, match="misspelt"):
                getattr(tracker, method)(*arguments, 0, misspelt=1)
            assert tracker.state() == before, method
        tracker.log({"loss": 2.0}, 0)

    tracker = entry_points(group="accel.trackers")[name].load()(**OFFLINE[name])
    record(tracker, tracked(), work)

"""The conformance suite: what `accel-trackers` brings without a service passes it. Services have files of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pngs import decoded

from accel_testing import Recorded, TrackerSuite, Written
from accel_trackers.jsonl import CONFIG, read


class TestJSONL(TrackerSuite):
    tracker = "jsonl"

    def read(self, written: Written) -> Recorded:
        found = {kind: {} for kind in ("numbers", "texts", "images", "tables", "histograms")}

        def add(kind, name, step, value):
            found[kind].setdefault(name, []).append((step, value))

        for record in read(written.run.directory):
            for name, value in record.get("values", {}).items():
                add("texts" if isinstance(value, str) else "numbers", name, record["step"], value)
            for name, paths in record.get("images", {}).items():
                for path in paths:
                    add("images", name, record["step"], decoded(path.read_bytes()))
            for kind in ("tables", "histograms"):
                for name, value in record.get(kind, {}).items():
                    add(kind, name, record["step"], value)
        config = json.loads((written.run.directory / CONFIG).read_text(encoding="utf-8"))
        return Recorded(**found, config=dict(leaves(config)))


def leaves(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


SERVICES = ["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


@pytest.mark.parametrize("chosen", ["none", "jsonl", "tensorboard"])
def test_choosing_a_tracker_imports_its_service_and_no_other(chosen, tmp_path):
    if chosen == "tensorboard":
        pytest.importorskip("tensorboard")
    script = f"""
import sys
import accel_trackers
from accel_core import Accelerator
accelerator = Accelerator(cpu=True, log_with={[] if chosen == "none" else chosen!r}, project_dir={str(tmp_path)!r})
accelerator.init_trackers("project")
before = [name for name in {SERVICES!r} if name in sys.modules]
accelerator.log({{"loss": 1.0}})
accelerator.end_training()
print(before, [name for name in {SERVICES!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == f"[] {[chosen] if chosen == 'tensorboard' else []}"

"""The main job: examples/quickstart.py trains alone and in two processes, and reports what it did."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "quickstart.py"
STEPS, VALIDATED = 12, 201
PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(needed) is None,
        reason=f"{needed} is missing: pip install -r examples/requirements.txt",
    )
    for needed in ("tqdm", "matplotlib")
]


def run(world, folder, *options, steps=STEPS):
    """Runs the script for a few steps; returns what each rank wrote, stdout and stderr together, by rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    launcher += ["--redirects", "3", "--log-dir", str(folder / "logs")]
    script = [str(SCRIPT), "--seconds", "inf", "--steps", str(steps), "--out", str(folder / "out"), *options]
    command = [sys.executable, *(launcher if world > 1 else []), *script]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    logs = {rank: "".join(read(log) for log in (folder / "logs").glob(f"**/{rank}/std*.log")) for rank in range(world)}
    assert ended.returncode == 0, ended.stdout + ended.stderr + "".join(logs.values())
    return logs if world > 1 else {0: ended.stdout + ended.stderr}


def read(path):
    return path.read_text(encoding="utf-8")


def table(text):
    return dict(re.findall(r"^ +([a-z ]+?)  (\S+)$", text, re.MULTILINE))


@pytest.mark.timeout(240)
def test_the_main_job_trains_alone_and_in_two_processes(tmp_path):
    """The loss falls, every sequence of the validation set is counted once, and table and curves are there."""
    logs = {world: run(world, tmp_path) for world in (1, 2)}
    for world in (1, 2):
        shown = table(logs[world][0])
        assert shown["processes"] == str(world)
        assert shown["steps"] == str(STEPS)
        assert shown["effective batch"] == str(8 * world)
        assert shown["samples validated"] == str(VALIDATED)
        assert 0 < float(shown["bits per byte"]) < 8
        assert float(shown["samples per second"]) > 0

        result = json.loads(read(tmp_path / "out" / f"quickstart-{world}.json"))
        assert len(result["train"]) == STEPS
        assert all(map(math.isfinite, result["train"]))
        (first, before), *_, (last, after) = result["valid"]
        assert (first, last) == (0, STEPS)
        assert after < before - 0.5
    pictures = {picture.name: picture.read_bytes() for picture in (tmp_path / "out").glob("*.png")}
    assert set(pictures) == {"quickstart-1.png", "quickstart-2.png", "quickstart.png"}
    assert all(picture.startswith(PNG) for picture in pictures.values())
    assert "100%|" in logs[2][0]
    assert logs[2][1] == "", "only the main process shows a bar and a table"


@pytest.mark.timeout(150)
@pytest.mark.full
def test_the_main_job_trains_sharded_and_in_low_precision(tmp_path):
    """Nothing in the script knows of it: two options, and the loss falls as it does without them."""
    shown = table(run(2, tmp_path, "--strategy", "fsdp", "--mixed-precision", "bf16", steps=3)[0])
    assert (shown["distributed"], shown["precision"]) == ("FSDP", "bf16")
    assert (shown["processes"], shown["steps"], shown["samples validated"]) == ("2", "3", str(VALIDATED))

    result = json.loads(read(tmp_path / "out" / "quickstart-2.json"))
    assert all(map(math.isfinite, result["train"]))
    assert result["valid"][-1][1] < result["valid"][0][1] - 0.5


def test_five_lines_are_marked():
    """The lines that make a plain loop run in any world stand in the order in which a reader meets them."""
    marked = [line.strip() for line in read(SCRIPT).splitlines() if re.search(r"  # [1-5]$", line)]
    assert sorted(line[-1] for line in marked) == list("12345")
    called = {line[-1]: line for line in marked}
    expected = {
        "1": "import Accelerator",
        "2": "Accelerator(",
        "3": "prepare(",
        "4": "backward(",
        "5": "gather_for_metrics(",
    }
    assert all(name in called[number] for number, name in expected.items())

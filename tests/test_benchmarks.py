"""The benchmarks run: every row, in tiny rounds, without the peers. Nothing here depends on how long anything takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"
TINY = ["--rounds", "2", "--repeats", "1", "--batches", "8", "--libraries", "accel"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("row", "lines"), [("P1", 3), ("P2", 2), ("P3", 2), ("P4", 2), ("P7", 3)])
def test_a_row_of_the_benchmarks_runs(row, lines, tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, str(RUN), "--rows", row, *TINY, "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(f"| {row} ") == lines
    results = json.loads(out.read_text(encoding="utf-8"))
    assert {"date", "cpu", "cores", "torch"} <= results["machine"].keys()
    assert len(results["rounds"][row]) >= 1
    assert all({"accel"} <= measured.keys() for measured in results["rounds"][row])


@pytest.mark.timeout(240)
def test_gathering_for_metrics_is_one_collective(tmp_path):
    """P7: two tensors travel in exactly one collective."""
    out = tmp_path / "results.json"
    subprocess.run([sys.executable, str(RUN), "--rows", "P7", *TINY, "--out", str(out)], check=True, timeout=200)
    rounds = json.loads(out.read_text(encoding="utf-8"))["rounds"]["P7"]
    assert {measured["accel"]["collectives"] for measured in rounds} == {1.0}
    assert {measured["plain"]["collectives"] for measured in rounds} == {2.0}

"""The example for eight GPUs, tried in small: alone, shared out in four processes, and on from there."""

from __future__ import annotations

import runpy
from pathlib import Path

import megatron_cpu
import pytest

from accel_testing import run_ranks

SCRIPT = Path(__file__).parents[3] / "examples" / "megatron_gpt.py"
SMALL = [
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--length",
    "8",
    "--rows",
    "8",
    "--micro-batches",
    "2",
    "--steps",
    "6",
]


def train(*words):
    megatron_cpu.use_cpu()
    return runpy.run_path(str(SCRIPT))["main"]([*SMALL, *words])


@pytest.mark.full(group="megatron")
def test_it_trains_and_goes_on_in_another_arrangement(tmp_path):
    folder = str(tmp_path / "run")
    [alone] = run_ranks(train, 1)
    shared = run_ranks(train, 4, "--tensor", "2", "--pipeline", "2", "--folder", folder)
    assert all(each == shared[0] for each in shared)
    assert len(alone) == len(shared[0]) == 6
    assert alone[-1] < alone[0]
    assert shared[0] == pytest.approx(alone, rel=0.02)  # other random weights, the same data
    [rest] = run_ranks(train, 1, "--folder", folder, "--steps", "8")
    assert len(rest) == 2
    assert rest[-1] < shared[0][0]

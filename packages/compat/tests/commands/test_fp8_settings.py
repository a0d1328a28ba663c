"""fp8 that a configuration file, the command line or variables ask for: what is prepared computes in it, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.api.component import how_to_install

TRAIN = """
import json, sys, torch
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
losses = []
for _ in range(3):
    loss = model(torch.ones(16, 16, device=accelerator.device)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if accelerator.is_main_process:
    layer, recipe = accelerator.unwrap_model(model)[1], accelerator.ao_recipe_handler
    json.dump({
        "falls": losses[2] < losses[0], "layer": type(layer).__name__, "pads": recipe.pad_inner_dim, "backend": accelerator.fp8_backend,
        "config": layer.config.pad_inner_dim, "handler": accelerator.has_fp8_handler, "precision": accelerator.mixed_precision,
    }, sys.stdout)
"""
FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: fp8
fp8_config:
  backend: {backend}
  pad_inner_dim: false
use_cpu: true
num_processes: {processes}
num_machines: 1
"""


def started(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    environment = {**os.environ, "HF_HOME": str(folder), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "accelerate.commands.launch", *words, "train.py"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=150)


def in_file(folder: Path, backend: str, processes: int = 1) -> str:
    text = FILE.format(kind="MULTI_CPU" if processes > 1 else "'NO'", backend=backend, processes=processes)
    (folder / "fp8.yaml").write_text(text)
    return f"--config_file={folder / 'fp8.yaml'}"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_that_asks_for_fp8_by_torchao_gets_it_with_its_options(tmp_path: Path, processes: int):
    found = started(tmp_path, in_file(tmp_path, "AO", processes))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == {
        "falls": True,
        "layer": "Float8Linear",
        "pads": False,
        "backend": "AO",
        "config": False,
        "handler": True,
        "precision": "fp8",
    }


def test_variables_and_options_of_the_command_line_do_too(tmp_path: Path):
    found = started(tmp_path, "--cpu", "--mixed_precision=fp8", "--fp8_backend=ao", "--fp8_pad_inner_dim=true")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1])["config"] is True


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("TE", how_to_install("accel-precision[transformer-engine]")),
        ("MSAMP", "MS-AMP is no longer maintained, and not offered"),
    ],
)
def test_a_library_that_is_not_there_is_an_error_and_nothing_else_is_taken(tmp_path: Path, backend: str, said: str):
    found = started(tmp_path, in_file(tmp_path, backend))
    assert found.returncode != 0
    assert said in found.stderr

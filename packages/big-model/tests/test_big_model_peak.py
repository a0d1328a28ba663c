"""Of a model on disk, main memory holds no more than what computes and what is fetched ahead."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import torch
from safetensors.torch import save_file

LAYERS, WIDTH = 24, 2048  # 16 MiB a layer, 384 MiB

PROGRAM = """
import resource, sys
import torch
from torch import nn
from accel_big_model import init_empty_weights, load_checkpoint_and_dispatch

with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
x = torch.ones(1, WIDTH)
nn.Linear(8, 8)(torch.ones(1, 8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_checkpoint_and_dispatch(model, sys.argv[1], device_map={"": "disk"})
with torch.no_grad():
    first = model(x).sum().item()
    assert model(x).sum().item() == first
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, first)
"""


def run(tmp_path) -> tuple[float, float]:
    program = textwrap.dedent(PROGRAM).replace("LAYERS", str(LAYERS)).replace("WIDTH", str(WIDTH))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.safetensors")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kib, result = map(float, done.stdout.split())
    return kib / 1024, result


def test_main_memory_holds_the_layer_that_computes_and_the_next_one(tmp_path):
    weights = {f"{index}.weight": torch.eye(WIDTH) * (1 + index / 100) for index in range(LAYERS)}
    save_file(weights, tmp_path / "model.safetensors")
    expected = torch.ones(1, WIDTH)
    for weight in weights.values():
        expected = expected @ weight.T
    peak, result = run(tmp_path)
    assert result == expected.sum().item()
    assert peak < 4 * 16, f"{peak} MiB for layers of 16 MiB"

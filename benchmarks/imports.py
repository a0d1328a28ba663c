"""P1: what `import` and the first `Accelerator()` cost on top of torch, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

FIRST = {
    "accel": ("accel_core", "Accelerator()"),
    "accelerate": ("accelerate", "Accelerator(cpu=True)"),
    "fabric": ("lightning_fabric", "Fabric(accelerator='cpu', devices=1)"),
}

CHILD = """
import json, sys, time
import torch, torch.distributed, torch.utils.data
start, cpu = time.perf_counter(), time.process_time()
import {module}
imported = time.perf_counter()
{module}.{first}
ended, cpu = time.perf_counter(), time.process_time() - cpu
print(json.dumps({{"import": imported - start, "first": ended - start, "cpu": cpu}}))
"""


def measure(libraries: Sequence[str], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Seconds until the module is there, and until its first object is; both from the same start, torch being there;
    and the CPU time until then.

    The libraries take turns. A first round, which writes the .pyc files that are missing, is thrown away.
    """
    names = [name for name in libraries if name in FIRST]
    return [{name: _child(name) for name in names} for _ in range(rounds + 1)][1:]


def _child(name: str) -> dict[str, float]:
    module, first = FIRST[name]
    command = [sys.executable, "-W", "ignore", "-c", CHILD.format(module=module, first=first)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures

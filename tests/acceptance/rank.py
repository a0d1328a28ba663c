"""What a process of a check does, and what it tells of its machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module, util
from typing import Any

from acceptance.registry import CHECKS, Run, Skipped

PACKAGES = ("deepspeed", "transformer_engine", "torchao", "bitsandbytes", "transformers", "triton")


def run_check(name: str, module: str, imports: Sequence[str], kind: str, **where: Any) -> tuple[str, str]:
    """Runs one check on this rank: ("PASS", its figures) or ("SKIP", the reason). What it asserts is raised."""
    prepare_process(imports)
    import_module(module)
    check = CHECKS[name]
    if check.environment is not None:
        os.environ.update(check.environment(int(os.environ["RANK"]), kind))
    from accel_core import World

    world = World.current(cpu=where["cpu"])
    run = Run(world.device, world.rank, world.size, **where)
    try:
        return "PASS", check.function(run) or ""
    except Skipped as reason:
        return "SKIP", str(reason)


def prepare_process(imports: Sequence[str]) -> None:
    warnings.simplefilter("default")
    for module in imports:
        import_module(module)


def machine_facts(imports: Sequence[str], cpu: bool) -> dict[str, Any]:
    """Versions and devices, asked for in a process that is gone afterwards: the one that asks has touched them."""
    prepare_process(imports)
    import torch

    accelerator = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "kind": "cpu" if accelerator is None else accelerator.type,
        "count": count,
        "names": [device_name(accelerator.type, index) for index in range(count)] if accelerator is not None else [],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl_version(),
        "driver": driver(),
        "cores": os.cpu_count(),
        "packages": [name for name in PACKAGES if util.find_spec(name) is not None],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)},
    }


SHOWN = ("NCCL_", "RCCL_", "TORCH_", "CUDA_", "HIP_", "PYTORCH_", "GLOO_", "ROCR_", "ZE_", "OMP_")
"""Beginnings of the variables that a report shows."""


def device_name(kind: str, index: int) -> str:
    import torch

    module = torch.get_device_module(kind)
    try:
        return f"{module.get_device_name(index)} {module.get_device_capability(index)}"
    except (AttributeError, NotImplementedError, RuntimeError):
        return f"{kind}:{index}"


def nccl_version() -> str | None:
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def driver() -> str | None:
    """Of NVIDIA's devices, and how they are connected."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = (["--query-gpu=driver_version,memory.total", "--format=csv,noheader"], ["topo", "-m"])
    run = [
        subprocess.run(["nvidia-smi", *each], capture_output=True, text=True, timeout=30, check=False) for each in asked
    ]
    return "\n".join(each.stdout.strip() for each in run)

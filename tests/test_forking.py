"""What is imported before a fork, and what trains on the CPU, asks no driver: a process that has asked one forks others in vain.

The server of `run_ranks` imports what test files name, and loaders fork their workers. Each case is a process of its own in which
every question to a driver raises; on a machine with a GPU one such question in one import would break every test on it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from accel_testing import ranks

ROOT = Path(__file__).parents[1]

GUARD = """
import sys
import torch

def refused(name):
    def ask(*_, **__):
        raise AssertionError(f"{name}() asks a driver")
    return ask

build = torch.accelerator.current_accelerator

def current_accelerator(check_available=False):
    if not check_available:
        return build()
    if sys._getframe(1).f_globals["__name__"] == "torch.optim.optimizer":  # before each step
        return None  # as on a machine without one
    return refused("current_accelerator")()

torch.accelerator.current_accelerator = current_accelerator
for module, names in (
    (torch.accelerator, ("is_available", "device_count", "current_device_index", "set_device_index", "current_stream")),
    (torch.cuda, ("is_available", "device_count", "current_device", "init", "_lazy_init", "get_device_capability")),
    (torch.xpu, ("is_available", "device_count", "current_device", "init", "_lazy_init")),
    (torch._C, [name for name in dir(torch._C) if name.startswith(("_accelerator_get", "_accelerator_set", "_accelerator_sync"))]),
):
    for name in names:
        if name != "_accelerator_getAccelerator":  # of the build
            setattr(module, name, refused(f"{module.__name__}.{name}"))
"""


class Preloaded(NamedTuple):
    """The modules that a file names in `preload`, and the variables that it sets before."""

    modules: tuple[str, ...]
    environ: dict[str, str]


def preload_lists() -> dict[str, Preloaded]:
    """By file. The first one is what the server imports always."""
    found = {"accel_testing": Preloaded(tuple(ranks._preloaded), {})}
    for pattern in ("packages/*/tests/**/*.py", "tests/*.py", "examples/*/tests/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            calls = [
                node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
            ]
            words = {"preload": [], "os.environ.setdefault": []}
            for call in calls:
                if ast.unparse(call.func) in words:
                    words[ast.unparse(call.func)].append([ast.literal_eval(word) for word in call.args])
            if words["preload"]:
                modules = [name for names in words["preload"] for name in names]
                found[path.relative_to(ROOT).as_posix()] = Preloaded(
                    tuple(modules), dict(words["os.environ.setdefault"])
                )
    return found


LISTS = preload_lists()


def run(script: str, environ: Mapping[str, str] = MappingProxyType({})) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GUARD + textwrap.dedent(script)],
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_lists_are_found():
    assert {
        "accel_testing",
        "packages/fsdp-plugin/tests/conftest.py",
        "packages/deepspeed-plugin/tests/conftest.py",
    } <= {*LISTS}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_imported_before_a_fork_asks_no_driver(name):
    modules, environ = LISTS[name]
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
    beside = {"PYTHONPATH": str((ROOT / name).parent)}  # a list may name modules of its own tests
    run("\n".join(f"import {module}" for module in modules), environ | beside)


def test_the_guard_sees_a_question():
    with pytest.raises(AssertionError, match=r"current_accelerator\(\) asks a driver"):
        run("from accel_core import Accelerator; Accelerator()")


def test_training_on_the_cpu_asks_no_driver(tmp_path):
    run(f"""
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        from accel_core import Accelerator, PartialState, World, clear_device_cache, find_executable_batch_size, gather

        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model, data = nn.Linear(4, 1), TensorDataset(torch.ones(8, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, num_workers=1))
        for (batch,) in loader:
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.gather_for_metrics(batch)
            gather(batch)
        assert World.current().device == PartialState().device == torch.device("cpu")
        accelerator.save_state({str(tmp_path / "state")!r})
        accelerator.load_state({str(tmp_path / "state")!r})
        find_executable_batch_size(lambda size: size)()
        clear_device_cache(garbage_collection=True)
        accelerator.explain()
        accelerator.free_memory(model, optimizer)
        accelerator.end_training()
    """)

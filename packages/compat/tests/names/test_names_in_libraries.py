"""What installed libraries import from `accelerate`, and read of its objects, is there: new versions show here."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import accelerate
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import GradientState
from accelerate.utils import DeepSpeedPlugin

OBJECTS = {
    "accelerator": lambda: Accelerator(cpu=True),
    "deepspeed_plugin": DeepSpeedPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "gradient_state": GradientState,
    "parallelism_config": ParallelismConfig,
}
"""What libraries call a variable or an attribute → such an object."""

USES = re.compile(rf"^\s*(from|import) accelerate\b|\baccelerate\.|\b({'|'.join(OBJECTS)})\.", re.MULTILINE)
LIBRARIES = [name for name in ("transformers", "peft", "trl", "diffusers") if find_spec(name) is not None]
ASKED_FIRST = {
    ("accelerator", "deepspeed_engine_wrapped"),  # under DeepSpeed only
    ("accelerator", "deepspeed_ulysses_dl_adapter"),  # sequence parallelism of DeepSpeed only, which is refused
    ("accelerator", "scaler"),  # under fp16 only; asked for by getattr or in a try
    ("accelerator", "type"),  # a device of torch, in a variable of that name
    ("accelerator", "torch_device_mesh"),  # there under strategies with a mesh
}
"""What a library reads only where it is there."""


@cache
def trees(library: str) -> dict[Path, ast.Module]:
    folder = Path(find_spec(library).submodule_search_locations[0])
    texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    return {path: ast.parse(text) for path, text in texts.items() if USES.search(text)}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(library: str) -> set[tuple[str, str]]:
    found = set()
    for tree in trees(library).values():
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and (node.module or "").partition(".")[0] == "accelerate"
            ):
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Attribute) and any(name.partition(".")[0] == "accelerate" for name in names):
                path = dotted(node)
                if path.startswith("accelerate."):
                    found.add(tuple(path.rpartition("."))[::2])
    return found


def resolve(path: str, name: str) -> bool:
    """Whether `path.name` is there; the path is a module, or an attribute of one."""
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        owner = accelerate
        for part in path.split(".")[1:]:
            owner = getattr(owner, part, None)
    if owner is not None and hasattr(owner, name):
        return True
    return find_spec(f"{path}.{name}") is not None


def test_transformers_is_looked_at():
    assert "transformers" in LIBRARIES
    assert ("accelerate", "Accelerator") in imported("transformers")


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_library_imports_is_there(library):
    assert sorted(found for found in imported(library) if not resolve(*found)) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_library_reads_of_objects_is_there(library):
    read = defaultdict(set)
    for tree in trees(library).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                path = dotted(node.value)
                owner = path.rpartition(".")[2]
                if owner in OBJECTS and not path.startswith("torch."):
                    read[owner].add(node.attr)
    missing = []
    for owner, names in read.items():
        thing = OBJECTS[owner]()
        missing += [(owner, name) for name in names if not hasattr(thing, name) and (owner, name) not in ASKED_FIRST]
    assert sorted(missing) == []

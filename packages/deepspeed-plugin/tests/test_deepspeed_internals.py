"""Every name of DeepSpeed's that is used beyond its documented interface is there in the version that is installed."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import deepspeed
import pytest

import accel_deepspeed

SOURCES = {path.stem: ast.parse(path.read_text()) for path in Path(accel_deepspeed.__file__).parent.glob("*.py")}
RUNTIME = "deepspeed.runtime"
ENGINE = f"{RUNTIME}.engine"
OPTIMIZERS = (f"{RUNTIME}.zero.stage_1_and_2", f"{RUNTIME}.zero.stage3", f"{RUNTIME}.base_optimizer")
PARAMETERS = (f"{RUNTIME}.zero.partition_parameters", "deepspeed.utils.tensor_fragment", OPTIMIZERS[0])
OWNERS = {
    ("engine_internals", "engine"): (ENGINE,),
    ("engine_internals", "DeepSpeedEngine"): (ENGINE,),
    ("engine_internals", "zero"): OPTIMIZERS,
    ("engine_internals", "bucket"): OPTIMIZERS[:2],
    ("engine_internals", "parameter"): PARAMETERS,
    ("engine_internals", "mapping"): PARAMETERS,
    ("model_engine", "engine"): (ENGINE,),
    ("communication", "comm"): ("deepspeed.comm.comm",),
    ("communication", "groups"): ("deepspeed.utils.groups",),
    ("communication", "module"): ("deepspeed/comm/torch.py",),
}
"""By a module of ours, and what it calls an object, the modules that define its attributes."""
OF_TORCH = {"grad", "numel", "shape", "partition_numel"}
OURS = {"fragments"}  # of the engine that stands around DeepSpeed's


def names():
    """Every attribute of an object of DeepSpeed's that our source reads, writes or calls, with where it is defined."""
    found = set()
    for (source, owner), modules in OWNERS.items():
        for node in ast.walk(SOURCES[source]):
            if isinstance(node, ast.Attribute):
                holder = getattr(node.value, "attr", None) or getattr(node.value, "id", None)
                if holder == owner and node.attr not in OF_TORCH | OURS:
                    found.add((node.attr, modules))
    return sorted(found)


def imports():
    """The names that our source imports from modules of DeepSpeed's."""
    nodes = (node for tree in SOURCES.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return sorted(
        {
            (node.module, each.name)
            for node in nodes
            if (node.module or "").startswith("deepspeed.")
            for each in node.names
        }
    )


@functools.cache
def text_of(module):
    if module.endswith(".py"):
        return (Path(deepspeed.__file__).parents[1] / module).read_text()
    return inspect.getsource(importlib.import_module(module))


def is_defined(name, modules):
    """Whether a function, a field or an attribute of that name is made in one of the modules."""
    made = re.compile(
        rf"\bdef {name}\(|\.{name}\b *(?::[^=\n]+)?(?:\[[^\]]*\])? *=[^=]|^ *{name}(?:: [^=]+)? *=|^ *{name}: |[(\"'.]{name}[\"']",
        re.MULTILINE,
    )
    return any(made.search(text_of(module)) for module in modules)


@pytest.mark.parametrize(("module", "name"), imports())
def test_an_imported_name_is_there(module, name):
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("name", "modules"), names(), ids=lambda value: value if isinstance(value, str) else "")
def test_an_attribute_is_defined_where_it_should_be(name, modules):
    assert is_defined(name, modules)


def test_a_name_that_has_gone_is_found():
    assert not is_defined("averaged_gradient_lists", OPTIMIZERS)
    assert not is_defined("averaged", OPTIMIZERS)
    assert len(names()) > 35

"""No file is ever run: the source is walked for whatever loads pickles, or turns text or bytes into code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))

# Whatever is named so may run what it reads.
RUNS = re.compile(
    r"(?:_?pickle|cPickle|dill|cloudpickle)\.(?:_?loads?|_?Unpickler)"
    r"|marshal\.loads?|shelve\.\w+|joblib\.load|pandas\.(?:read_pickle|io\.pickle\.\w+)"
    r"|yaml\.(?:load|load_all|full_load|full_load_all|unsafe_load|unsafe_load_all|(?:Full|Unsafe)?C?Loader)"
    r"|numpy\.load|numpy\.lib\.(?:npyio\.load|format\.read_array)"
    r"|torch\.(?:load|serialization\.load|hub\.load\w*|jit\.load|package\.PackageImporter)"
    r"|torch\.distributed\.checkpoint\.(?:load\w*|FileSystemReader|format_utils\.\w+)"
    r"|multiprocessing\.reduction\.ForkingPickler|runpy\.\w+|(?:builtins\.)?(?:eval|exec|execfile|compile|__import__)"
)

# Calls of these are safe with one argument: its name and value.
SAFE_WITH = {
    "torch.load": ("weights_only", True),
    "torch.serialization.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "numpy.lib.npyio.load": ("allow_pickle", False),
    "numpy.lib.format.read_array": ("allow_pickle", False),
}

BETWEEN_RANKS = "objects travel between the memories of ranks, never by a file"
A_TEST_S = "the processes of a test send each other its function, its arguments and its results"
NOTEBOOKS = "a function of a notebook and what comes of it travel between the memories of processes that it started, never by a file that has a name"
A_SCRIPT = "the script whose resuming the user has verified, as `python script.py` would run it"
ALLOWED = {
    ("accel_core.collectives.objects", "pickle.loads"): BETWEEN_RANKS,
    ("accel_data.batch_codec", "pickle.loads"): BETWEEN_RANKS,
    ("accel_testing.precision_jobs", "pickle.loads"): "a model is pickled and unpickled by the test that made it",
    (
        "accel_core.plugins.manager",
        "eval",
    ): "an adapter is made from the signature of a plugin's method, which runs anyway",
    ("accel_core.options.conversion", "eval"): "the annotations of a component's constructor, which runs anyway",
    ("accel_diagnostics.resume.observed", "runpy.run_module"): A_SCRIPT,
    ("accel_diagnostics.resume.observed", "runpy.run_path"): A_SCRIPT,
    ("accel_launch.notebook.rank", "pickle.loads"): NOTEBOOKS,
    ("accel_launch.notebook.running", "pickle.loads"): NOTEBOOKS,
    (
        "accel_launch.settings.rendering",
        "yaml.load",
    ): "ruamel's own object, which makes mappings, sequences and scalars alone",
    ("accel_compat.commands.config_file", "yaml.load"): "ruamel's safe loader, which makes plain values alone",
    ("accel_launch.notebook.function_pickle", "pickle.loads"): NOTEBOOKS,
    ("accel_launch.notebook.function_pickle", "marshal.loads"): NOTEBOOKS,
    ("accel_testing.shared_launch", "pickle.loads"): A_TEST_S,
    ("accel_testing.ranks", "pickle.loads"): A_TEST_S,
    ("accel_testing.loader_jobs", "pickle.loads"): "a loader is copied by pickling it",
    (
        "accel_testing.tracker_jobs",
        "builtins.__import__",
    ): "it is compared with what it was before, and not called",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[3:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def found_in(tree: ast.Module) -> set[tuple[int, str]]:
    """Line and full name of everything that may run what it reads, called or handed on."""
    aliases = full_names(tree)
    safe = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and is_safe(node, aliases)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):  # `from pickle import *` gives no name that could be followed
            found |= {(node.lineno, f"{node.module}.*") for alias in node.names if alias.name == "*"}
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in safe:
            name = resolved(node, aliases)
            if name is not None and RUNS.fullmatch(name):
                found.add((node.lineno, name))
    return found


def full_names(tree: ast.Module) -> dict[str, str]:
    """What the names that imports make stand for; an import in a function counts for the whole module."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def resolved(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def is_safe(call: ast.Call, names: dict[str, str]) -> bool:
    argument, expected = SAFE_WITH.get(resolved(call.func, names) or "", (None, None))
    values = [keyword.value for keyword in call.keywords if keyword.arg == argument]
    return bool(values) and isinstance(values[0], ast.Constant) and values[0].value is expected


def all_found() -> dict[tuple[str, str], list[int]]:
    places: dict[tuple[str, str], list[int]] = {}
    for path in SOURCES:
        for line, name in sorted(found_in(ast.parse(path.read_text(encoding="utf-8")))):
            places.setdefault((module_of(path), name), []).append(line)
    return places


def test_no_file_is_loaded_as_a_pickle_or_as_code():
    assert SOURCES
    assert not {place: lines for place, lines in all_found().items() if place not in ALLOWED}


def test_every_exception_is_needed():
    assert ALLOWED.keys() <= all_found().keys()


def test_weights_are_the_one_thing_that_torch_loads():
    callers = {module_of(path) for path in SOURCES if re.search(r"torch\.load\(", code_of(path))}
    of_others = {"checkpoints.pickled_file", "custom_states", "fsdp_weights", "model_files", "run_helpers"}
    assert callers == {
        "accel_checkpoint.weights.sources",
        "accel_deepspeed.importing.pickled_file",
        *(f"accel_compat.{module}" for module in of_others),
    }


def code_of(path: Path) -> str:
    """The calls in a module, without its strings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return "\n".join(f"{ast.unparse(node.func)}(" for node in ast.walk(tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("code, name", [
    ("import pickle\npickle.load(file)", "pickle.load"),
    ("import pickle as p\np.loads(content)", "pickle.loads"),
    ("from pickle import loads as parse\nparse(content)", "pickle.loads"),
    ("from pickle import Unpickler\nclass Mine(Unpickler): pass", "pickle.Unpickler"),
    ("import pickle\nmap(pickle.loads, parts)", "pickle.loads"),
    ("def read():\n    from pickle import *", "pickle.*"),
    ("import torch\ntorch.load(path)", "torch.load"),
    ("import torch\ntorch.load(path, weights_only=False)", "torch.load"),
    ("import torch\ntorch.load(path, weights_only=flag)", "torch.load"),
    ("import torch\ntorch.load(path, **options)", "torch.load"),
    ("import torch\nread = partial(torch.load, weights_only=True)", "torch.load"),
    ("from torch import load\nload(path)", "torch.load"),
    ("import torch\ntorch.jit.load(path)", "torch.jit.load"),
    ("from torch.distributed import checkpoint as dcp\ndcp.load(state)", "torch.distributed.checkpoint.load"),
    ("import numpy as np\nnp.load(path)", "numpy.load"),
    ("import numpy as np\nnp.load(path, allow_pickle=True)", "numpy.load"),
    ("import marshal\nmarshal.loads(content)", "marshal.loads"),
    ("import shelve\nshelve.open(path)", "shelve.open"),
    ("import joblib\njoblib.load(path)", "joblib.load"),
    ("import yaml\nyaml.load(text, Loader)", "yaml.load"),
    ("eval(text)", "eval"),
    ("exec(text)", "exec"),
    ("import builtins\nbuiltins.eval(text)", "builtins.eval"),
])  # fmt: skip
def test_what_could_run_a_file_is_recognised(code, name):
    assert name in {found for _, found in found_in(ast.parse(code))}


@pytest.mark.parametrize("code", [
    "import torch\ntorch.load(path, weights_only=True, mmap=True)",
    "import numpy as np\nnp.load(path, allow_pickle=False)",
    "import pickle\npickle.dumps(value)",
    "import json\njson.loads(text)",
    "model.eval()",
    "import re\nre.compile(pattern)",
    "import torch\ntorch.compile(model)",
    "entry.load()",
    '"""Never call pickle.load(file)."""',
])  # fmt: skip
def test_what_runs_nothing_is_left_alone(code):
    assert not found_in(ast.parse(code))

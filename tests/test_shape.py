"""The shape of the repository: who imports whom, what a package consists of, how large things are, what is never written.

Everything is read from the files, nothing is imported, so these tests need no package to be installed.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
IMPORT_NAMES = {
    path.parent.parent.parent.name: path.parent.name for path in ROOT.glob("packages/*/src/accel_*/py.typed")
}
METADATA = "compat-metadata"  # a distribution under another project's name, by which accel-compat is found: no code, no own version
MODULES = sorted(ROOT.glob("packages/*/src/**/*.py"))
TESTS = sorted([*ROOT.glob("tests/*.py"), *ROOT.glob("packages/*/tests/**/*.py")])

SHOWN_MODULE, SHOWN_FUNCTION = 400, 40  # larger ones are listed
MOST_MODULE, MOST_FUNCTION = 700, 80  # larger ones fail

VENDORS = re.compile(
    r"\b(cuda|nccl|rocm|hip|mps|xpu|npu|hpu|mlu|xla|neuron|hccl|xccl|"
    r"fsdp2?|deepspeed|megatron|horovod|bagua|bitsandbytes|torchao|transformer_engine|"
    r"wandb|comet|comet_ml|tensorboard|mlflow|aim|clearml|dvclive|swanlab|trackio)\b",
    re.IGNORECASE,
)
VOCABULARY = "packages/core/src/accel_core/base/vocabulary.py"  # older public names: the one place that knows vendors

OURS_ELSEWHERE = re.compile(r"(?<![\w.])/(root|home|Users|work|opt|mnt)/\w")
REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.(org|com)|conda\.io", re.IGNORECASE
)

DISTRIBUTIONS = {"yaml": "pyyaml", "accelerate": "accel_compat"}  # of modules that are not named as what brings them

COMMANDS = {
    "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s quickstart": "quickstart",
    "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s tests": "tests",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """`accel_core.plugins.offers` for packages/core/src/accel_core/plugins/offers.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts[3:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in MODULES}
PACKAGES_OF = {
    module_name(path.parent / "__init__.py"): path.parents[2] for path in ROOT.glob("packages/*/src/*/py.typed")
}


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST, *, running: bool):
    """Every import below a node, inside functions too; with `running`, without what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if running and for_type_checkers(child):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from imports(child, running=running)


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The dotted names that a statement imports; all imports in this repository are absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def as_module(name: str) -> str:
    """The module of ours that a dotted name lies in: itself, or the one that defines it."""
    return name if name in NAMES else name.rpartition(".")[0]


def declared_dependencies(folder: Path) -> set[str]:
    """Import names of the distributions in `dependencies`, ours having an underscore for the hyphen."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', block[1])} if block else set()


def extras(folder: Path) -> set[str]:
    """Import names of the distributions that an extra installs: imported where they are used."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    return {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', block[1])} if block else set()


@pytest.mark.parametrize("package", IMPORT_NAMES)
def test_a_package_imports_only_packages_of_ours_that_it_declares(package):
    allowed = declared_dependencies(PACKAGES[package]) | extras(PACKAGES[package]) | {IMPORT_NAMES[package]}
    foreign = {
        f"{relative(path)}:{node.lineno} imports {name}"
        for path in PACKAGES[package].glob("src/**/*.py")
        for node in imports(tree(path), running=False)
        for name in imported(node)
        if name.startswith("accel_") and name.partition(".")[0] not in allowed
    }
    assert not foreign


@pytest.mark.parametrize("package", IMPORT_NAMES)
def test_a_package_declares_what_its_modules_cannot_be_imported_without(package):
    """A module may need what an extra installs. Imports inside functions are of what is asked for where it is used."""
    declared = declared_dependencies(PACKAGES[package]) | extras(PACKAGES[package])
    known = {*sys.stdlib_module_names, *declared, IMPORT_NAMES[package]}
    undeclared = {
        f"{relative(path)}:{node.lineno} imports {name}"
        for path in PACKAGES[package].glob("src/**/*.py")
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(node)
        if DISTRIBUTIONS.get(name.partition(".")[0], name.partition(".")[0]) not in known
    }
    assert not undeclared


def test_the_core_depends_on_no_package_of_ours():
    assert not {name for name in declared_dependencies(PACKAGES["core"]) if name.startswith("accel")}


@pytest.mark.parametrize("package", sorted(set(IMPORT_NAMES) - {"core"}))
def test_a_package_uses_only_public_names_of_another(package):
    private = set()
    for path in PACKAGES[package].glob("src/**/*.py"):
        theirs = {}
        for node in imports(tree(path), running=False):
            for alias, name in zip(node.names, imported(node), strict=True):
                if name.startswith("accel_") and not name.startswith(IMPORT_NAMES[package]):
                    theirs[alias.asname or alias.name.partition(".")[0]] = name
                    if re.search(r"\._(?!_)", name):
                        private.add(f"{relative(path)}:{node.lineno} imports {name}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and ast.unparse(node.value) in theirs:
                private.add(f"{relative(path)}:{node.lineno} uses {ast.unparse(node)}")
    assert not private


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count: a circle is not undone by hiding it. Those for type checkers do not."""
    edges = {}
    for name, path in NAMES.items():
        found = {as_module(target) for node in imports(tree(path), running=True) for target in imported(node)}
        edges[name] = (found & NAMES.keys()) - {name}
    circles = {" → ".join([*path, path[0]]) for path in circles_of(edges)}
    assert not circles


def circles_of(edges: dict[str, set[str]]) -> list[list[str]]:
    """One circle for each edge that closes one, found by walking depth first."""
    circles, finished = [], set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            circles.append(path[path.index(name) :])
        elif name not in finished:
            for target in sorted(edges[name]):
                walk(target, [*path, name])
            finished.add(name)

    for name in sorted(edges):
        walk(name, [])
    return circles


ROOMS = (
    "base",
    "options",
    "contract",
    "plugins",
    "processes",
    "collectives",
    "loading",
    "loop",
    "strategies",
    "tracking",
    "facade",
    "accel_core",  # the modules of the root
    "api",
)
"""Of the core, the lowest floor first."""


def room_of(name: str) -> str:
    """`loop` for accel_core.loop.memory, and `accel_core` for accel_core.build."""
    core, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    return room if room in ROOMS else core


def test_a_room_of_the_core_imports_only_rooms_below_it():
    """Imports inside functions count. Those for type checkers do not."""
    upwards = {
        f"{relative(path)}:{node.lineno} imports {target}"
        for name, path in NAMES.items()
        if name.startswith("accel_core")
        for node in imports(tree(path), running=True)
        for target in imported(node)
        if target.startswith("accel_core") and ROOMS.index(room_of(target)) > ROOMS.index(room_of(name))
    }
    assert not upwards


def test_the_root_of_the_core_has_the_accelerator_and_what_it_is_built_of():
    root = {path.stem for path in (PACKAGES["core"] / "src" / "accel_core").glob("*.py")}
    assert root == {"__init__", "__main__", "accelerator", "build", "state"}
    folders = {name.split(".")[1] for name in NAMES if name.startswith("accel_core.")} - root
    assert folders == set(ROOMS) - {"accel_core"}


def test_the_tests_of_the_core_stand_in_the_rooms_of_what_they_test():
    tests = PACKAGES["core"] / "tests"
    assert not [*tests.glob("test_*.py")]
    assert {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")} <= set(ROOMS)


def is_door(module: str) -> bool:
    """The root of a package, of the core the modules of `api`, of the testing tools every module: what others import."""
    package, _, rest = module.partition(".")
    return not rest or package == "accel_testing" or (package == "accel_core" and rest.startswith("api."))


def test_packages_are_imported_through_their_doors():
    """By sources and tests of the other packages, and by what third parties and users write. Benchmarks measure inner parts too."""
    patterns = ("packages/*/**/*.py", "examples/**/*.py", "tests/strategies/*.py")
    inner = {
        f"{relative(path)}:{node.lineno} imports {name}"
        for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern))
        for node in imports(tree(path), running=False)
        for name in imported(node)
        if name.startswith("accel_") and as_module(name) in NAMES and not is_door(as_module(name))
        if PACKAGES_OF[name.partition(".")[0]] not in path.parents
    }
    assert not inner


def test_a_door_offers_exactly_what_it_lists():
    for path in (PACKAGES["core"] / "src" / "accel_core" / "api").glob("[!_]*.py"):
        (listed,) = (node.value for node in tree(path).body if isinstance(node, ast.Assign))
        offered = [alias.name for node in tree(path).body if isinstance(node, ast.ImportFrom) for alias in node.names]
        assert sorted(ast.literal_eval(listed)) == sorted(set(offered) - {"annotations"}), relative(path)


def test_the_accelerator_is_a_list_of_its_parts():
    """What its methods do stands in the topics of `facade`, and what they call in the rooms below."""
    accelerator = (PACKAGES["core"] / "src" / "accel_core" / "accelerator.py").read_text(encoding="utf-8")
    assert len(accelerator.splitlines()) <= 600


def test_the_core_is_minimal():
    """What it does beyond this belongs into a package of its own, or is not needed."""
    sources = (PACKAGES["core"] / "src").rglob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources) <= 14_000


def test_circles_are_found():
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert circles_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_are_absolute():
    assert not {
        f"{relative(path)}:{node.lineno}"
        for path in MODULES
        for node in imports(tree(path), running=False)
        if isinstance(node, ast.ImportFrom) and node.level
    }


def test_the_core_names_no_vendor():
    """A new device, strategy or tracker needs no change in the core. Docstrings and comments may give examples."""
    named = {
        f"{relative(path)}:{number} {text}"
        for path in PACKAGES["core"].glob("src/**/*.py")
        if relative(path) != VOCABULARY
        for number, text in names_and_strings(tree(path))
        if VENDORS.search(text)
    }
    assert not named


def names_and_strings(module: ast.Module):
    """Line and text of every identifier and string in the code, but no docstring (a string that is a statement)."""
    prose = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), getattr(node, field)


@pytest.mark.parametrize(
    "code", ['backend = "nccl"', "torch.cuda.synchronize()", "import deepspeed", "def f(npu): ..."]
)
def test_a_vendor_in_code_is_recognised(code):
    assert any(VENDORS.search(text) for _, text in names_and_strings(ast.parse(code)))


def test_a_vendor_in_a_docstring_is_an_example():
    assert not any(VENDORS.search(text) for _, text in names_and_strings(ast.parse('"""Such as cuda."""')))


def test_no_pickle_is_loaded_from_a_file():
    """No pickle is executed; weights in a pickle are read with `weights_only=True` only."""
    loads = set()
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and reads_pickle(node):
                loads.add(f"{relative(path)}:{node.lineno} {ast.unparse(node)}")
    assert not loads


def reads_pickle(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if function == "torch.load":
        return given.get("weights_only") != "True"
    if function in ("np.load", "numpy.load"):
        return given.get("allow_pickle", "False") != "False"
    return function.endswith("Unpickler") or function in ("pickle.load", "dill.load", "cloudpickle.load", "joblib.load")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.load(f)", True),
        ("torch.load(f, weights_only=False)", True),
        ("torch.load(f, weights_only=True)", False),
        ("pickle.load(f)", True),
        ("pickle.Unpickler(f)", True),
        ("np.load(f, allow_pickle=True)", True),
        ("json.load(f)", False),
    ],
)
def test_loading_a_pickle_is_recognised(source, expected):
    assert reads_pickle(ast.parse(source).body[0].value) is expected


def text_files() -> list[Path]:
    """What is tracked, and what will be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


@pytest.mark.parametrize("forbidden", [OURS_ELSEWHERE, REGISTRIES], ids=["paths of a machine", "package registries"])
def test_no_file_names_what_only_exists_elsewhere(forbidden):
    named = {
        f"{relative(path)}:{number} {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if forbidden.search(line)
    }
    assert not named


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_complete_by_itself(package):
    folder = PACKAGES[package]
    project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    assert len((folder / "README.md").read_text(encoding="utf-8").splitlines()) > 3, "the README says nothing"
    assert (folder / "LICENSE").read_text(encoding="utf-8") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    version = r'^version = "\d+\.\d+\.\d+(\+accel)?"' if package == METADATA else r'^version = "\d+\.\d+\.\d+"$'
    assert re.search(version, project, re.MULTILINE), "the version is static: X.Y.Z"
    assert "dynamic" not in project
    if package not in ("all", METADATA):  # nothing to import
        name = re.search(r'^name = "(.*)"$', project, re.MULTILINE)[1]
        assert (folder / "src" / name.replace("-", "_") / "py.typed").exists()
        assert (folder / "tests").is_dir()


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"core", METADATA}))
def test_a_package_has_a_floor_on_the_core_and_no_pin(package):
    requirements = re.findall(
        r'"(accel-[\w-]+[^"]*)"', (PACKAGES[package] / "pyproject.toml").read_text(encoding="utf-8")
    )
    ours = [requirement for requirement in requirements if re.match(r"accel-[\w-]+[<>=~!]", requirement)]
    assert any(re.fullmatch(r"accel-core>=\d+\.\d+(\.\d+)?", requirement) for requirement in ours)
    assert not [requirement for requirement in ours if "==" in requirement]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_one_version(package):
    """In pyproject.toml, in its CHANGELOG, and in `__version__` where there is one."""
    folder = PACKAGES[package]
    version = re.search(r'^version = "(.*?)"', (folder / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f"## {version}" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    for module in folder.glob("src/*/__init__.py"):
        assert re.findall(r'^__version__ = "(.*)"$', module.read_text(encoding="utf-8"), re.MULTILINE) in (
            [],
            [version],
        )


def test_the_metapackage_requires_every_package_that_trains():
    assert declared_dependencies(PACKAGES["all"]) == set(IMPORT_NAMES.values()) - {
        "accel_testing",
        "accel_compat",
        "accel_xla",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme_are_lines_of_their_own(command):
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("session", COMMANDS.values())
def test_the_commands_of_the_readme_are_sessions(session):
    functions = [node for node in tree(ROOT / "noxfile.py").body if isinstance(node, ast.FunctionDef)]
    sessions = {node.name for node in functions if "nox.session" in map(ast.unparse, node.decorator_list)}
    assert session in sessions


def test_ci_runs_the_test_command_of_the_readme():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert list(COMMANDS)[-1] == lines[-1]


def test_what_only_full_runs_stands_on_its_page_with_its_reason():
    """Every file with tests that are marked `full` has a row in the table, and every row such a file."""
    marked = {
        path.name for path in TESTS if re.search(r"mark\.full\b|sampled\(CAUGHT_BY\)", path.read_text(encoding="utf-8"))
    }
    marked -= {Path(__file__).name, "covering.py"}
    text = (ROOT / "docs/explanation/long-tests.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \|$", text, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(test_\w+\.py)`", row)]
    assert sorted(named) == sorted(marked)


def functions(path: Path) -> dict[str, int]:
    """Lines of every function, from `def` to its end without its docstring: the interface is not what is long."""
    sizes = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = first.end_lineno - first.lineno + 1 if is_docstring else 0
            sizes[f"{relative(path)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1 - docstring
    return sizes


def row(label: str, sizes: list[int]) -> str:
    quantiles = statistics.quantiles(sizes, n=10, method="inclusive") if len(sizes) > 1 else sizes * 9
    return f"{label:<28}{len(sizes):>6}{quantiles[4]:>9.0f}{quantiles[8]:>6.0f}{max(sizes):>6}"


def test_modules_and_functions_are_small(show_sizes):
    """Size is a symptom to watch: everything is shown, and only what is far beyond fails."""
    table, large, too_large = [f"{'':<28}{'count':>6}{'median':>9}{'p90':>6}{'max':>6}"], {}, {}
    for package, name in sorted(IMPORT_NAMES.items()):
        paths = [path for path in PACKAGES[package].glob("src/**/*.py") if path.stat().st_size]
        if not paths:
            continue
        modules = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
        defined = {key: size for path in paths for key, size in functions(path).items()}
        table += [row(f"{name}: modules", [*modules.values()]), row(f"{name}: functions", [*defined.values()] or [0])]
        for sizes, shown, most in ((modules, SHOWN_MODULE, MOST_MODULE), (defined, SHOWN_FUNCTION, MOST_FUNCTION)):
            large |= {key: size for key, size in sizes.items() if size > shown}
            too_large |= {key: size for key, size in sizes.items() if size > most}
    show_sizes("\n".join([*table, *(f"large: {key} ({size})" for key, size in sorted(large.items()))]))
    assert not too_large

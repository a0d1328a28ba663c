"""Runs the tests of the other distribution's sdist against the module `accelerate` of this one. `nox -s peer` calls it.

    python run_peer_tests.py FOLDER [arguments of pytest]

FOLDER lies outside of the repository and has the sdist, packed. Its tests, and its `accelerate.test_utils`, which they import, are
put beside a copy of our module there, and nothing else of it: `FOLDER/site` stands first on the path of every process. What fails
is compared with peer_failures.json, which has a reason for each: a test that fails and is not listed is an error, and so is one
that is listed and passes.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path

LISTED = Path(__file__).parent / "peer_failures.json"
INI = "[pytest]\naddopts = -ra --timeout 170 -p no:cacheprovider\nfilterwarnings = ignore\n"


def unpacked(folder: Path) -> Path:
    """The sdist's own folder."""
    (archive,) = folder.glob("accelerate-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "sdist", filter="data")
    (found,) = (folder / "sdist").iterdir()
    return found


def grafted(sdist: Path, folder: Path) -> Path:
    """A folder for the path, with our `accelerate` and their `accelerate.test_utils`."""
    spec = find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    ours = Path(spec.origin).parent
    shutil.copytree(ours, folder / "site" / "accelerate", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(sdist / "src" / "accelerate" / "test_utils", folder / "site" / "accelerate" / "test_utils")
    return folder / "site"


CONFTEST = """
import importlib, sys, types

class Missing:
    def __init__(self, name):
        self.name = name
    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{{self.name}} is not a name of this module accelerate")

for module, name in {names!r}:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        found = sys.modules[module] = types.ModuleType(module)
    try:
        getattr(found, name)
    except (AttributeError, ImportError):
        setattr(found, name, Missing(f"{{module}}.{{name}}"))
"""
"""A name that a file of tests imports and that is missing fails the tests that call it, not all of that file."""


def imported(tests: Path) -> list[tuple[str, str]]:
    """Module and name of what the tests import from `accelerate`, but for its own test helpers."""
    nodes = [node for path in tests.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return sorted(
        {
            (node.module, each.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "accelerate"
            and "test_utils" not in node.module
            for each in node.names
        }
    )


def failed(report: Path) -> tuple[set[str], set[str]]:
    """The ids that failed, and all that ran, each as module::class::name; a file that cannot be imported is one id."""
    bad, ran = set(), set()
    for case in ET.parse(report).getroot().iter("testcase"):
        names = [*case.get("classname", "").split("."), case.get("name", "")]
        name = "::".join(filter(None, names))
        if case.find("skipped") is None:
            ran.add(name)
        if case.find("failure") is not None or case.find("error") is not None:
            bad.add(name)
    return bad, ran


def main(folder: Path, arguments: list[str]) -> int:
    """0 where exactly what is listed fails."""
    sdist = unpacked(folder)
    site = grafted(sdist, folder)
    shutil.copytree(sdist / "tests", folder / "tests")
    (folder / "tests" / "pytest.ini").write_text(INI, encoding="utf-8")
    (folder / "tests" / "conftest.py").write_text(CONFTEST.format(names=imported(folder / "tests")), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--junitxml", "../report.xml", *arguments]
    subprocess.run(command, cwd=folder / "tests", env=environment, check=False)
    bad, ran = failed(folder / "report.xml")
    listed = {
        test: group["because"] for group in json.loads(LISTED.read_text(encoding="utf-8")) for test in group["tests"]
    }
    new, mended = sorted(bad - listed.keys()), sorted((ran & listed.keys()) - bad)
    print(
        f"peer: {len(ran)} tests ran, {len(bad)} failed, of which {len(bad & listed.keys())} are listed with a reason"
    )
    for text, tests in (("fails, and is not listed", new), ("is listed, and passes", mended)):
        for test in tests:
            print(f"peer: {text}: {test}")
    return 1 if new or mended or not ran else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))

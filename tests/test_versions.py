"""The versions that packages ask for are those that something was run with: torch's floor, and the Pythons of the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = {
    path.parent.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
WITH_TORCH = {name: project for name, project in PROJECTS.items() if '"torch' in project}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def pinned(constraints: str) -> str:
    """The torch of a constraints file."""
    return re.search(r"^torch==(\S+)$", (ROOT / constraints).read_text(encoding="utf-8"), re.MULTILINE)[1]


@pytest.mark.parametrize("package", WITH_TORCH)
def test_the_floor_of_torch_is_what_nox_oldest_runs(package):
    (floor,) = re.findall(r'"torch>=([\d.]+)"', WITH_TORCH[package])
    recent = re.search(r"^RECENT = (.*)$", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)[1]
    constraints = "constraints.txt" if package in ast.literal_eval(recent) else "constraints-oldest.txt"
    assert f"{floor}.0" == pinned(constraints)


def test_every_package_that_trains_says_which_torch_it_needs():
    assert set(PROJECTS) - set(WITH_TORCH) == {
        "all",
        "compat-metadata",
    }  # the one names the others, the other has no code


@pytest.mark.parametrize(
    ("session", "call"),
    [
        ("oldest", "run_tests(session, older, GROUPS['test'], OLDEST)"),
        ("newest", "run_tests(session, TESTED, TEST, NEWEST)"),
    ],
)
def test_sessions_of_nox_run_the_tests_with_the_torch_of_both_ends(session, call):
    functions = {
        node.name: ast.unparse(node)
        for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert call in functions[session]
    assert "constraints=constraints" in functions["run_tests"]
    assert "folders(names or packages)" in functions["run_tests"]


@pytest.mark.parametrize("package", PROJECTS)
def test_pythons_are_those_of_the_page(package):
    project = PROJECTS[package]
    assert f'requires-python = ">={PYTHONS[0]}"' in project
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) in ([], list(PYTHONS))


def test_the_page_has_every_package_each_torch_and_every_python():
    page = (ROOT / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    names = [re.search(r'^name = "(.*)"$', project, re.MULTILINE)[1] for project in WITH_TORCH.values()]
    torches = [pinned(f"constraints{which}.txt") for which in ("-oldest", "", "-newest")]
    assert [each for each in (*names, *torches, *PYTHONS) if each not in page] == []

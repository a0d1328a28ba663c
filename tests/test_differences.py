"""The page on differences stays true of the source: what it tells to write exists, and what it calls missing is missing."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import accel_core
import accel_data

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/differences.md").read_text(encoding="utf-8")
MISSING = PAGE.partition("## Not there yet")[2]
ASKED_FOR = "\n".join(re.findall(r"^(\|[^|]*\|)", MISSING, re.MULTILINE))  # the first column
OLDER = PAGE.partition("| Older | Write |")[2].partition("\n\n")[0]
ROOTS = {
    "accelerator": accel_core.Accelerator,
    "accel_core": accel_core,
    "torch": torch,
    **{name: getattr(module, name) for module in (accel_core, accel_data) for name in module.__all__},
    **{name: value for name, value in vars(accel_core.Accelerator).items() if not name.startswith("_")},
}


def code_of(text):
    """What stands in backticks outside of the blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def parsed_calls():
    """Every piece of code that is one call of something public, with its text."""
    for code in dict.fromkeys(code_of(PAGE)):
        try:
            node = ast.parse(code.replace("=...", "=0"), mode="eval").body
        except SyntaxError:
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ROOTS:
            yield code, node


CALLS = dict(parsed_calls())


@pytest.mark.parametrize("code", CALLS)
def test_a_call_on_the_page_names_options_that_exist(code):
    first, *others = ast.unparse(CALLS[code].func).split(".")
    found = ROOTS[first]
    for name in others:
        found = getattr(found, name)
    parameters = inspect.signature(found).parameters
    assert {keyword.arg for keyword in CALLS[code].keywords} <= set(parameters)


def test_the_switches_to_the_behaviour_of_the_peer_are_among_the_calls():
    assert "Accelerator(step_scheduler_per_process=True)" in CALLS
    assert len(CALLS) > 15


@pytest.mark.parametrize("name", re.findall(r"`((?:accelerator|accel_core)\.\w+)`", ASKED_FOR))
def test_a_name_that_is_said_to_be_missing_is_missing(name):
    first, attribute = name.split(".")
    assert not hasattr(ROOTS[first], attribute)


@pytest.mark.parametrize("option", ["mixed_precision", "strategy", "log_with"])
def test_components_that_are_said_to_be_missing_are_named_with_their_distribution(option):
    (line,) = re.findall(rf"^\| `{option}=.*", MISSING, re.MULTILINE)
    distributions = re.findall(r"accel-\w+", line)
    for name in re.findall(r'"(\w+)"', line):
        with pytest.raises(accel_core.NotInstalledError) as raised:
            accel_core.Accelerator(**{option: name})
        assert any(f"pip install {distribution}" in str(raised.value) for distribution in distributions)


def test_the_older_spellings_on_the_page_are_those_of_the_source():
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py")]
    declared = [
        tuple(ast.literal_eval(argument) for argument in node.args)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Deprecation"
    ]
    assert declared
    assert set(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", OLDER, re.MULTILINE)) == set(declared)

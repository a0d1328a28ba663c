"""Every older name is there and takes its arguments, or is known to come with a later part of the library."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from names import COMES_WITH, OLDER_ARGUMENTS, OLDER_NAMES
from reference_pages.names import names_pages

import accel_core
from accel_core import Accelerator, AutocastKwargs, Strategy, hookimpl
from accel_core.api.component import how_to_install
from accel_core.base.vocabulary import ELSEWHERE, KNOWN_PROVIDERS
from accel_core.base.vocabulary import OlderArguments as Typed

ROOT = Path(__file__).parents[1]

LOOSE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class OlderName(NamedTuple):
    path: str
    parameters: frozenset[str] = frozenset()
    members: frozenset[str] = frozenset()

    @classmethod
    def read(cls, text: str) -> OlderName:
        path, given, members = re.fullmatch(r"([\w.]+)(?:\((.*)\))?(?:: (.*))?", text).groups()
        return cls(path, frozenset(filter(None, (given or "").split(", "))), frozenset((members or "").split()))

    def find(self) -> object:
        """The object of that name; LookupError if there is none."""
        owner, *rest = self.path.replace("Accelerator", "accel_core.Accelerator", self.path.startswith("Acc")).split(
            "."
        )
        try:
            found = importlib.import_module(owner)
            for name in rest:
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise LookupError(self.path) from error
        return found

    def lacks(self) -> str:
        """What is missing of it, in words; empty if nothing is."""
        try:
            found = self.find()
        except LookupError:
            return f"{self.path} is missing"
        if absent := self.parameters - (parameters(found) if self.parameters else set()):
            return f"{self.path} does not take {', '.join(sorted(absent))}"
        if absent := self.members - ({each.name for each in found} if self.members else set()):
            return f"{self.path} has no member {', '.join(sorted(absent))}"
        return ""


def parameters(found) -> set[str]:
    """What a call takes, `*` and `**` for any number; without `self`, and without what only ours have."""
    given = inspect.signature(found).parameters.values()
    loose = {each.kind for each in given}
    marks = {mark for mark, kind in zip(("*", "**"), LOOSE, strict=True) if kind in loose}
    return marks | {each.name for each in given if each.kind not in LOOSE}


NAMES = {row: [OlderName.read(text) for text in texts] for row, texts in OLDER_NAMES.items()}
EVERY = [name for names in NAMES.values() for name in names]


def test_every_older_name_that_is_due_exists_with_its_arguments():
    missing = {
        f"{' '.join(row)}: {lack}"
        for row, names in NAMES.items()
        for name in names
        if name.path not in COMES_WITH and (lack := name.lacks())
    }
    assert not missing, "\n".join(["", *sorted(missing)])


def test_what_exists_does_not_stand_in_the_table_of_what_is_to_come():
    waiting = {name.path: name for name in EVERY if name.path in COMES_WITH}
    assert waiting.keys() == COMES_WITH.keys(), "not an older name"
    there = [path for path, name in waiting.items() if not name.lacks()]
    assert not there, "take these out of COMES_WITH: " + ", ".join(there)


def test_no_name_stands_twice():
    paths = [name.path for name in EVERY]
    assert sorted(set(paths)) == sorted(paths)


class OfManyNames(Strategy):
    older_names = tuple(argument.partition("_plugin")[0] for argument in OLDER_ARGUMENTS)

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore:.*is an older spelling:FutureWarning")  # its own test is test_deprecation.py
@pytest.mark.filterwarnings("ignore:kwargs_handlers has a AutocastKwargs")  # full precision takes none
@pytest.mark.parametrize("argument", OLDER_ARGUMENTS)
def test_the_constructor_takes_older_arguments_that_its_signature_does_not_have(argument):
    values = {"kwarg_handler": [AutocastKwargs()], "step_with_optimizer": False}
    assert argument not in inspect.signature(Accelerator).parameters
    assert Accelerator(**{argument: values.get(argument, OfManyNames())})


def test_type_checkers_know_the_older_arguments():
    assert set(OLDER_ARGUMENTS) == set(Typed.__annotations__)


class Sample:
    def plain(self, a, b=1): ...

    def loose(self, a, *rest, **options): ...


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        ("Accelerator.no_such_thing", "Accelerator.no_such_thing is missing"),
        ("no_such_package.name", "no_such_package.name is missing"),
        ("Accelerator.gather(tensor, dim)", "Accelerator.gather does not take dim"),
        ("Accelerator.gather(*)", r"Accelerator.gather does not take \*"),
        ("accel_core.RNGType: TORCH CPU", "accel_core.RNGType has no member CPU"),
        ("Accelerator.gather(tensor)", ""),
        ("Accelerator.device", ""),
        ("Accelerator.prepare(*, device_placement)", ""),
    ],
)
def test_what_a_name_lacks_is_told(text, lack):
    assert re.fullmatch(lack, OlderName.read(text).lacks())


def test_any_number_of_arguments_is_told_from_named_ones():
    assert parameters(Sample().plain) == {"a", "b"}
    assert parameters(Sample().loose) == {"a", "*", "**"}


PAGES = {
    name: (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") for name in ("names.md", "names/others.md")
}


def test_the_pages_have_every_name():
    rows = set(re.findall(r"^\| `([\w.]+)", "".join(PAGES.values()), re.MULTILINE))
    assert rows >= {name.path for name in EVERY} | set(OLDER_ARGUMENTS)


def test_the_pages_say_what_the_docstrings_say():
    assert names_pages() == PAGES, "docs/reference/names.md is out of date: type `nox -s docs`"


@pytest.mark.parametrize(("name", "distribution"), ELSEWHERE.items())
def test_a_name_of_another_package_is_told_with_its_package(name, distribution):
    package = distribution.replace("-", "_")
    with pytest.raises(
        AttributeError,
        match=rf"it is in {distribution}\. Write `from {package} import {name}`. .*{re.escape(how_to_install(distribution))}",
    ):
        getattr(accel_core, name)
    assert hasattr(importlib.import_module(package), name)


def test_messages_name_distributions_that_exist():
    ours = {
        re.search(r'^name = "(.+)"', path.read_text(), re.MULTILINE)[1]
        for path in ROOT.glob("packages/*/pyproject.toml")
    }
    named = {each for providers in KNOWN_PROVIDERS.values() for each in providers.values()} | set(ELSEWHERE.values())
    assert named - {None} <= ours
    sources = ((path, path.read_text()) for path in ROOT.glob("packages/*/src/**/*.py"))
    typed = {
        (path.name, name) for path, text in sources for name in re.findall(r"pip install[^{\n]*?(accel-[\w-]+)", text)
    }
    assert {name for _, name in typed} <= ours, typed

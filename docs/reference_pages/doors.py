"""doors.md, and the lists of all classes and of all functions."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import accel_core
from accel_core import api
from reference_pages.classes import class_pages, classes_of
from reference_pages.functions import functions_pages
from reference_pages.markdown import WRITTEN, names_table
from reference_pages.packages import OURS
from reference_pages.source import definitions

NO_DOORS = {"all", "core", "compat", "compat-metadata"}
# They have nothing to import, or a page of their own; the door of compat is `accelerate`.

DOORS_HEAD = """\
<!-- Written by docs/generate.py from the `__init__.py` of each package and from accel_core/api: change them there, then run
`nox -s docs`. -->
# Doors

A door is a module whose names others may import: scripts import from `accel_core`, plugins from `accel_core` and `accel_core.api`, and
every other package offers its names under its own. Version promises hold for these names. Every other module moves and changes without
notice, except in `accel_testing`, where each module is a tool.

"""


def doors_pages() -> dict[str, str]:
    """doors.md, a page for each door, one for each class, and one for the functions of each door."""
    inner = [importlib.import_module(f"{api.__name__}.{each.name}") for each in pkgutil.iter_modules(api.__path__)]
    packages = [importlib.import_module(f"accel_{name.replace('-', '_')}") for name in sorted(OURS - NO_DOORS)]
    doors = (accel_core, *inner, *packages)
    listed = {value: name for door in doors for name, value in classes_of(door).items()}
    pages: dict[str, str] = {}
    rows, classes, functions = [], [], []
    for module in doors:
        name, about = module.__name__, (inspect.getdoc(module) or "").partition("\n")[0]
        described = dict(described_names(name, module.__all__))
        places: dict[str, str] = {"Accelerator": "../accelerator.md"} if module is accel_core else {}
        own = class_pages(module, places, listed)
        calls = functions_pages(module, places)
        pages |= own | calls
        table = names_table(f"# {name}\n\n{about}", ((linked(each, places), does) for each, does in described.items()))
        pages[f"doors/{name}.md"] = f"{WRITTEN}\n{table}"
        rows.append(f"| [`{name}`](doors/{name}.md) | {len(module.__all__)} | {about} |")
        if own:
            classes.append((f"[`{name}`](doors/{name}.md)", links(own)))
        if calls:
            functions.append((f"[`{name}`](doors/{name}.md)", links(calls)))
    for kind, table in (("Classes", classes), ("Functions", functions)):
        pages[f"{kind.lower()}.md"] = by_door(kind, table)
    pages["doors.md"] = "\n".join([DOORS_HEAD, "| Door | Names | What it is for |", "|---|---|---|", *rows, ""])
    return pages


def links(found: Iterable[str]) -> str:
    """Links to pages, as seen from docs/reference."""
    return ", ".join(f"[`{Path(path).stem}`]({path})" for path in sorted(found, key=str.casefold))


def by_door(kind: str, rows: Iterable[tuple[str, str]]) -> str:
    """The page that lists all classes, or all pages with functions."""
    lines = [f"- {door}: {pages}" for door, pages in rows]
    return "\n".join([f"{WRITTEN}\n# {kind}\n", f"{kind} by [door](doors.md):\n", *lines, ""])


def linked(name: str, places: dict[str, str]) -> str:
    """A name in backticks, as a link where it has a place."""
    bare = name.strip("`")
    return f"[{name}]({places[bare]})" if bare in places else name


def described_names(module: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each name, and the first sentence of what stands below its definition. Raises `ValueError` where nothing does."""
    found = definitions(importlib.import_module(module))
    for name in sorted(names, key=str.casefold):
        value = getattr(importlib.import_module(module), name)
        text = found.get(name) or (
            inspect.getdoc(value) if inspect.isclass(value) or inspect.isroutine(value) else None
        )
        if not text:
            raise ValueError(f"{module}.{name} has no docstring: say below its definition what it is.")
        yield f"`{name}`", re.split(r"(?<=[.:]) |\n", text, maxsplit=1)[0].rstrip(":").replace("|", "\\|")

"""A page for each class that a door has."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType

from reference_pages.markdown import WRITTEN, prose, signature
from reference_pages.source import class_in, field_lines, public_members


def classes_of(door: ModuleType) -> dict[str, type]:
    """The classes of ours that a door has, by name; the Accelerator has pages of its own."""
    found = {name: getattr(door, name) for name in door.__all__ if name != "Accelerator"}
    return {
        name: value for name, value in found.items() if inspect.isclass(value) and value.__module__.startswith("accel_")
    }


def class_pages(door: ModuleType, places: dict[str, str], listed: dict[type, str]) -> dict[str, str]:
    """A page for each class of a door; `places` is filled with where they are, as seen from doors/."""
    pages = {}
    for name, value in classes_of(door).items():
        places[name] = f"../classes/{name}.md"
        pages[f"classes/{name}.md"] = class_page(door.__name__, name, value, listed)
    return pages


def class_page(door: str, name: str, value: type, listed: dict[type, str]) -> str:
    """One class: how it is imported, made and used. What it has of a class with a page of its own, stands there."""
    elsewhere = [base for base in value.__mro__[1:] if base in listed]
    inherited = {further for base in elsewhere for further in base.__mro__}
    ours = [base for base in reversed(value.__mro__) if base.__module__.startswith("accel_") and base not in inherited]
    nodes = [class_in(sys.modules[base.__module__], base.__name__) for base in ours]
    members: dict[str, str] = {}
    for node in nodes:
        members |= public_members(node)
    parts = [
        f"{WRITTEN}\n# {name}\n\n```text\nfrom {door} import {name}\n```\n",
        prose(ast.get_docstring(nodes[-1]) or ""),
        "",
    ]
    if elsewhere:
        base = listed[elsewhere[0]]
        parts.append(f"A subclass of [`{base}`]({base}.md), whose page describes inherited members.\n")
    constructors = [item for node in nodes for item in node.body if getattr(item, "name", "") == "__init__"]
    if constructors and isinstance(constructors[-1], ast.FunctionDef):
        call = signature(constructors[-1], name).removesuffix(" -> None")
        parts.append(f"## Constructor\n\n```text\n{call}\n```\n")
    if fields := [line for node in nodes for line in field_lines(node)]:
        parts.append("## Fields\n\n" + "\n".join(fields) + "\n")
    if members:
        parts += ["## Members\n", *members.values()]
    return "\n".join(parts)

"""Pages with the functions that a door has."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import ModuleType

from reference_pages.markdown import WRITTEN, prose, signature

WORDS = 1800  # of functions on one page


def functions_pages(door: ModuleType, places: dict[str, str]) -> dict[str, str]:
    """The functions of a door, on as many pages as they need; `places` is filled with where they are, as seen from doors/."""
    filled: list[list[str]] = [[]]
    for name in sorted(door.__all__, key=str.casefold):
        value = inspect.unwrap(getattr(door, name))
        if inspect.isfunction(value) and value.__module__.startswith("accel_"):
            node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
            if isinstance(node, ast.FunctionDef):
                call = signature(node, name, of_class=False)
                text = f"## {name}\n\n```text\n{call}\n```\n\n{prose(ast.get_docstring(node) or '')}\n"
                if len(" ".join([*filled[-1], text]).split()) > WORDS:
                    filled.append([])
                filled[-1].append(text)
                places[name] = f"../{functions_file(door, len(filled))}#{name.lower()}"
    counts = [""] if len(filled) == 1 else [f" ({number} of {len(filled)})" for number in range(1, len(filled) + 1)]
    titled = enumerate(zip(counts, filled, strict=True), 1)
    return {
        functions_file(door, number): "\n".join([f"{WRITTEN}\n# Functions of {door.__name__}{count}\n", *texts])
        for number, (count, texts) in titled
        if texts
    }


def functions_file(door: ModuleType, number: int) -> str:
    """The file of a page with functions."""
    return f"functions/{door.__name__}{'' if number == 1 else f'-{number}'}.md"

"""The Markdown that pages are made of: tables, docstrings, signatures."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable

WRITTEN = "<!-- Written by docs/generate.py from the docstrings: change them there, then run `nox -s docs`. -->"

LINE = 120  # signatures that are longer have a line for each argument


def names_table(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """A heading, and a table of names and what they do."""
    lines = [f"| {name} | {does} |".replace("  ", " ") for name, does in rows]
    return "\n".join([heading, "", "| Name | What it does |", "|---|---|", *lines, ""])


def prose(docstring: str) -> str:
    """A docstring as Markdown: indented paragraphs become code, and the entries of a field the items of a list."""
    blocks = [re.sub(r"\A( {4}.*)\Z", code, block, flags=re.DOTALL) for block in docstring.split("\n\n")]
    return "\n\n".join(
        re.sub(r"\A(Args|Attributes|Raises|Returns):\n(.*)\Z", field, block, flags=re.DOTALL) for block in blocks
    )


def code(block: re.Match[str]) -> str:
    """A paragraph that stands four spaces in, as a code block."""
    return f"```text\n{textwrap.dedent(block[0])}\n```"


def field(block: re.Match[str]) -> str:
    """`Args:` and `Raises:` as a list with an item for each entry; `Returns:` as a paragraph."""
    title, body = block[1], textwrap.dedent(block[2])
    if title == "Returns":
        return f"**Returns.** {body}"
    items = re.sub(r"^(\w[\w, ]*):", r"- `\1`:", body, flags=re.MULTILINE).replace("\n    ", "\n  ")
    return f"**{'Arguments' if title == 'Args' else title}**\n\n{items}"


def signature(function: ast.FunctionDef, name: str = "", *, of_class: bool = True) -> str:
    """How a function is written, without `self`: `name(argument: type, …) -> type`."""
    name, given = name or function.name, arguments(function.args, of_class)
    returned = f" -> {ast.unparse(function.returns) if function.returns else 'None'}"
    short = f"{name}({', '.join(given)}){returned}"
    if len(short) <= LINE:
        return short
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in given), f"){returned}"])


def arguments(given: ast.arguments, of_class: bool) -> list[str]:
    """Each argument with its type and default, without `self` where it is a method."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    found = [one_argument(item, default) for item, default in zip(positional, defaults, strict=True)]
    found = found[1:] if of_class else found
    if given.vararg:
        found.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        found.append("*")
    found += [one_argument(item, default) for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*found, f"**{ast.unparse(given.kwarg)}"] if given.kwarg else found


def one_argument(argument: ast.arg, default: ast.expr | None) -> str:
    """`name: type = default`."""
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")

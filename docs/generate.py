"""Writes what can be derived from the source: `docs/reference/hooks.md` from `accel_core.hookspecs`.

    nox -s docs          (or `python docs/generate.py` where accel-core is installed)

tests/test_docs.py compares the file with `hooks_page()`, so that a hook never changes without its page.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from accel_core import hookspecs

PAGE = Path(__file__).parent / "reference" / "hooks.md"

HEAD = """\
<!-- Written by docs/generate.py from accel_core/hookspecs.py: change the hooks there, then run `nox -s docs`. -->
# Hooks

A plugin takes over a hook by a method of the same name, marked with `accel_core.hookspecs.hookimpl`, that takes the
arguments it needs by name and leaves out the others. A hook has **one owner** (exactly one implementation is used: the
active component's, else the core's default) or **many listeners** (everyone who implements it is called).
"""


def hooks_page() -> str:
    """The whole page, as it has to stand in docs/reference."""
    specs = ast.parse(inspect.getsource(hookspecs.HookSpecs)).body[0]
    assert isinstance(specs, ast.ClassDef)
    loop = f"```text\n{ast.get_docstring(specs)}\n```\n"
    return "\n".join([HEAD, loop, *(section(node) for node in specs.body if isinstance(node, ast.FunctionDef))])


def section(hook: ast.FunctionDef) -> str:
    """One hook: its signature, its kind, and its docstring with a list item for each field."""
    kind = "one owner" if "owner" in map(ast.unparse, hook.decorator_list) else "many listeners"
    summary, _, fields = (ast.get_docstring(hook) or "").partition("\n\n")
    items = re.sub(
        r"^(?!- |$)", "  ", re.sub(r"^([A-Z][a-z ]+):", r"- \1:", fields, flags=re.MULTILINE), flags=re.MULTILINE
    )
    return f"## {hook.name}\n\n```text\n{signature(hook)}\n```\n\n{summary} *({kind})*\n\n{items}\n"


def signature(hook: ast.FunctionDef) -> str:
    """How a plugin writes the hook, without `self`: `name(argument: type, …) -> type`."""
    arguments = ast.unparse(hook.args).removeprefix("self").removeprefix(", ")
    return f"{hook.name}({arguments}) -> {ast.unparse(hook.returns) if hook.returns else 'None'}"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(hooks_page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[2])}")

"""hooks.md, and the page with the hooks of checkpoints."""

from __future__ import annotations

import ast
import re

from accel_core.contract import hook_specs
from reference_pages.markdown import signature
from reference_pages.source import class_in

HOOKS_HEAD = """\
<!-- Written by docs/generate.py from accel_core/contract/hook_specs.py: change the hooks there, then run `nox -s docs`. -->
# Hooks

A plugin takes over a hook by a method of the same name, marked with `accel_core.hookimpl`, that takes the arguments it
needs by name and leaves out the others. A hook has **one owner** (exactly one implementation is used: the active
component's, else the core's default) or **many listeners** (everyone who implements it is called). Where no default is named,
nothing happens without an owner.

The hooks of saving and loading are on [a page of their own](hooks/checkpoints.md).
"""

CHECKPOINT_HOOKS_HEAD = """\
<!-- Written by docs/generate.py from accel_core/contract/hook_specs.py: change the hooks there, then run `nox -s docs`. -->
# Hooks of checkpoints

These hooks save and load. [Hooks](../hooks.md) explains how a plugin takes one over, and has the others.
"""

FIRST_OF_CHECKPOINTS = "save_checkpoint"  # from it on, hooks are about checkpoints


def hooks_pages() -> dict[str, str]:
    """The whole of docs/reference/hooks.md, and of the page with the hooks of checkpoints."""
    specs = class_in(hook_specs, "HookSpecs")
    loop = f"```text\n{ast.get_docstring(specs)}\n```\n"
    sections = {node.name: hook_section(node) for node in specs.body if isinstance(node, ast.FunctionDef)}
    first = list(sections).index(FIRST_OF_CHECKPOINTS)
    of_the_loop, of_checkpoints = list(sections.values())[:first], list(sections.values())[first:]
    return {
        "hooks.md": "\n".join([HOOKS_HEAD, loop, *of_the_loop]),
        "hooks/checkpoints.md": "\n".join([CHECKPOINT_HOOKS_HEAD, *of_checkpoints]),
    }


def hook_section(hook: ast.FunctionDef) -> str:
    """One hook: its signature, its kind, and its docstring with a list item for each field."""
    kind = "one owner" if "owner" in map(ast.unparse, hook.decorator_list) else "many listeners"
    summary, _, fields = (ast.get_docstring(hook) or "").partition("\n\n")
    items = re.sub(
        r"^(?!- |$)", "  ", re.sub(r"^([A-Z][a-z ]+):", r"- \1:", fields, flags=re.MULTILINE), flags=re.MULTILINE
    )
    return f"## {hook.name}\n\n```text\n{signature(hook)}\n```\n\n{summary} *({kind})*\n\n{items}".rstrip() + "\n"

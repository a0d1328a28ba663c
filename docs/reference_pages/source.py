"""What stands in the source: classes, their members and fields, and the docstring of each name."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

from reference_pages.markdown import prose, signature


def class_in(module: object, name: str) -> ast.ClassDef:
    """The class of this name as it stands in the source of a module."""
    body = ast.parse(inspect.getsource(module)).body  # type: ignore[arg-type]
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def public_members(node: ast.ClassDef) -> dict[str, str]:
    """The section of each public method, property (written as one, or by `shown`) and second name of a class.

    Hooks are left out: they stand on the pages of hooks.
    """
    sections: dict[str, str] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            decorators = [ast.unparse(each) for each in item.decorator_list]
            if "hookimpl" not in decorators and f"{item.name}.setter" not in decorators:
                sections[item.name] = member_section(item)
        elif (
            isinstance(item, ast.Assign)
            and isinstance(item.targets[0], ast.Name)
            and isinstance(item.value, ast.Name | ast.Attribute)
            and not ast.unparse(item.value)[0].isupper()
        ):
            name = item.targets[0].id
            if not name.startswith("_") and not name.isupper():
                sections[name] = f"### {name}\n\nAnother name of `{ast.unparse(item.value)}`.\n"
        elif isinstance(item, ast.AnnAssign) and is_shown(item):
            declared, text = ast.unparse(item).partition(" = ")[0], ast.literal_eval(item.value.args[-1])
            sections[ast.unparse(item.target)] = f"### {item.target.id}\n\n```text\n{declared}\n```\n\n{text}\n"
    return sections


def member_section(member: ast.FunctionDef) -> str:
    """One method or property: its signature and its docstring."""
    is_property = "property" in map(ast.unparse, member.decorator_list)
    declared = (
        f"{member.name}: {ast.unparse(member.returns or ast.Constant(None))}" if is_property else signature(member)
    )
    return f"### {member.name}\n\n```text\n{declared}\n```\n\n{prose(ast.get_docstring(member) or '')}\n"


def field_lines(node: ast.ClassDef) -> Iterator[str]:
    """Each annotated field and each member of an enumeration, with the string that follows it."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        text = after.value if isinstance(after, ast.Expr) else None
        told = inspect.cleandoc(text.value).replace("\n", " ") if is_text(text) else ""
        name = item.target if isinstance(item, ast.AnnAssign) else None
        is_field = isinstance(name, ast.Name) and not name.id.startswith("_") and not is_shown(item)
        is_member = isinstance(item, ast.Assign) and ast.unparse(item.targets[0]).isupper()
        if is_field or is_member:
            yield f"- `{ast.unparse(item)}`" + (f": {told}" if told else "")


def is_text(node: ast.expr | None) -> bool:
    """Whether it is a string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_shown(item: ast.stmt) -> bool:
    """Whether an assignment in a class is a property, whose last argument is its docstring."""
    value = item.value if isinstance(item, ast.AnnAssign) else None
    return isinstance(value, ast.Call) and bool(value.args) and is_text(value.args[-1])


def definitions(door: ModuleType) -> dict[str, str]:
    """The docstring of every class, function and value that a module imports or defines, by its name there."""
    found = {}
    tree = ast.parse(inspect.getsource(door))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("accel_"):
            there = documented(importlib.import_module(node.module))
            found.update({alias.name: there[alias.name] for alias in node.names if alias.name in there})
            if any(alias.name not in there for alias in node.names):  # a package that only hands on
                found.update(definitions(importlib.import_module(node.module)))
    return found


def documented(module: ModuleType) -> dict[str, str]:
    """The docstrings of what a module defines: of a value, the string that follows it."""
    found = {}
    body = ast.parse(inspect.getsource(module)).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.get_docstring(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[target.id] = inspect.cleandoc(text.value)
    return {name: text for name, text in found.items() if text}

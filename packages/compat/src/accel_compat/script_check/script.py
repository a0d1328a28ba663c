"""A script as a tree, with what the rules ask of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

_GUARDS = ("is_main_process", "is_local_main_process", "is_last_process")


class Script:
    """A script that is read and not run.

    Args:
        source: its text. Raises `SyntaxError` if that is no Python.
    """

    def __init__(self, source: str, name: str = "script") -> None:
        self.tree = ast.parse(source, filename=name)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def all(self, kind: type[ast.AST]) -> Iterator[ast.AST]:
        """Every node of a kind, in the order of lines."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, kind)]
        return iter(sorted(found, key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of lines."""
        return [node for node in self.all(ast.Call) if isinstance(node, ast.Call)]

    @cached_property
    def imports(self) -> list[tuple[ast.ImportFrom, str, str, str]]:
        """What is imported from `accelerate`: statement, module, name, and the name that it has in the script."""
        return [
            (node, str(node.module), alias.name, alias.asname or alias.name)
            for node in self.all(ast.ImportFrom)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "accelerate"
            for alias in node.names
        ]

    @cached_property
    def is_of_peer(self) -> bool:
        """Whether the script imports `accelerate`."""
        plain = (alias.name for node in self.all(ast.Import) if isinstance(node, ast.Import) for alias in node.names)
        return bool(self.imports) or any(name.partition(".")[0] == "accelerate" for name in plain)

    def called(self, name: str) -> list[ast.Call]:
        """Calls of a name, plain or an attribute of a module; `from x import y as z` is followed for `accelerate`."""
        names = {name, *(local for _, _, imported, local in self.imports if imported == name)}
        return [call for call in self.calls if last(call.func) in names]

    @cached_property
    def accelerators(self) -> set[str]:
        """The expressions that are the Accelerator, as text: `accelerator`, `self.accelerator`."""
        usual, made = {"accelerator", "self.accelerator"}, self.called("Accelerator")
        assigned = [node for node in self.all(ast.Assign) if isinstance(node, ast.Assign)]
        found = {ast.unparse(target) for node in assigned if node.value in made for target in node.targets}
        for argument in self.all(ast.arg):
            if isinstance(argument, ast.arg) and argument.annotation and last(argument.annotation) == "Accelerator":
                found.add(argument.arg)
        if not self.is_of_peer and not made:
            return found
        # A function that is given one, without a type; but not a name that is something else in this script.
        others = {ast.unparse(target) for node in assigned if node.value not in made for target in node.targets}
        return found | (usual - others) | ({"self.accelerator"} if "accelerator" in found else set())

    def is_accelerator(self, node: ast.AST) -> bool:
        """Whether an expression is the Accelerator."""
        return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self.accelerators

    def methods(self, *names: str) -> list[ast.Call]:
        """Calls of methods of the Accelerator."""
        return [
            call
            for call in self.calls
            if isinstance(call.func, ast.Attribute) and call.func.attr in names and self.is_accelerator(call.func.value)
        ]

    @cached_property
    def prepared(self) -> dict[tuple[ast.AST, str], int]:
        """What goes through `prepare`, by scope and text: the line of the first time."""
        found: dict[tuple[ast.AST, str], int] = {}
        for call in self.methods("prepare", "prepare_data_loader", "prepare_model", "prepare_optimizer"):
            for argument in call.args:
                found.setdefault((self.scope(call), ast.unparse(argument)), call.lineno)
        return found

    def is_prepared(self, node: ast.AST) -> bool:
        """Whether an expression has the name of something that `prepare` was given somewhere."""
        return ast.unparse(node) in {name for _, name in self.prepared}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node stands in, from the inside to the outside."""
        while (node := self._parents.get(node, self.tree)) is not self.tree:
            yield node

    def scope(self, node: ast.AST) -> ast.AST:
        """The function that a node stands in, or the module."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        return next((each for each in self.above(node) if isinstance(each, kinds)), self.tree)

    def beside_accelerator(self, node: ast.AST) -> bool:
        """Whether the function that a node stands in, the outermost one, uses an Accelerator."""
        functions = [each for each in self.above(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        if functions:
            return any(map(self.is_accelerator, ast.walk(functions[-1])))
        body = [each for each in self.tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
        return any(self.is_accelerator(inner) for each in body for inner in ast.walk(each))

    def accumulating(self, node: ast.AST) -> ast.With | None:
        """The block `with accelerator.accumulate(...)` that a node stands in."""
        for each in self.above(node):
            if isinstance(each, ast.With) and any(
                item.context_expr in self.methods("accumulate") for item in each.items
            ):
                return each
        return None

    def without_gradients(self, node: ast.AST) -> bool:
        """Whether a node stands in a block, or a function, that computes no gradients."""
        for each in self.above(node):
            if isinstance(each, ast.With):
                guards: list[ast.expr] = [item.context_expr for item in each.items]
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                guards = each.decorator_list
            else:
                continue
            if any(
                last(guard.func if isinstance(guard, ast.Call) else guard) in {"no_grad", "inference_mode"}
                for guard in guards
            ):
                return True
        return False

    def on_one_process(self, node: ast.AST) -> bool:
        """Whether a node is reached by the main process, or the last one, alone."""
        inner = node
        for each in self.above(node):
            if (
                isinstance(each, ast.If)
                and inner not in each.orelse
                and inner is not each.test
                and _is_guard(each.test)
            ):
                return True
            if isinstance(each, ast.FunctionDef):
                decorators = {last(decorator) for decorator in each.decorator_list}
                if decorators & {"on_main_process", "on_local_main_process"}:
                    return True
            inner = each
        return False


def _is_guard(test: ast.expr) -> bool:
    """Whether a condition holds on one process at most."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_guard, test.values))
    if isinstance(test, ast.Attribute):
        return test.attr in _GUARDS
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return last(test.left) in {"process_index", "local_process_index"}
    return False


def last(node: ast.AST) -> str:
    """The last part of a dotted name: `prepare` of `accelerator.prepare`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of an argument that was given by name."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def constant(node: ast.expr | None) -> object:
    """The value of a literal; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def texts(node: ast.expr | None) -> list[str]:
    """The texts of a literal: one, or those of a list or tuple."""
    inner = node.elts if isinstance(node, ast.List | ast.Tuple) else [node] if node is not None else []
    return [value for value in map(constant, inner) if isinstance(value, str)]

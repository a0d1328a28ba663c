"""One difference that a script has to expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import ast

    from accel_compat.script_check.script import Script


class Finding(NamedTuple):
    """A place of a script that means something else here.

    Args:
        line: from 1.
        rule: the name of the rule, such as "schedule-length".
        before: what it means in Accelerate.
        here: what it means with accel_core, and what to write.
        compat: whether it is different through accel-compat, too.
    """

    line: int
    rule: str
    before: str
    here: str
    compat: bool = False


Rule: TypeAlias = Callable[["Script"], Iterator[Finding]]


def at(node: ast.AST, rule: str, before: str, here: str, *, compat: bool = False) -> Finding:
    """A finding at a node of the tree."""
    return Finding(getattr(node, "lineno", 1), rule, before, here, compat)

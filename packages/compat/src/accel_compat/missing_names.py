"""Names that scripts import from `accelerate` and that have no counterpart here: what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

ADVICE: Mapping[str, str] = MappingProxyType({})
"""Name → what to use, as the end of a sentence."""


def refuse_from(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for a module of `accelerate`: names that are known to be missing say what to use.

    Raises `ImportError` for these, which `from … import` passes on, and `AttributeError` for others.
    """

    def refuse(name: str) -> NoReturn:
        if name in ADVICE:
            raise ImportError(f"{module}.{name} has no counterpart in accel-compat: {ADVICE[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse

"""Paths into a nested structure, and the error for a value at such a path."""

from __future__ import annotations

import re
from typing import Any

DEPTH = 100  # the greatest depth of a structure: far above that of states, far below the limit of Python's stack
_SHOWN = 200  # the most characters of a path in a message, and about the most of a tensor's name

ITEM, FIELD, KEY, PART = "[{}]", ".{}", " (its key {})", "{:.0}"
"""Formats of the steps into a list or dict, an attribute, a key, and a part that users do not see."""


class Unfit(Exception):  # noqa: N818  (it ends as a CheckpointError)
    """An error of encoding or decoding: its text continues a sentence after the path."""

    def __init__(self, found: str, advice: str = "") -> None:
        super().__init__(found)
        self.found, self.advice = found, advice


class Trail:
    """The current path in a structure. An exception that passes does not change it."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Any]] = []

    def push(self, style: str, step: Any) -> None:
        """Adds an index, key or name to the path, in one of four styles; `Unfit` past `DEPTH`."""
        self.steps.append((style, step))
        if len(self.steps) > DEPTH:
            raise Unfit(f"is nested deeper than {DEPTH} levels, or contains itself")

    def pop(self) -> None:
        """Goes a step back."""
        self.steps.pop()

    def __str__(self) -> str:
        """The place, as `state['a'][3].b`."""
        steps = (style.format(step if style in {FIELD, PART} else shown(step)) for style, step in self.steps)
        text = f"state{''.join(steps)}"
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 2 :]}"

    def name(self) -> str:
        """A name for what is there, of characters that any file format takes."""
        steps = [step if type(step) is str else shown(step) for style, step in self.steps if style != PART]
        return "/".join(re.sub(r"[^A-Za-z0-9_.-]", "_", step[:_SHOWN]) or "_" for step in steps)[-_SHOWN:] or "value"


def step_into(field: str) -> tuple[str, str]:
    """The style of, and the step into, a field of a tagged object."""
    return (PART if field in {"items", "value", "data"} else FIELD), field


def shown(value: Any) -> str:
    """The beginning of a value's `repr`, for messages; its type if `repr` fails."""
    try:
        return f"{value!r:.60}"
    except Exception:  # noqa: BLE001  (it may be the user's, or an int of too many digits)
        return f"<{type_name(type(value))}>"


def type_name(kind: type) -> str:
    """Its module and name; of a built-in type only the name."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

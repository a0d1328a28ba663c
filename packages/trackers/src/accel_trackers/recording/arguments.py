"""Checks of the arguments of calls that record, other than the values themselves."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection, Mapping


def as_step(asked: str, step: object) -> int | None:
    """The step that a call was given, as an integer.

    Raises:
        TypeError, ValueError: if it is none from 0 to 2**63 - 1, the most that services hold.
    """
    if step is None:
        return None
    try:
        number = operator.index(None if isinstance(step, bool) else step)  # type: ignore[arg-type]  # a 0-d tensor of integers has it too
    except TypeError:
        raise TypeError(
            f"{asked} was given step={step!r}, a {type(step).__name__}: expected an integer of at least 0, or None."
        ) from None
    if not 0 <= number < 2**63:
        raise ValueError(f"{asked} was given step={number}: expected an integer from 0 to 2**63 - 1, or None.")
    return number


def check_mapping(asked: str, value: object) -> None:
    """Raises TypeError for what is no mapping with names as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{asked} was given {type(value).__name__} {value!r:.100}: expected a dict with names as keys.")


def unknown_tracker(asked: str, name: object, names: Collection[str], those: str) -> str:
    """The message about a name that is none of `names`."""
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"Type {near[0]!r} if that was meant." if near else f"{those}: {', '.join(names) or 'none'}."
    return f"{asked} names no tracker. {hint}"

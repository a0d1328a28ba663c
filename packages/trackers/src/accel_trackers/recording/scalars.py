"""Single values: numbers and texts in another guise, and how messages name the others.

Objects of numpy are known by what they do (`__array__`), and numpy is used only where the user's
program has imported it.
"""

from __future__ import annotations

import numbers
import os
import sys
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

import torch

PLAIN = frozenset({int, float, bool, str})
"""The types that are kept as they are."""


def plain_value(value: Any) -> Any:
    """The number or text that a value is, or the value itself if it is neither.

    Numbers are what `numbers.Real` knows, numpy's too, and arrays of one element; texts are also
    paths, and dates in ISO 8601. A `timedelta` becomes seconds, a member of an `Enum` its value, an
    integer that does not fit into 64 bits a float. Tensors are not looked into: those are on
    devices. Raises OverflowError or ValueError for a number that no float can hold.
    """
    kind = type(value)
    if kind is float or kind is bool or (kind is int and fits(value)):
        return value
    if isinstance(value, Enum):
        return plain_value(value.value)
    if isinstance(value, str):
        return clean(str.__str__(value))
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if fits(number) else float(number)
    if isinstance(value, (numbers.Real, Decimal)):
        return float(value)
    if isinstance(value, os.PathLike):
        return clean(os.fsdecode(value))
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_array(value) and getattr(value, "size", None) == 1 and hasattr(value, "item"):
        return plain_value(value.item())
    return value


def clean(text: str) -> str:
    """A text that every file can hold: halves of surrogates, as in paths that are no UTF-8, are spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def fits(number: int) -> bool:
    """Whether an integer fits into 64 bits, which is what services have for one."""
    return -(2**63) <= number < 2**63


def is_array(value: Any) -> bool:
    """Whether a value is an array or a scalar of numpy, or what numpy can make one of; no tensor."""
    return hasattr(type(value), "__array__") and not isinstance(value, torch.Tensor) and "numpy" in sys.modules


def as_array(value: Any) -> Any:
    """The array of numpy that a value is, or that can be made of it; only if `is_array`. No copy, where that can be avoided."""
    return sys.modules["numpy"].asarray(value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is here as a whole, detached: the one given, or the copy of it that this rank holds. No collective.

    Raises:
        ValueError: if it lies on several ranks. Reading it would be a collective, which one rank alone waits in for ever.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "to_local"):
        return tensor.detach()
    if not all(each.is_replicate() for each in placements):
        raise ValueError(
            f"{describe(tensor)} with the placements {tuple(placements)} lies on several ranks, and bringing it together is a collective. "
            f"Take value.full_tensor() on every rank, or value.to_local() for this rank's part"
        )
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]  # a DTensor, whose module is not imported for this


def said(error: BaseException) -> str:
    """The type and message of an error; only the type if the message is empty or unreadable."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # noqa: BLE001  (one that cannot even say what it is)
        return type(error).__name__


def describe(value: Any) -> str:
    """A value in a few words, for messages: "a torch.Tensor of shape (3, 4)", "a list"."""
    if value is None:
        return "None"
    kind, shape = type(value), getattr(value, "shape", None)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}{size}"

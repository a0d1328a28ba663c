"""Single values: which are numbers and texts in another guise, and what to call the others in a message.

Objects of numpy are known by what they do (`__array__`), and numpy is used only where the user's program has imported it.
"""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Sized
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

import torch

LARGEST = 2**63 - 1
"""The largest integer that services hold."""

_SAFE = frozenset({float, bool})

PLAIN = frozenset({int, float, bool, str})
"""The types that are kept as they are."""


@dataclass(frozen=True)
class LeftOut:
    """Stands for a value that cannot be logged.

    Args:
        reason: why, and what to write instead; it follows "which is".
    """

    reason: str


def plain(value: Any) -> Any:
    """The number or text that a value is, or the value itself if it is neither.

    Numbers are what `numbers.Real` knows, numpy's too, and arrays of one element; texts are also paths, and dates in ISO 8601. A
    `timedelta` becomes seconds, a member of an `Enum` its value. Tensors are not looked into: those are on devices.

    Raises:
        OverflowError, ValueError: for a number that no float can hold.
    """
    if type(value) in PLAIN:
        return value if type(value) in _SAFE else _held(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (numbers.Real, Decimal)):
        return float(value)
    if isinstance(value, os.PathLike):
        return clean(os.fsdecode(value))
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_array(value) and getattr(value, "size", None) == 1 and hasattr(value, "item"):
        return plain(value.item())
    return value


def clean(text: str) -> str:
    """A text that every file can hold: halves of surrogates, as in paths that are no UTF-8, are spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _held(value: int | str) -> int | float | str:
    """An integer or a text as services hold it; an integer that does not fit into 64 bits as a float."""
    if isinstance(value, str):
        return clean(value)
    return value if -LARGEST - 1 <= value <= LARGEST else float(value)


def is_array(value: Any) -> bool:
    """Whether a value is an array or a scalar of numpy, or what numpy can make one of; no tensor."""
    return hasattr(type(value), "__array__") and not isinstance(value, torch.Tensor) and "numpy" in sys.modules


def as_array(value: Any) -> Any:
    """The array of numpy that a value is, or that can be made of it; only if `is_array`. No copy, where that can be avoided."""
    return sys.modules["numpy"].asarray(value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is here as a whole, detached: the one given, or the copy of it that this rank holds. No collective.

    Raises:
        ValueError: if it lies on several ranks; the message follows "which is".
    """
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "to_local"):
        return tensor.detach()
    if not all(each.is_replicate() for each in placements):
        raise ValueError(
            f"{describe(tensor)} with the placements {tuple(placements)}: its value lies on several ranks, and bringing it together is a "
            f"collective. Take value.full_tensor() on every rank, or value.to_local() for this rank's part"
        )
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]  # a DTensor, whose module is not imported for this


def describe(value: Any) -> str:
    """A value in a few words, for messages: "a tensor of shape (3, 4)", "a Figure of matplotlib.figure"."""
    if isinstance(value, LeftOut):
        return value.reason
    if value is None:
        return "None"
    kind = type(value)
    if isinstance(value, torch.Tensor):
        name = "tensor" if kind is torch.Tensor else kind.__name__
        return f"{_article(name)} of shape {tuple(value.shape)}"
    if is_array(value) and isinstance(shape := getattr(value, "shape", None), tuple):
        return f"an array of shape {shape}" if kind.__name__ == "ndarray" else f"{_named(kind)}, of shape {shape}"
    if kind in {list, tuple, set, frozenset, dict} and isinstance(value, Sized):
        return f"a {kind.__name__} of {len(value)}"
    return _named(kind)


def _named(kind: type) -> str:
    module = getattr(kind, "__module__", "builtins")
    return _article(kind.__qualname__) + ("" if module == "builtins" else f" of {module}")


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"

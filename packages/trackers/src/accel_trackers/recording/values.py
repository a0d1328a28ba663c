"""Single values: plain numbers and texts, tensors copied to the host, and words for all others.

numpy's objects are known by `__array__`: numpy is used only if the program has imported it.
"""

from __future__ import annotations

import numbers
import sys
import time
from enum import Enum
from typing import Any

import torch

PLAIN = frozenset({int, float, bool, str})
"""The types that are kept as they are."""

_SHORTEST, _LONGEST = 0.0005, 0.01  # seconds between two looks at an event


def plain_value(value: Any) -> Any:
    """The number or text that a value is, or else the value itself. Tensors are not looked into.

    Numbers are what `numbers.Real` knows, numpy's too, and arrays of one element. A member of an
    `Enum` becomes its value, an integer of more than 64 bits a float. Raises OverflowError
    or ValueError for a number that no float can hold.
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
    if isinstance(value, numbers.Real):
        return float(value)
    if is_array(value) and getattr(value, "size", None) == 1 and hasattr(value, "item"):
        return plain_value(value.item())
    return value


def clean(text: str) -> str:
    """A text that every file can hold: lone surrogates, as in paths, are spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def fits(number: int) -> bool:
    """Whether an integer fits into 64 bits, which is what services have for one."""
    return -(2**63) <= number < 2**63


def is_array(value: Any) -> bool:
    """Whether a value is an array or scalar of numpy, or converts to one; no tensor."""
    return hasattr(type(value), "__array__") and not isinstance(value, torch.Tensor) and "numpy" in sys.modules


def as_array(value: Any) -> Any:
    """The array of numpy for a value that `is_array`, without a copy where that can be avoided."""
    return sys.modules["numpy"].asarray(value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A whole local tensor, detached: the given one, or this rank's copy. No collective.

    Raises:
        ValueError: if it lies on several ranks: one rank alone would wait for ever to read it.
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


class HostCopy:
    """A copy of a `local` tensor. Does not wait for a device with events and pinned memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.elements = tensor.numel()
        self._event: torch.Event | None = None
        with torch.no_grad():
            if tensor.is_cpu:
                self._host = tensor.clone(memory_format=torch.contiguous_format)
                return
            try:
                self._host = tensor.to("cpu", non_blocking=True)
                event = torch.Event(tensor.device)
                event.record(torch.accelerator.current_stream(tensor.device))
                self._event = event
            except (RuntimeError, ValueError):  # no pinned memory, no events, or not the accelerator of torch
                self._host = tensor.to("cpu")

    def wait(self) -> torch.Tensor:
        """The complete copy. Polls, because waiting for an event would keep a processor busy."""
        pause = _SHORTEST
        while self._event is not None and not self._event.query():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self._event = None
        return self._host


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

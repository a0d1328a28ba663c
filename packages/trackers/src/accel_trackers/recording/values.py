"""Values and configurations made plain, and tensors copied to the host.

numpy's objects are known by `__array__`: numpy is used only if the program has imported it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

PLAIN = frozenset({int, float, bool, str})
"""The types that are kept as they are."""

_MOST_ELEMENTS, _MOST_CHARACTERS = 64, 2000  # of a tensor, or of the text for an object, in a configuration
_PAUSE = 0.001  # seconds between two looks at an event


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


def readable_config(config: object) -> dict[str, Any]:
    """A configuration as JSON has it: a dict with texts as keys, of plain values, lists and dicts.

    Mappings, dataclasses, named tuples, namespaces and models of pydantic become dicts, as do the
    attributes of any other object that is the whole of the configuration; small tensors and arrays
    become lists. Other objects, and integers beyond 64 bits, become texts by `str`.
    """
    found = _data(config)
    if isinstance(found, str) and not isinstance(config, (str, type)) and hasattr(config, "__dict__"):
        found = _data({name: each for name, each in vars(config).items() if not str(name).startswith("_")}) or found
    return found if isinstance(found, dict) else {} if config is None else {"config": found}


def _data(value: Any) -> Any:
    if isinstance(value, Enum):
        return _data(value.value)
    if isinstance(value, numbers.Integral) and not fits(int(value)):
        return str(int(value))  # a seed needs all its digits
    # Not of other tensors: where one lies on several ranks, this would be a collective.
    is_whole = type(value) in {torch.Tensor, torch.nn.Parameter} or (is_array(value) and hasattr(value, "tolist"))
    if is_whole and math.prod(value.shape) <= _MOST_ELEMENTS:
        return _data(value.tolist())
    value = plain_value(value)
    if value is None or type(value) in PLAIN:
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(map(_data, value), key=str)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [_data(each) for each in value]
    if (fields := _fields(value)) is not None:
        return {clean(str(_data(name))): _data(each) for name, each in fields.items()}
    return clean(str(value)[:_MOST_CHARACTERS])


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Names and values of what has fields."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    if isinstance(value, tuple):
        return value._asdict()  # type: ignore[attr-defined, no-any-return]  # a named tuple
    return value.model_dump(warnings=False) if hasattr(value, "model_dump") else None


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

    Raises ValueError if it lies on several ranks: one rank alone would wait for ever to read it.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "to_local"):
        return tensor.detach()
    if not all(each.is_replicate() for each in placements):
        raise ValueError(
            f"{describe(tensor)} with the placements {tuple(placements)} lies on several ranks. Log value.full_tensor(), taken on every "
            f"rank, or value.to_local() for this rank's part"
        )
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]  # a DTensor, whose module is not imported for this


class HostCopy:
    """A copy of a `local` tensor. Does not wait for a device with events and pinned memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.elements = tensor.numel()
        self._event: torch.Event | None = None
        if tensor.is_cpu:
            self._host = tensor.detach().clone(memory_format=torch.contiguous_format)
            return
        try:
            self._host = tensor.detach().to("cpu", non_blocking=True)
            event = torch.Event(tensor.device)
            event.record(torch.accelerator.current_stream(tensor.device))
            self._event = event
        except (RuntimeError, ValueError):  # no pinned memory, no events, or not the accelerator of torch
            self._host = tensor.detach().to("cpu")

    def wait(self) -> torch.Tensor:
        """The complete copy. Polls, because waiting for an event would keep a processor busy."""
        while self._event is not None and not self._event.query():
            time.sleep(_PAUSE)
        self._event = None
        return self._host


def said(error: BaseException) -> str:
    """The type and message of an error; only the type if the message is empty or unreadable."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # noqa: BLE001  (one that cannot even say what it is)
        return type(error).__name__


def describe(value: Any) -> str:
    """A value in a few words, for messages: "torch.Tensor of shape (3, 4)", "list"."""
    kind, shape = type(value), getattr(value, "shape", None)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} of shape {tuple(shape)}" if isinstance(shape, tuple) else name

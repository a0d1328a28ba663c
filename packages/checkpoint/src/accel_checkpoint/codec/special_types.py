"""Encoding of values that JSON lacks: they are split into values that it has, and joined again.

Nothing here imports a module or calls what a file names: a class is looked for in the modules that
the program has imported, and used only if it is of the kind that the entry says.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import enum
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accel_checkpoint.codec.class_names import class_name, find_class
from accel_checkpoint.codec.path import Unfit, shown, type_name

ALIKE = 100  # the most keys of one hash: finding each takes as long as all of them, so thousands would take minutes
LONG = 1024  # bytes beyond this many are kept as a tensor, and not in the skeleton


M = TypeVar("M", OrderedDict[Any, Any], Counter[Any])

Fields = Mapping[str, tuple[type, ...]]  # the names of an entry's fields, and the types that each may have; () for any


TAG = "$"  # the field that says how an object is to be read
EXACT = 2**53  # integers beyond it are floats to many readers of JSON

PLAIN: dict[type, str] = {torch.Tensor: "tensor", nn.Parameter: "parameter"}
"""Tensors that are kept as they are, and their tags."""


class Special(NamedTuple):
    """The encoding of a type under a tag: `split` gives parts by `fields`; `join` takes them."""

    tag: str
    fields: Fields
    split: Callable[[Any], tuple[Any, ...]]
    join: Callable[..., Any]


def refusal(value: Any) -> Unfit:
    """Says what it is that cannot be encoded, and what to give instead."""
    return Unfit(f"is a {type_name(type(value))}, which a checkpoint cannot hold", _advice(value))


def _advice(value: Any) -> str:
    if isinstance(value, type):
        return "Give its name as a string."
    for member, advice in _STATES.items():
        if hasattr(type(value), member):
            return advice
    if dataclasses.is_dataclass(value):
        return "Give a dict of its fields, as dataclasses.asdict makes it."
    base = next((base for base in _BASES if isinstance(value, base)), None)
    if base is not None:
        return f"Give a plain {base.__name__} of the same content."
    return "Give plain data in its place: numbers, strings, lists, dicts, tensors and the like."


_STATES = {
    "state_dict": "Give what its state_dict() returns.",
    "bit_generator": "Give its bit_generator.state.",
    "get_state": "Give what its get_state method returns.",
    "getstate": "Give what its getstate method returns.",
}
_BASES = (dict, list, tuple, set, frozenset, deque, str, bytes, int, float, complex)


def is_plain_text(text: str) -> bool:
    """Whether UTF-8 has it: halves of surrogate pairs would come back from JSON as whole ones."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def holds_tensor(key: Any) -> bool:
    """Whether something hashable is a tensor, or has one in it."""
    return isinstance(key, torch.Tensor) or (isinstance(key, (tuple, frozenset)) and any(map(holds_tensor, key)))


def is_named_tuple(value: Any) -> bool:
    """Whether it is a tuple that consists of its named fields and of nothing else."""
    if not isinstance(value, tuple) or getattr(value, "__dict__", None):
        return False
    fields = getattr(value, "_fields", None)
    return isinstance(fields, tuple) and len(fields) == len(value) and all(type(field) is str for field in fields)


def _int_from_hex(text: str) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", text):
        raise ValueError(f"{text!r:.40} is not hexadecimal")
    return int(text, 16)


_NAN = struct.pack(">d", math.nan).hex()


def _split_float(value: float) -> tuple[str]:
    bits = struct.pack(">d", value).hex()
    return (repr(value) if math.isinf(value) or bits == _NAN else bits,)


def _join_float(text: str) -> float:
    if text in {"inf", "-inf", "nan"}:
        return float(text)
    if not re.fullmatch(r"[0-9a-f]{16}", text):
        raise ValueError(f"{text!r:.40} is not 16 hexadecimal digits")
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _split_bytes(value: bytes) -> tuple[str | torch.Tensor]:
    if len(value) > LONG:
        return (torch.frombuffer(bytearray(value), dtype=torch.uint8),)
    return (base64.b64encode(value).decode("ascii"),)


def _join_bytes(content: str | torch.Tensor) -> bytes:
    if isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if content.dtype != torch.uint8 or content.ndim != 1:
        raise ValueError(f"bytes are kept as uint8, not as {content.dtype} of {content.ndim} dims")
    content = content.cpu().contiguous()
    return ctypes.string_at(content.data_ptr(), content.numel()) if content.numel() else b""


def _split_set(value: set[Any] | frozenset[Any]) -> tuple[list[Any]]:
    if holds_tensor(frozenset(value)):
        raise Unfit("is a set with a tensor in it, which is found by identity only", "Give a list of its elements.")
    return (list(value),)


def _join_set(items: list[Any]) -> set[Any]:
    alike = Counter(map(hash, items))
    if alike and max(alike.values()) > ALIKE:
        raise ValueError(f"more than {ALIKE} of its items have one hash")
    return set(items)


def _join_deque(items: list[Any], maxlen: int | None) -> deque[Any]:
    if maxlen is not None and len(items) > maxlen:
        raise ValueError(f"{len(items)} items are more than maxlen={maxlen}")
    return deque(items, maxlen)


def _split_mapping(value: OrderedDict[Any, Any] | Counter[Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    return dict(value), dict(vars(value))


def _join_counter(value: dict[Any, Any], attributes: dict[str, Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, value)  # its own method would add
    return _with_attributes(counter, attributes)


def _with_attributes(mapping: M, attributes: dict[str, Any]) -> M:
    if not all(type(name) is str for name in attributes):
        raise ValueError("the name of an attribute is a string")
    vars(mapping).update(attributes)
    return mapping


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> torch.dtype:
    """The dtype of that name; LookupError if there is none."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise LookupError(f"torch has no dtype {name!r:.40}")
    return found


def _split_enum(value: enum.Enum) -> tuple[str, str | int]:
    kind = type(value)
    name = class_name(kind)
    if kind.__members__.get(value.name) is value:
        return name, value.name
    if not isinstance(value, enum.Flag):
        raise Unfit(f"is {shown(value)}, which is no member of its enum", "Give one, or plain data in its place.")
    return name, int(value.value)  # several flags together


def _join_enum(name: str, member: str | int) -> enum.Enum:
    if isinstance(member, str):
        kind = find_class(name, enum.Enum, "__members__", "enum")
        if member not in kind.__members__:
            raise Unfit(
                f"is {member!r:.80} of the enum {name}, which has no such member",
                f"Give the enum its member back: it has {', '.join(kind.__members__)}.",
            )
        return cast(enum.Enum, kind.__members__[member])
    kind = find_class(name, enum.Flag, "__members__", "enum of flags")
    flags: enum.Flag = kind(member)
    if flags.value != member:  # some versions of Python leave out bits that are no member's
        raise ValueError(f"{member} is not a valid {kind.__qualname__}")
    return flags


_NONE = type(None)
_TEXT: Fields = {"value": (str,)}
_NAME: Fields = {"name": (str,)}
_ITEMS: Fields = {"items": (list,)}
_CONTENT: Fields = {"data": (str, torch.Tensor)}
_MAPPING: Fields = {"value": (dict,), "attributes": (dict,)}

ENUM = Special("enum", {"class": (str,), "member": (str, int)}, _split_enum, _join_enum)

SPECIALS: dict[type, Special] = {
    int: Special("int", _TEXT, lambda value: (hex(value),), _int_from_hex),
    float: Special("float", _TEXT, _split_float, _join_float),
    complex: Special("complex", {"real": (float,), "imag": (float,)}, lambda value: (value.real, value.imag), complex),
    str: Special(
        "str",
        {"code_points": (list,)},
        lambda value: (list(map(ord, value)),),
        lambda points: "".join(map(chr, points)),
    ),
    bytes: Special("bytes", _CONTENT, _split_bytes, _join_bytes),
    tuple: Special("tuple", _ITEMS, lambda value: (list(value),), tuple),
    set: Special("set", _ITEMS, _split_set, _join_set),
    frozenset: Special("frozenset", _ITEMS, _split_set, lambda items: frozenset(_join_set(items))),
    deque: Special(
        "deque", {"items": (list,), "maxlen": (int, _NONE)}, lambda value: (list(value), value.maxlen), _join_deque
    ),
    OrderedDict: Special(
        "OrderedDict", _MAPPING, _split_mapping, lambda value, own: _with_attributes(OrderedDict(value), own)
    ),
    Counter: Special("Counter", _MAPPING, _split_mapping, _join_counter),
    torch.dtype: Special("torch.dtype", _NAME, lambda value: (dtype_name(value),), find_dtype),
    torch.device: Special("torch.device", _NAME, lambda value: (str(value),), torch.device),
    torch.Size: Special("torch.Size", _ITEMS, lambda value: (list(value),), torch.Size),
    type(Path()): Special("Path", _TEXT, lambda value: (str(value),), Path),
}

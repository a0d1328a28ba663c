"""Folders of torch.distributed.checkpoint, read without running what their index names.

The index, `.metadata`, is a pickle that torch loads unrestricted. Here its instructions are read
by `pickletools`, into stand-ins for its objects.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_compat.checkpoints.pickled_file import read_pickled
from accel_core import CheckpointError
from accel_core.api.layouts import Box, Elementwise, Entry, Piece, Replicated

Keys = tuple[Any, ...]


class Made(NamedTuple):
    """A stand-in for an object: what makes it, of what, and the list of the state that it was given."""

    by: Any
    arguments: tuple[Any, ...]
    states: list[Any]

    @property
    def members(self) -> Mapping[str, Any]:
        """Its attributes."""
        state = self.states[-1] if self.states else {}
        return state if isinstance(state, dict) else {}


class _Stored(NamedTuple):
    """The place of a value, or of a tensor's box, in a file."""

    keys: Keys
    box: Box | None
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int


def distributed_parts(
    path: Path, root: str, name: Callable[[Keys], str | None]
) -> list[Callable[[], dict[str, dict[str, Entry]]]]:
    """What gives the tensors below `root`, file by file, under "unit/name"; None leaves one out."""
    stored = [(each, name(each.keys)) for each in _stored(path, root) if each.box is not None]
    files = dict.fromkeys(each.file for each, _ in stored)
    return [
        partial(_part, [(each, full) for each, full in stored if each.file == file and full is not None])
        for file in files
    ]


def plain_values(path: Path, root: str) -> dict[Keys, Any]:
    """What is no tensor below `root`."""
    return {each.keys: _read(each) for each in _stored(path, root) if each.box is None}


def whole_state(path: Path, root: str) -> dict[str, Any]:
    """All below `root`, nested as it was saved, with whole tensors in main memory."""
    found: dict[Keys, Any] = {}
    filled: dict[Keys, int] = {}
    for each in _stored(path, root):
        value = _read(each)
        if each.box is None or not each.shape:
            found[each.keys] = value
            continue
        filled[each.keys] = filled.get(each.keys, 0) + value.numel()
        whole = found.setdefault(each.keys, torch.empty(each.shape, dtype=value.dtype))
        whole[tuple(slice(at, at + size) for at, size in zip(each.box.offsets, each.box.sizes, strict=True))] = value
    if partial_ones := [keys for keys, count in filled.items() if count != found[keys].numel()]:
        raise CheckpointError(f"{path} was to be read, but it has only a part of {partial_ones[0]}. Copy it again.")
    nested: dict[Any, Any] = {}
    for (*outer, last), value in found.items():
        inner = nested
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return _with_lists(nested)  # type: ignore[no-any-return]


def _with_lists(nested: Any) -> Any:
    """Mappings whose keys are all numbers as lists, as their paths say."""
    if not isinstance(nested, dict):
        return nested
    values = {key: _with_lists(value) for key, value in nested.items()}
    return [values[key] for key in sorted(values)] if values and all(type(key) is int for key in values) else values


def _part(stored: Sequence[tuple[_Stored, str]]) -> dict[str, dict[str, Entry]]:
    found: dict[str, dict[str, Entry]] = {}
    for each, full in stored:
        unit, _, name = full.partition("/")
        data, box = _read(each), each.box
        if not isinstance(data, torch.Tensor) or box is None or tuple(data.shape) != box.sizes:
            raise CheckpointError(
                f"{each.file} was to be read, but what it has of {name!r} is of another shape. Copy it again."
            )
        if not each.shape:
            found.setdefault(unit, {})[name] = Replicated(data)
            continue
        known = found.setdefault(unit, {}).get(name)
        pieces = known.pieces if isinstance(known, Elementwise) else ()
        found[unit][name] = Elementwise(each.shape, data.dtype, (*pieces, Piece(box, data)))
    return found


def _read(stored: _Stored) -> Any:
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        content = file.read(stored.length)
    if len(content) < stored.length:
        raise CheckpointError(
            f"{stored.file} was to be read, but it ends before the value of {stored.keys}. Copy it again."
        )
    return read_pickled(stored.file, io.BytesIO(content))


def _stored(path: Path, root: str) -> list[_Stored]:
    index = path / ".metadata"
    try:
        content = index.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} was to be read, but it has no .metadata: its save was not finished. Take another."
        ) from None
    try:
        found = _described(path, unpickled(content).members, root)
    except Exception as error:
        raise CheckpointError(
            f"{index} was to be read, but it is damaged, or of another version: {type(error).__name__}: {error!s:.200}. Copy it again."
        ) from error
    missing = [each.file for each in found if not each.file.is_file()]
    if missing:
        raise CheckpointError(
            f"{path} was to be read, but {missing[0].name}, which its index names, is missing. Copy it again."
        )
    return found


def _described(path: Path, metadata: Mapping[str, Any], root: str) -> list[_Stored]:
    places = metadata["planner_data"] or {}
    sizes = {name: each.members.get("size") for name, each in metadata["state_dict_metadata"].items()}
    chunks = {name: _boxes(each) for name, each in metadata["state_dict_metadata"].items()}
    found: list[_Stored] = []
    for where, place in metadata["storage_data"].items():
        index, at = where.members, place.members
        name, offset = index["fqn"], index.get("offset")
        keys = tuple(places.get(name) or name.split(".", 1))
        if keys[0] != root:
            continue
        if at.get("transform_descriptors"):
            raise ValueError(f"{name!r} is stored as {at['transform_descriptors']}")
        if Path(at["relative_path"]).name != at["relative_path"]:
            raise ValueError(f"{name!r} is in another folder: {at['relative_path']!r}")
        size = sizes[name]
        box = None if size is None else chunks[name][_numbers(offset)]
        shape = () if size is None else _numbers(size)
        found.append(_Stored(keys[1:], box, shape, path / at["relative_path"], at["offset"], at["length"]))
    lacking = [name for name in sizes if name not in {where.members["fqn"] for where in metadata["storage_data"]}]
    if lacking:
        raise ValueError(f"nothing is stored of {lacking[0]!r}")
    return found


def _boxes(described: Made) -> dict[tuple[int, ...], Box]:
    """The boxes of a tensor by their offsets; none of other values."""
    boxes = [
        Box(_numbers(each.members["offsets"]), _numbers(each.members["sizes"]))
        for each in described.members.get("chunks", ())
    ]
    return {box.offsets: box for box in boxes}


def _numbers(size: Made | None) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    return tuple(int(each) for each in size.arguments[0]) if size is not None and size.arguments else ()


def unpickled(content: bytes) -> Any:
    """The value of a pickle, with a `Made` for each object and function that it names. Runs nothing."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name == "MARK":
            marks.append(len(stack))
        elif name in _VALUES:
            stack.append(_VALUES[name]())
        elif name in _ARGUMENTS:
            stack.append(argument)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(str(argument))])
        elif name == "GLOBAL":
            stack.append(argument)
        else:
            _apply(name, stack, marks)
    raise ValueError("it ends before its value")


_VALUES: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict,
}  # fmt: skip
_ARGUMENTS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _apply(name: str, stack: list[Any], marks: list[int]) -> None:
    """An instruction that takes values from the stack."""
    if name in _TUPLES:
        stack.append(tuple(_pop(stack, len(stack) - _TUPLES[name])))
    elif name == "TUPLE":
        stack.append(tuple(_pop(stack, marks.pop())))
    elif name == "APPEND":
        item = stack.pop()
        stack[-1].append(item)
    elif name == "APPENDS":
        items = _pop(stack, marks.pop())
        stack[-1].extend(items)
    elif name == "SETITEM":
        key, value = _pop(stack, len(stack) - 2)
        stack[-1][_key(key)] = value
    elif name == "SETITEMS":
        items = _pop(stack, marks.pop())
        stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))
    elif name == "STACK_GLOBAL":
        stack.append(".".join(map(str, _pop(stack, len(stack) - 2))))
    elif name in ("REDUCE", "NEWOBJ"):
        by, arguments = _pop(stack, len(stack) - 2)
        stack.append(Made(by, arguments, []))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].states.append(state)
    else:
        raise ValueError(f"it has the instruction {name}")


class _Key(NamedTuple):
    """An object as the key of a dict: by its place, as no two are equal here."""

    place: int
    made: Made

    def __hash__(self) -> int:
        return self.place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.place == other.place

    @property
    def members(self) -> Mapping[str, Any]:
        """Attributes of the object."""
        return self.made.members


def _key(value: Any) -> Any:
    return _Key(id(value), value) if isinstance(value, Made) else value


def _pop(stack: list[Any], begin: int) -> list[Any]:
    if not 0 <= begin <= len(stack):
        raise ValueError("it takes more values than there are")
    items = stack[begin:]
    del stack[begin:]
    return items

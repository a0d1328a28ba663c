"""The values of one `log`, taken while the training goes on, and made plain later in another thread."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_core import Histogram
from accel_trackers.recording.device_copy import Mark, send, wait
from accel_trackers.recording.flat_values import flatten
from accel_trackers.recording.histograms import CopiedHistogram
from accel_trackers.recording.scalars import (
    LeftOut,
    UnreadableError,
    clean,
    describe,
    is_array,
    local,
    plain_value,
    readable_here,
    said,
    written,
)

DEEPEST = 20
"""How many dicts may stand in each other."""

MOST = 10_000
"""Of how many elements a tensor, an array or a list is copied, as some trackers record such."""

_Place = tuple[Any, Any]
"""A dict or a list, and the key or the index at which something stands in it."""

_Group = list[tuple[_Place, torch.Tensor]]
"""Tensors of one device, each with its place."""


class Snapshot:
    """Values as they were when it was taken; what becomes of the caller's dicts, lists and tensors later does not show.

    Numbers on the host are copied at once. Those on a device are put into one tensor per dtype,
    which the device copies to the host in its own time: taking a snapshot waits for no device,
    however many values there are, and is no collective.

    Attributes:
        elements: how much it holds: values of histograms, tensors, arrays and lists, and characters
            of texts.
    """

    def __init__(self, tree: dict[str, Any], marks: Iterable[Mark], elements: int) -> None:
        self.elements = elements
        self._tree = tree
        self._marks = tuple(marks)

    @classmethod
    def take(cls, values: Mapping[str, Any], *, objects: bool = True) -> Snapshot:
        """Takes the values of nested dicts. For the training's thread.

        Numbers and texts become plain (see `plain_value`), tensors of one element too, and a
        `Histogram` is copied. Small tensors and arrays are copied, and so are lists and tuples,
        with what is in them, as lists. Objects of other types are kept as they are. What cannot be
        read without a collective, or at all, or lies more than 20 dicts deep, becomes a `LeftOut`.

        Args:
            values: what was logged.
            objects: False: what is neither a number, a text nor a histogram becomes a `LeftOut`
                too, for there is nobody who would take it.

        Raises:
            UnreadableError: for a mapping whose items, or keys, cannot be read.
            ValueError: if two values get one name, of themselves or joined by "/".
        """
        taking = _Taking(objects)
        tree = taking.tree(values, ())
        return cls(tree, taking.send(), taking.elements)

    def resolve(self) -> dict[str, Any]:
        """The values with the same nesting, all of them plain but what `take` kept as it is. Waits for the device; for any thread."""
        for each in self._marks:
            wait(each)
        return {name: _resolved(value) for name, value in self._tree.items()}


class _Sent:
    """A number that is on its way to the host, in a tensor with others."""

    __slots__ = ("host", "index")

    def __init__(self, host: torch.Tensor, index: int) -> None:
        self.host = host
        self.index = index


class _Taking:
    """The values of a snapshot while it is taken; those on devices come last, all at once."""

    def __init__(self, objects: bool) -> None:
        self.elements = 0
        self._objects = objects
        self._numbers: dict[tuple[torch.device, torch.dtype], _Group] = {}
        self._tensors: dict[torch.device, _Group] = {}

    def tree(self, values: Mapping[Any, Any], above: tuple[int, ...]) -> dict[str, Any]:
        """A dict of what stands for the values of a mapping, which stands in those of the ids `above`."""
        tree: dict[str, Any] = {}
        is_nested = has_joined = False
        for key, value in values.items() if type(values) is dict else _items(values):
            name = key if type(key) is str and key.isascii() else _name(key)
            if name in tree:
                raise ValueError(
                    f"Two values to be logged have the name {name!r}: keys become texts. Rename one of them."
                )
            has_joined = has_joined or "/" in name
            kind = type(value)
            if kind is float or kind is bool:
                tree[name] = value
            elif kind is dict or (kind is not torch.Tensor and isinstance(value, Mapping)):
                is_nested = True
                tree[name] = self._below(value, (*above, id(values)))
            else:
                tree[name] = self._leaf(value, (tree, name), above)
        if is_nested and has_joined:  # only then can two names become one
            flatten(tree)  # raises here, where the user can see what was given, and not in the thread of a tracker
        return tree

    def send(self) -> list[Mark]:
        """Sends what lies on devices to the host, and puts what stands for it into its places."""
        devices = dict.fromkeys([*(device for device, _ in self._numbers), *self._tensors])
        return [mark for device in devices for mark in self._sent(device)]

    def _below(self, values: Any, above: tuple[int, ...]) -> Any:
        if id(values) in above:
            return LeftOut(f"a {type(values).__name__} that contains itself")
        if len(above) >= DEEPEST:
            return LeftOut(f"a {type(values).__name__} inside {DEEPEST} others, which is the most")
        try:
            return self._list(values, above) if isinstance(values, (list, tuple)) else self.tree(values, above)
        except UnreadableError as error:
            return LeftOut(str(error))

    def _leaf(self, value: Any, place: _Place, above: tuple[int, ...]) -> Any:
        """The value's entry in the snapshot; that of a tensor on a device is set later."""
        try:
            if isinstance(value, torch.Tensor):
                return self._tensor(value, place)
            if isinstance(value, Histogram):
                copy = CopiedHistogram(value)
                self.elements += copy.elements
                return copy
            found = plain_value(value)
            if isinstance(found, (str, int, float)):
                self.elements += len(found) if isinstance(found, str) else 0
                return found
            return self._object(found, above)
        except UnreadableError as error:
            return LeftOut(str(error))
        except Exception as error:  # noqa: BLE001  (whatever an object's own methods raise; it is reported, and the training goes on)
            return _unread(value, error)

    def _tensor(self, value: torch.Tensor, place: _Place) -> Any:
        if value.numel() == 1:
            here = value if type(value) is torch.Tensor else local(value)
            if here.is_cpu:
                return plain_value(here.item())
            self._numbers.setdefault((here.device, here.dtype), []).append((place, here))
            return None
        if value.numel() > MOST:
            return LeftOut(_large("tensor", value.numel()))
        if not self._objects:
            return LeftOut(describe(value))
        here = readable_here(value)
        if type(here) is not torch.Tensor:
            return LeftOut(f"{describe(value)}: it is of a class of its own")
        self.elements += here.numel()
        if here.is_cpu:
            return here.clone(memory_format=torch.contiguous_format)
        self._tensors.setdefault(here.device, []).append((place, here))
        return None

    def _object(self, value: Any, above: tuple[int, ...]) -> Any:
        if not self._objects:
            return LeftOut(describe(value))
        if isinstance(value, (list, tuple)):
            return self._below(value, above)
        if not is_array(value):
            return value
        size = getattr(value, "size", MOST)
        if isinstance(value, sys.modules["numpy"].ndarray) and size > MOST:
            return LeftOut(_large("array", size))
        if isinstance(size, int) and size <= MOST and hasattr(value, "copy"):
            self.elements += size
            return value.copy()
        return value

    def _list(self, values: Any, above: tuple[int, ...]) -> Any:
        """A list of what stands for the values of one. Dicts and lists in it are taken as well; histograms stand in dicts only."""
        if len(values) > MOST:
            return LeftOut(f"a {type(values).__name__} of {len(values)}; of up to {MOST} values some trackers take one")
        self.elements += len(values)
        above = (*above, id(values))
        found: list[Any] = [None] * len(values)
        for index, value in enumerate(values):
            if isinstance(value, Histogram):
                found[index] = LeftOut("a Histogram, which belongs into a dict")
            elif isinstance(value, Mapping):
                found[index] = self._below(value, above)
            else:
                found[index] = self._leaf(value, (found, index), above)
        return found

    def _sent(self, device: torch.device) -> list[Mark]:
        numbers = [group for (where, _), group in self._numbers.items() if where == device]
        tensors = self._tensors.get(device, [])
        with torch.no_grad():
            stacks = [(group, stack) for group in numbers if (stack := _stacked(group)) is not None]
            if not stacks and not tensors:
                return []
            try:
                hosts, there = send([*(stack for _, stack in stacks), *(tensor for _, tensor in tensors)], device)
            except Exception as error:  # noqa: BLE001  (no memory left, say: reported, and the training goes on)
                for group in (*(group for group, _ in stacks), tensors):
                    _give_up(group, error)
                return []
        for (group, _), host in zip(stacks, hosts, strict=False):
            for index, ((where, key), _) in enumerate(group):
                where[key] = _Sent(host, index)
        for ((where, key), _), host in zip(tensors, hosts[len(stacks) :], strict=True):
            where[key] = host
        return [there]


def _items(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    try:
        return list(values.items())
    except Exception as error:
        raise UnreadableError(f"{describe(values)} whose items cannot be read: {said(error)}") from error


def _name(key: Any) -> str:
    try:
        return written(key) if type(key) is int else clean(str(plain_value(key)))
    except Exception as error:
        raise UnreadableError(
            f"a dict with {describe(key)} as a key, which no text can be made of: {said(error)}"
        ) from error


def _large(kind: str, count: int) -> str:
    return f"{'an' if kind == 'array' else 'a'} {kind} of {count} elements; Histogram({kind}) says how they are distributed, log_images() shows pictures"


def _unread(value: Any, error: Exception) -> LeftOut:
    return LeftOut(f"{describe(value)} that cannot be read: {said(error)}")


def _stacked(group: _Group) -> torch.Tensor | None:
    """Numbers of one dtype in one tensor; None for a dtype that knows no such thing."""
    try:
        return torch.stack([tensor.reshape(()) for _, tensor in group])
    except Exception as error:  # noqa: BLE001  (a tensor without data, or no memory left: reported, and the training goes on)
        _give_up(group, error)
        return None


def _give_up(group: _Group, error: Exception) -> None:
    for (where, key), tensor in group:
        where[key] = _unread(tensor, error)


def _resolved(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {name: _resolved(each) for name, each in value.items()}
    if kind is list:
        return _resolved_list(value)
    if kind is not _Sent:
        return value
    number = value.host[value.index]
    try:
        return plain_value(number.item())
    except Exception as error:  # noqa: BLE001  (a dtype that has no numbers)
        return _unread(number, error)


def _resolved_list(values: list[Any]) -> Any:
    """A list with something that is left out is so itself: what is left out has no place in it."""
    found = [_resolved(each) for each in values]
    missing = next(filter(None, map(_missing, found)), None)
    return found if missing is None else LeftOut(f"a list with {missing.reason}")


def _missing(value: Any) -> LeftOut | None:
    if isinstance(value, LeftOut):
        return value
    return next(filter(None, map(_missing, value.values())), None) if type(value) is dict else None

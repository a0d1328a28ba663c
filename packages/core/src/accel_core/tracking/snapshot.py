"""The values of one `log`, taken while the training goes on, and made plain later in another thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_core.tracking.leaves import LeftOut, describe, is_array, local, plain
from accel_core.tracking.values import Histogram, flatten
from accel_core.tracking.waiting import Mark, send, wait

DEEPEST = 20
"""How many dicts may stand in each other."""

MOST = 10_000
"""Of how many elements a tensor is copied, as some trackers record such."""

_Group = list[tuple[dict[str, Any], str, torch.Tensor]]
"""Tensors of one device and dtype, each with the dict and the key at which it stands."""

_Groups = dict[tuple[torch.device, torch.dtype], _Group]


class Snapshot:
    """Values as they were when it was taken; what becomes of the caller's dicts and tensors later does not show.

    Numbers on the host are copied at once. Those on a device are put into one tensor per dtype, which the device copies to the host in its
    own time: taking a snapshot waits for no device, however many values there are, and is no collective.
    """

    def __init__(self, tree: dict[str, Any], marks: Iterable[Mark]) -> None:
        self._tree = tree
        self._marks = tuple(marks)

    @property
    def elements(self) -> int:
        """How many elements its histograms hold."""
        return _elements(self._tree)

    @classmethod
    def take(cls, values: Mapping[str, Any]) -> Snapshot:
        """Takes the values of nested dicts. For the training's thread.

        Numbers and texts become plain (see `plain`), tensors of one element too, and a `Histogram` is copied. Other objects are kept as they
        are. What cannot be read without a collective, or at all, or lies more than 20 dicts deep, becomes a `LeftOut`.

        Raises:
            ValueError: if two values get one name, of themselves or joined by "/".
        """
        groups: _Groups = {}
        tree = _taken(values, groups, ())
        return cls(tree, _sent(groups) if groups else ())

    def resolve(self) -> dict[str, Any]:
        """The values with the same nesting, all of them plain but what `take` kept as it is. Waits for the device; for any thread."""
        for each in self._marks:
            wait(each)
        return _resolved(self._tree)


def _elements(tree: dict[str, Any]) -> int:
    kinds = set(map(type, tree.values()))
    if not kinds & {Histogram, dict}:
        return 0
    return sum(
        _elements(value) if type(value) is dict else value.elements if type(value) is Histogram else 0
        for value in tree.values()
    )


class _Sent:
    """A number that is on its way to the host, in a tensor with others."""

    __slots__ = ("host", "index")

    def __init__(self, host: torch.Tensor, index: int) -> None:
        self.host = host
        self.index = index


def _taken(values: Mapping[Any, Any], groups: _Groups, above: tuple[int, ...]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    is_nested = has_joined = False
    for key, value in values.items():
        name = key if type(key) is str and key.isascii() else str(plain(key))
        if name in tree:
            raise ValueError(f"Two values to be logged have the name {name!r}: keys become texts. Rename one of them.")
        has_joined = has_joined or "/" in name
        kind = type(value)
        if kind is float or kind is bool:
            tree[name] = value
        elif kind is dict or (kind is not torch.Tensor and isinstance(value, Mapping)):
            is_nested = True
            tree[name] = _below(value, groups, (*above, id(values)))
        else:
            tree[name] = _leaf(value, tree, name, groups)
    if is_nested and has_joined:  # only then can two names become one
        flatten(tree)  # raises here, where the user can see what was given, and not in the thread of a tracker
    return tree


def _below(values: Mapping[Any, Any], groups: _Groups, above: tuple[int, ...]) -> dict[str, Any] | LeftOut:
    if id(values) in above:
        return LeftOut(f"a {type(values).__name__} that contains itself")
    if len(above) >= DEEPEST:
        return LeftOut(f"a {type(values).__name__} inside {DEEPEST} others, which is the most")
    return _taken(values, groups, above)


def _leaf(value: Any, tree: dict[str, Any], name: str, groups: _Groups) -> Any:
    """What stands for a value in the snapshot; that of a number on a device comes with the others of its group."""
    try:
        if not isinstance(value, torch.Tensor):
            return value.copied() if isinstance(value, Histogram) else _kept(plain(value))
        if value.numel() != 1:
            return value.detach().clone() if value.numel() <= MOST else LeftOut(_large(value))
        here = value if type(value) is torch.Tensor else local(value)
        if here.is_cpu:
            return here.item()
        groups.setdefault((here.device, here.dtype), []).append((tree, name, here))
    except Exception as error:  # noqa: BLE001  (whatever an object's own methods raise; it is reported, and the training goes on)
        return _unread(value, error)
    return None


def _kept(value: Any) -> Any:
    """An object as it is now: older trackers take lists and arrays."""
    if type(value) in {list, tuple}:
        return list(value)
    return value.copy() if is_array(value) and getattr(value, "size", MOST) < MOST and hasattr(value, "copy") else value


def _large(value: torch.Tensor) -> str:
    return f"a tensor of {value.numel()} elements; Histogram(tensor) says how they are distributed, log_images() shows pictures"


def _unread(value: Any, error: Exception) -> LeftOut:
    return LeftOut(f"{describe(value)} that cannot be read: {type(error).__name__}: {error}")


def _sent(groups: _Groups) -> list[Mark]:
    """Sends all numbers to the host, and puts what stands for them into their places."""
    marks: list[Mark] = []
    for device in dict.fromkeys(device for device, _ in groups):
        mine = [group for (where, _), group in groups.items() if where == device]
        try:
            with torch.no_grad():
                stacks = [torch.stack([tensor.reshape(()) for _, _, tensor in group]) for group in mine]
                hosts, there = send(stacks, device)
        except Exception as error:  # noqa: BLE001  (a tensor without data, or no memory left: reported, and the training goes on)
            for tree, name, tensor in (place for group in mine for place in group):
                tree[name] = _unread(tensor, error)
            continue
        marks.append(there)
        for group, host in zip(mine, hosts, strict=True):
            for index, (tree, name, _) in enumerate(group):
                tree[name] = _Sent(host, index)
    return marks


def _resolved(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _resolved(value)
        if type(value) is dict
        else value.host[value.index].item()
        if type(value) is _Sent
        else value
        for name, value in tree.items()
    }

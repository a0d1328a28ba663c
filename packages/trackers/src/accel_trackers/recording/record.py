"""The values of one `log`, taken while the training goes on, made plain later in a thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_core import Histogram
from accel_trackers.recording import histograms
from accel_trackers.recording.values import PLAIN, HostCopy, clean, describe, is_array, local, plain_value, said

if TYPE_CHECKING:
    from accel_core import Bins

_LEAVES = {*PLAIN, torch.Tensor}  # which need not be asked whether they are mappings
_Path = tuple[str, ...]  # the names of the dicts around a value, and its own


class LeftOut(NamedTuple):
    """Stands for a value that cannot be logged; `reason` follows "which is"."""

    reason: str


class View(NamedTuple):
    """One record, in the form that a tracker takes.

    Args:
        values: what every tracker takes, by name.
        histograms: by joined names.
        others: by joined names, what only some take, and `LeftOut` for what none does.
    """

    values: dict[str, Any]
    histograms: dict[str, Bins]
    others: dict[str, object]


class Record:
    """A copy of logged values: later changes of the caller's dicts, tensors and lists do not show.

    Numbers, texts and tensors of one element become plain (see `plain_value`); a `Histogram` is
    copied. Numbers on a device go into one tensor per dtype, which the device copies to the host
    asynchronously: making a record waits for no device, and is no collective. Objects of other
    types are passed on as they are, or left out where `objects` is False.
    ValueError is raised if two values get one name.
    """

    def __init__(self, values: Mapping[str, Any], *, objects: bool = True) -> None:
        self._objects = objects
        self._values: dict[_Path, Any] = {}
        self._histograms: dict[str, tuple[HostCopy, int]] = {}
        self._lock = threading.Lock()
        self._joined: View | None = None
        numbers: dict[tuple[torch.device, torch.dtype], dict[_Path, torch.Tensor]] = {}
        names: set[str] = set()
        leaves: set[_Path] = set()
        dicts: set[_Path] = set()
        for path, value in _leaves(values, ()):
            leaves.add(path)
            dicts.update(path[:depth] for depth in range(1, len(path)))
            if (name := "/".join(path)) in names or not dicts.isdisjoint(leaves):
                raise ValueError(
                    f"Two values to be logged have the name {name!r}: keys become texts, and those of nested dicts are joined by '/'. "
                    f"Rename one of them."
                )
            names.add(name)
            taken = value if type(value) is float else self._taken(name, value)
            if taken is not _KEPT:
                self._values[path] = taken
            if isinstance(taken, torch.Tensor):  # until it is here, it holds the place of its number
                numbers.setdefault((taken.device, taken.dtype), {})[path] = taken
        self._sent = [([*group], HostCopy(torch.stack([*group.values()]))) for group in numbers.values()]
        copies = (copied for copied, _ in self._histograms.values())
        self.weight = 1 + sum(map(_size, (*self._values.values(), *copies))) // 10_000
        """The number of records that these values count as while they wait."""

    def joined(self) -> View:
        """Numbers and texts, histograms, others, by names joined by "/". Waits for the device."""
        with self._lock:
            if self._joined is None:
                for paths, copied in self._sent:
                    self._values.update(zip(paths, map(plain_value, copied.wait().tolist()), strict=True))
                self._joined = self._by_kind()
            return self._joined

    def nested(self) -> View:
        """A new copy, nested as given, with lists for tensors. Waits for the device."""
        joined = self.joined()
        found: dict[str, Any] = {}
        for path, value in self._values.items():
            if not isinstance(value, LeftOut):
                inner = found
                for name in path[:-1]:
                    inner = inner.setdefault(name, {})
                inner[path[-1]] = value.wait().tolist() if isinstance(value, HostCopy) else _copy_of(value)
        left_out: dict[str, object] = {name: each for name, each in joined.others.items() if isinstance(each, LeftOut)}
        return View(found, joined.histograms, left_out)

    def _taken(self, name: str, value: Any) -> Any:
        """The stand-in for a value: a number on a device as a tensor; `_KEPT` for a histogram."""
        try:
            if isinstance(value, Histogram):
                self._histograms[name] = histograms.copied(value), value.bins
                return _KEPT
            if isinstance(value, torch.Tensor):
                here = value if type(value) is torch.Tensor else local(value)
                if here.numel() == 1:
                    return plain_value(here.item()) if here.is_cpu else here.detach().reshape(())
                return HostCopy(here) if self._objects else LeftOut(describe(value))
            here = plain_value(value)
            if type(here) in PLAIN:
                return here
            return _copy_of(here) if self._objects else LeftOut(describe(value))
        except Exception as error:  # noqa: BLE001  (whatever an object's own methods raise; it is reported, and the training goes on)
            return LeftOut(f"{describe(value)} that cannot be read: {said(error)}")

    def _by_kind(self) -> View:
        view = View({}, {}, {})
        for path, value in self._values.items():
            name = "/".join(path)
            if type(value) in PLAIN:
                view.values[name] = int(value) if type(value) is bool else value
            else:
                view.others[name] = value.wait() if isinstance(value, HostCopy) else value
        for name, (copied, bins) in self._histograms.items():
            try:
                found = view.histograms[name] = histograms.count(copied.wait(), bins)
            except Exception as error:  # noqa: BLE001  (a dtype that torch cannot convert, no memory left: no tracker's fault)
                view.others[name] = LeftOut(f"a Histogram that cannot be counted: {said(error)}")
                continue
            if found.nonfinite:
                view.values.setdefault(f"{name}/nonfinite", found.nonfinite)
        self._histograms.clear()  # each is as large as its values
        return view


_KEPT = object()


def _copy_of(value: Any) -> Any:
    """The value, or a shallow copy of a list or an array."""
    return copy.copy(value) if isinstance(value, list) or is_array(value) else value


def _leaves(values: Mapping[Any, Any], above: _Path) -> Iterator[tuple[_Path, Any]]:
    for key, value in values.items():
        name = key if type(key) is str and key.isascii() else clean(str(plain_value(key)))
        if type(value) is dict or (type(value) not in _LEAVES and isinstance(value, Mapping)):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _size(value: Any) -> int:
    """The number of elements, or of characters, that wait with a value."""
    if isinstance(value, HostCopy):
        return value.elements
    return len(value) if isinstance(value, (str, list)) else int(getattr(value, "nbytes", 0)) // 8

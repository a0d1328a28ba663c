"""The values of one `log`, taken while the training goes on, made plain and counted in a thread."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accel_core import Bins, Histogram, Table
from accel_trackers.recording.values import (
    PLAIN,
    HostCopy,
    as_array,
    clean,
    describe,
    is_array,
    local,
    plain_value,
    said,
)

_LEAVES = {*PLAIN, torch.Tensor}  # which need not be asked whether they are mappings
_PART = 1 << 20  # how many values of a histogram are counted at a time: in float64 these are 8 MiB
_LARGEST = 1.7976931348623157e308  # of a float
_Path = tuple[str, ...]  # the names of the dicts around a value, and its own


class LeftOut(NamedTuple):
    """Stands for a value that cannot be logged; `reason` describes it."""

    reason: str


class _Uncounted(NamedTuple):
    """A histogram's values and its number of bins."""

    values: HostCopy
    bins: int


class View(NamedTuple):
    """One record, in the form that a tracker takes."""

    values: dict[str, Any]  # what every tracker takes
    histograms: dict[str, Bins]  # by joined names, as the next
    others: dict[str, object]  # what only some trackers take, and `LeftOut` for what none does


class Record:
    """A copy of logged values: later changes of the caller's dicts, tensors and lists do not show.

    Numbers, texts and tensors of one element become plain (see `plain_value`); a `Histogram` is
    copied; objects of other types are passed on as they are. Numbers on a device go into one tensor
    per dtype, which the device copies to the host asynchronously: making a record waits for no
    device, and is no collective. ValueError is raised if two values get one name.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values: dict[_Path, Any] = {}
        self._lock = threading.Lock()
        self._joined: View | None = None
        numbers: dict[tuple[torch.device, torch.dtype], dict[_Path, torch.Tensor]] = {}
        names: set[str] = set()
        for path, value in _leaves(values, ()):
            if (name := "/".join(path)) in names:
                raise ValueError(f"Two values to be logged have the name {name!r}, joined by '/'. Rename one of them.")
            names.add(name)
            taken = self._values[path] = value if type(value) is float else _taken(value)
            if isinstance(taken, torch.Tensor):  # until it is here, it holds the place of its number
                numbers.setdefault((taken.device, taken.dtype), {})[path] = taken
        self._sent = [([*group], HostCopy(torch.stack([*group.values()]))) for group in numbers.values()]
        self.size = sum(map(_size, self._values.values()))
        """The number of elements and characters that wait with it."""

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

    def _by_kind(self) -> View:
        view = View({}, {}, {})
        for path, value in list(self._values.items()):
            name = "/".join(path)
            if isinstance(value, _Uncounted):
                del self._values[path]  # it is as large as its values
                try:
                    found = view.histograms[name] = count(value.values.wait(), value.bins)
                except Exception as error:  # noqa: BLE001  (a layout that torch cannot convert, no memory left: no tracker's fault)
                    view.others[name] = LeftOut(f"a Histogram, which cannot be counted: {said(error)}")
                else:
                    if found.nonfinite:
                        view.values.setdefault(f"{name}/nonfinite", found.nonfinite)
            elif type(value) in PLAIN:
                view.values[name] = int(value) if type(value) is bool else value
            else:
                view.others[name] = value.wait() if isinstance(value, HostCopy) else value
        return view


def weight(content: Record | Table | Mapping[str, Sequence[torch.Tensor]]) -> int:
    """The number of records that a content counts as while it waits: see `TrackingKwargs`."""
    if isinstance(content, Record):
        size = content.size
    elif isinstance(content, Table):
        size = sum(100 + (len(cell) if isinstance(cell, str) else 0) for row in content.rows for cell in row)
    else:
        size = sum(image.numel() for several in content.values() for image in several)
    return 1 + size // 10_000


def _taken(value: Any) -> Any:
    """The stand-in for a value: a number on a device as a tensor."""
    try:
        if isinstance(value, Histogram):
            return _Uncounted(_copied(value), value.bins)
        if isinstance(value, torch.Tensor):
            here = value if type(value) is torch.Tensor else local(value)
            if here.numel() == 1:
                return plain_value(here.item()) if here.is_cpu else here.detach().reshape(())
            return HostCopy(here)
        return _copy_of(plain_value(value))
    except Exception as error:  # noqa: BLE001  (whatever an object's own methods raise; it is reported, and the training goes on)
        return LeftOut(f"{describe(value)}, which cannot be read: {said(error)}")


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
    if isinstance(value, (HostCopy, _Uncounted)):
        return (value.values if isinstance(value, _Uncounted) else value).elements
    return len(value) if isinstance(value, (str, list)) else int(getattr(value, "nbytes", 0)) // 8


def _copied(histogram: Histogram) -> HostCopy:
    """The values now, without waiting for a device. Raises for what is no real numbers."""
    values = histogram.values
    if is_array(values):
        # float64 is also what the values are counted in; so it is no loss for the dtypes that torch lacks.
        values = torch.from_numpy(as_array(values).astype("float64", order="C", casting="same_kind"))
    elif not isinstance(values, torch.Tensor):
        if len(values) and isinstance(values[0], torch.Tensor):
            values = torch.cat([local(each).reshape(-1) for each in values])
        else:
            values = torch.tensor(values, dtype=torch.float64, device="cpu")
    if values.is_complex():
        raise TypeError(f"the dtype is {values.dtype}: take value.abs()")
    return HostCopy(local(values))


def count(values: torch.Tensor, bins: int) -> Bins:
    """The histogram of a tensor in CPU memory."""
    parts = values.reshape(-1).split(_PART)
    low, high, total, squares, finite = math.inf, -math.inf, 0.0, 0.0, 0
    for part in map(_finite, parts):
        if part.numel():
            low, high = min(low, part.min().item()), max(high, part.max().item())
            total += part.sum().item()
            squares += part.square().sum().item()
            finite += part.numel()
    edges = _edges(low, high, bins) if finite else _edges(0.0, 1.0, bins)
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device="cpu")
    counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
    for part in map(_finite, parts):
        counts += torch.bincount(torch.bucketize(part, inner, right=True), minlength=bins)
    return Bins(tuple(counts.tolist()), edges, total, squares, values.numel() - finite)


def _finite(part: torch.Tensor) -> torch.Tensor:
    exact = part.to(torch.float64)
    return exact[exact.isfinite()]


def _edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    """Equally far apart from `low` to `high`, or further where floats are too coarse for that."""
    largest = max(abs(low), abs(high))
    if high - low < 16 * bins * math.ulp(largest):
        margin = max(largest / 2, 1e-300) if largest else 0.5
        low, high = max(low - margin, -_LARGEST), min(high + margin, _LARGEST)
    shares = [index / bins for index in range(1, bins)]
    return (low, *(low * (1 - share) + high * share for share in shares), high)

"""The values of one `log`, in the two forms that trackers take them in."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel_trackers.recording.flat_values import flatten
from accel_trackers.recording.histograms import CopiedHistogram
from accel_trackers.recording.scalars import LeftOut, describe, said

if TYPE_CHECKING:
    from accel_core import Bins
    from accel_trackers.recording.flat_values import Flat
    from accel_trackers.recording.snapshot import Snapshot


@dataclass(frozen=True)
class View:
    """One record, in the form that a tracker takes.

    Args:
        values: what every tracker takes, by name.
        histograms: by joined names.
        others: by joined names, what only some take, and `LeftOut` for what none does.
    """

    values: dict[str, Any]
    histograms: dict[str, Bins]
    others: dict[str, object] = field(default_factory=dict)


class Values:
    """The values of one `log`, brought to the host once, by the first tracker that wants them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._content: tuple[dict[str, Any], Flat, View] | None = None

    @property
    def weight(self) -> int:
        """The number of records that these values count as while they wait."""
        return 1 + self._snapshot.elements // 10_000

    def joined(self) -> View:
        """By names that are joined by "/": numbers and texts, histograms, and other objects."""
        return self._resolved()[2]

    def nested(self) -> View:
        """A new copy, nested as given: numbers, texts, objects, and lists instead of tensors."""
        tree, _, joined = self._resolved()
        others: dict[str, object] = {name: each for name, each in joined.others.items() if isinstance(each, LeftOut)}
        return View(_nested(tree, "", others), joined.histograms, others)

    def _resolved(self) -> tuple[dict[str, Any], Flat, View]:
        with self._lock:
            if self._content is None:
                tree = self._snapshot.resolve()
                flat = flatten(tree)
                self._content = tree, flat, _counted(flat)
            return self._content


def _counted(flat: Flat) -> View:
    bins: dict[str, Bins] = {}
    others = dict(flat.others)
    for name, histogram in flat.histograms.items():
        try:
            bins[name] = histogram.resolve()
        except Exception as error:  # noqa: BLE001  (a dtype that torch cannot convert, no memory left: no tracker's fault)
            others[name] = LeftOut(f"a Histogram that cannot be counted: {said(error)}")
    nonfinite = {f"{name}/nonfinite": each.nonfinite for name, each in bins.items() if each.nonfinite}
    return View({**nonfinite, **flat.numbers_and_texts}, bins, others)


def _nested(tree: Mapping[str, Any], above: str, others: dict[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if type(value) is dict:
            found[name] = _nested(value, f"{above}{name}/", others)
        elif not isinstance(value, (LeftOut, CopiedHistogram)):
            try:
                found[name] = _listed(value)
            except Exception as error:  # noqa: BLE001  (a dtype that has no numbers)
                others[f"{above}{name}"] = LeftOut(f"{describe(value)} that cannot be read: {said(error)}")
    return found


def _listed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if type(value) is list:
        return [_listed(each) for each in value]
    return {name: _listed(each) for name, each in value.items()} if type(value) is dict else value

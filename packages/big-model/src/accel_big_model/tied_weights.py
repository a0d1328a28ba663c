"""Weights that several names share, while they are offloaded: one read, one memory, one object afterwards.

A tied weight that one module has while it computes is not read again for another one. It is not
kept for its own sake: where its modules are called far apart, it comes for each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from accel_big_model.module_tensors import owner_of
from accel_big_model.weights import PrefixedDataset, lent


class TiedWeights:
    """The groups of names that share a weight in one model, and where that is at the moment."""

    def __init__(self, groups: Iterable[Sequence[str]] = ()) -> None:
        self._groups = [list(names) for names in groups]
        self._group_of = {name: index for index, names in enumerate(self._groups) for name in names}
        self._stands_for: dict[int, torch.Tensor] = {}
        self._resident: dict[int, tuple[nn.Module, str]] = {}
        self._in_use: WeakValueDictionary[tuple[int, torch.device], torch.Tensor] = WeakValueDictionary()
        self._restored: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def keep_resident(self, model: nn.Module, is_offloaded: Callable[[str], bool]) -> None:
        """Notes which of the weights have a name that is not offloaded: they need no reading."""
        for index, names in enumerate(self._groups):
            if (name := next((each for each in names if not is_offloaded(each)), None)) is not None:
                self._resident[index] = owner_of(model, name)

    def resident(self, name: str) -> torch.Tensor | None:
        """The weight of this name, if it is in memory under another one."""
        if (place := self._resident.get(self._group_of.get(name, -1))) is None:
            return None
        found: torch.Tensor = getattr(*place)
        return found

    def read(self, weights: Mapping[str, torch.Tensor], prefix: str, own: str, device: torch.device) -> torch.Tensor:
        """The weight of a module on a device: that which is there already, or read from the store."""
        index = self._group_of.get(prefix + own)
        if index is None:
            return lent(weights, own).to(device)
        found = self.resident(prefix + own)
        if found is None or found.device != device:
            found = self._in_use.get((index, device))
        return _stored(weights, own, self._groups[index]).to(device) if found is None else found

    def use(self, name: str, value: torch.Tensor) -> bool:
        """Notes a weight that a module holds now, if it is tied: nobody reads it again meanwhile."""
        if (index := self._group_of.get(name)) is None:
            return False
        self._in_use[index, value.device] = value
        return True

    def stand_in(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What stands for the weight while it is away: one object for all its names."""
        index = self._group_of.get(name)
        return make() if index is None else self._stands_for.setdefault(index, make())

    def restored(self, name: str, restore: Callable[[], Any], owner: nn.Module, own: str) -> None:
        """Gives a module its weight for good: by `restore`, or that which another name has already."""
        index = self._group_of.get(name, -1)
        found = self.resident(name)
        if found is None:
            found = self._restored.get(index)
        if found is not None:
            owner._parameters[own] = found  # type: ignore[assignment]
            return
        restore()
        if index >= 0 and (parameter := owner._parameters.get(own)) is not None:
            self._restored[index] = parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedWeights:
        """For a copy of the model: what is resident is looked up there."""
        copied = TiedWeights(self._groups)
        copied._resident = copy.deepcopy(self._resident, memo)
        return copied


def _stored(weights: Mapping[str, torch.Tensor], own: str, names: Sequence[str]) -> torch.Tensor:
    """The weight by this name, or by any other that is in the store."""
    try:
        return lent(weights, own)
    except KeyError:
        store = weights.dataset if isinstance(weights, PrefixedDataset) else weights
        found = next((name for name in names if name in store), None)
        if found is None:
            raise
        return lent(store, found)

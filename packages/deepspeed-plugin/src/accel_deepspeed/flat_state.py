"""Optimizer state of flat partitions, and as the user's optimizer shows it: by parameter, as views.

What a partition keeps is either one flat tensor, laid out as its masters, or a value for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_core.api.layouts import Replicated
from accel_deepspeed.engine_internals import shape_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.api.checkpoint import SavedOptimizer
    from accel_deepspeed.engine_internals import Fragment, Partitions
    from accel_deepspeed.state_files import StateFiles


class FlatState:
    """The state of the partitions of one model.

    Args:
        optimizer: of the user; it shows the state, and what is loaded into it is taken over.
        partitions: of the model.
        model: how messages call it.
        files: where flat tensors are kept; None: in memory.

    Attributes:
        parameters: by `id`, those that are stepped in parts.
        fragments: by `id`, their parts on this rank.
    """

    def __init__(self, optimizer: Optimizer, partitions: Partitions, model: str, files: StateFiles | None) -> None:
        self._optimizer = optimizer
        self._partitions = partitions
        self._model = model
        self._files = files
        self.parameters: dict[int, nn.Parameter] = {}
        self.fragments: dict[int, Fragment] = {}
        for parameter, fragment in partitions.fragments():
            self.parameters[id(parameter)], self.fragments[id(parameter)] = parameter, fragment
        self._memory: dict[tuple[int, str], torch.Tensor] = {}
        self._is_linked = False

    def link(self) -> None:
        """Shows what there is in the user's optimizer."""
        masters, inner = self._partitions.masters, self._partitions.inner
        for key, fragment in self.fragments.items():
            flat = masters[fragment.group]
            state = inner.state.get(flat)
            if state:
                self._is_linked = True
                self._optimizer.state[self.parameters[key]] = {
                    name: value.narrow(0, fragment.offset, fragment.numel) if _is_laid_out(value, flat) else value
                    for name, value in state.items()
                }

    def link_first(self) -> None:
        """Shows it behind the first step, which makes it."""
        if not self._is_linked:
            self.link()

    def memory(self, parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a parameter's part of the state `key`, in a flat tensor of `take`."""
        fragment = self.fragments[id(parameter)]
        place = fragment.group, key
        if place not in self._memory:
            master = self._partitions.masters[fragment.group].detach()
            in_file = self._files if master.device.type == "cpu" else None
            self._memory[place] = (
                in_file.zeros(master.numel(), dtype) if in_file else torch.zeros_like(master, dtype=dtype)
            )
        return self._memory[place].narrow(0, fragment.offset, fragment.numel)

    def take(self) -> None:
        """Takes over the state of the user's optimizer, in memory of `memory`."""
        masters, inner = self._partitions.masters, self._partitions.inner
        by_group: dict[int, dict[str, Any]] = {}
        for key, fragment in self.fragments.items():
            state = self._optimizer.state.get(self.parameters[key])
            if state:
                self._lay_out(self.parameters[key], fragment, state)
                self._check_shared(by_group.setdefault(fragment.group, dict(state)), state)
        for group, flat in enumerate(masters):
            inner.state.pop(flat, None)
            if group in by_group:
                inner.state[flat] = {
                    name: self._memory.get((group, name), value) for name, value in by_group[group].items()
                }
        self._memory.clear()
        self._is_linked = False
        self.link()

    def take_whole(self) -> None:
        """Takes over what the user's optimizer has learnt of whole parameters, before their model was prepared."""
        for key, fragment in self.fragments.items():
            parameter = self.parameters[key]
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == shape_of(parameter):
                    part = self.memory(parameter, name, value.dtype)
                    part.copy_(value.reshape(-1)[fragment.start : fragment.start + fragment.numel])
        self.take()

    def take_loaded(self) -> None:
        """Takes over what DeepSpeed has loaded by itself."""
        self._memory.clear()
        self.link()
        if self._files is not None:
            self.take()  # into files

    def list_unlike(self, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """The refusal that `take` would raise, in a list, or none. Changes nothing."""
        states = {names[key]: dict(saved.values.get(names[key], {})) for key in self.fragments}
        for place, entry in saved.described().items():
            name, _, option = place.rpartition("/")
            if name in states and entry.kind == "replicated":
                value = states[name][option] = torch.empty(entry.shape, dtype=entry.dtype)
                saved.read(place, Replicated(value))
        firsts: dict[int, dict[str, Any]] = {}
        try:
            for key, fragment in self.fragments.items():
                if state := states[names[key]]:
                    self._check_shared(firsts.setdefault(fragment.group, state), state)
        except ValueError as error:
            return [str(error)]
        return []

    def _lay_out(self, parameter: nn.Parameter, fragment: Fragment, state: Mapping[str, Any]) -> None:
        """Copies into the flat tensors what is not there: state of unknown optimizers, saved as one."""
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == (fragment.numel,):
                part = self.memory(parameter, name, value.dtype)
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)

    def _check_shared(self, first: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Raises if a value that is one for a whole partition differs between its parameters."""
        for name, value in first.items():
            other = state.get(name)
            is_one = not (isinstance(value, torch.Tensor) and value.dim())
            if is_one and other is not value and (other is None or bool(other != value)):
                raise ValueError(
                    f"{type(self._optimizer).__name__} has {name}={_shown(value)} for one parameter of {self._model}, and "
                    f"{_shown(other)} for another one of the same group: it has left some out of steps. DeepSpeed keeps one value for all "
                    f"parameters of a group. Put those that are stepped together into groups of their own; or use strategy='ddp'."
                )


def _shown(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_laid_out(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape

"""Gradients of prepared models: in `.grad`, or as a strategy's hook `gradient_state` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_core.contract.tensor_layouts import Elementwise, Partial, memory_of

if TYPE_CHECKING:
    from accel_core.contract.tensor_layouts import Box, GradientState
    from accel_core.loop.preparation import PreparedModel

    GradientHook = Callable[[nn.Module, nn.Module], GradientState]
    Place = tuple[int, str, Box]  # a model, a parameter of it, and a part of that
    Earlier = tuple[Mapping[Place, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]  # of a strategy; of `.grad`


class Gradients:
    """Reads and changes the gradients of the trained ones of `models`, a list that grows.

    `are_elsewhere`: whether the strategy keeps them, as `state` says; all others are in `.grad`.
    `aside`: what is set aside, live, with its parameter.
    """

    def __init__(self, models: Sequence[PreparedModel] = (), state: GradientHook | None = None) -> None:
        self.are_elsewhere = state is not None
        self._models = models
        self._state = state
        self.aside: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def kept(self, parameters: Iterable[torch.Tensor]) -> dict[int, Sequence[Elementwise | Partial]]:
        """The terms of the gradients that the strategy keeps, by the `id` of the parameter."""
        wanted = set(map(id, parameters)) if self.are_elsewhere else set()
        found: dict[int, Sequence[Elementwise | Partial]] = {}
        for record, state in self._states():
            found.update(dict.fromkeys(record.ids & wanted, ()))
            now = dict(record.original.named_parameters(remove_duplicate=False)) if state else {}
            for name, terms in state.items():
                # A strategy may show another tensor for a while: a gathered one, in the forward.
                known = [each for each in (id(record.named.get(name)), id(now.get(name))) if each in wanted]
                found.update(dict.fromkeys(known, ()))
                found.update(dict.fromkeys(known[:1], terms))
        return found

    def of(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part that this rank has of the gradients, live, with its parameter."""
        given = {id(parameter): parameter for parameter in parameters}
        kept = self.kept(given.values())
        for key, parameter in given.items():
            if key in kept:
                yield from ((parameter, part) for part in _memory(kept[key]))
            elif parameter.grad is not None:
                yield parameter, parameter.grad

    def tensors(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of `parameters` that this rank has, live."""
        return [part for _, part in self.of(parameters)]

    def waiting(self) -> Iterator[torch.Tensor]:
        """The terms that the strategy keeps and no backward has sent to the other ranks."""
        for _, state in self._states():
            yield from (term.data for terms in state.values() for term in terms if isinstance(term, Partial))

    def scale(self, parameters: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
        """Multiplies them in place, by a number or a 0-d tensor; neither is awaited."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in self.tensors(parameters):
            memory: Any = gradient._values() if gradient.is_sparse else gradient
            memory = memory.to_local() if hasattr(memory, "to_local") else memory
            by_kind.setdefault((memory.device, memory.dtype), []).append(memory)
        for (device, dtype), same in by_kind.items():
            if isinstance(factor, torch.Tensor) and dtype.itemsize < 4:
                # In such a dtype, the third digit of the factor would be wrong.
                wide = factor.to(device, torch.float32)
                for memory in same:
                    memory.mul_(wide.expand([1] * memory.dim()))
            else:
                torch._foreach_mul_(same, factor.to(device, dtype) if isinstance(factor, torch.Tensor) else factor)

    def clear_kept(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes zero what the strategy keeps of the gradients of `parameters`, in its memory."""
        if any(state for _, state in self._states()):  # nothing as a rule, where it keeps some beside `.grad`
            for terms in self.kept(parameters).values():
                _zero(terms)

    def drop(self, parameters: Iterable[torch.Tensor], earlier: Earlier | None = None) -> None:
        """Clears those of `parameters`, and all that is kept; `earlier` ones stay, as zeros."""
        names = set() if earlier is None else {place[:2] for place in earlier[0]}
        stays = set()
        for record, state in self._states():
            for terms in state.values():
                _zero(terms)
            stays |= {id(record.named.get(name)) for name in state if (id(record), name) in names}
        for parameter in parameters:
            if id(parameter) not in stays:
                parameter.grad = None

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Earlier:
        """Takes the gradients that are there away, so that those to come can be scaled alone."""
        kept = {}
        for record, state in self._states():
            parameters = [each for each in parameters if id(each) not in record.ids]
            for place, part in _arrived(record, state):
                kept[place] = part.clone()
                part.zero_()
                self.aside.append((record.named.get(place[1]), kept[place]))
        # A copy: the wrapper of a strategy may own the memory and write the next gradient to it.
        taken = [(each, each.grad.detach().clone()) for each in parameters if each.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        self.aside += taken
        return kept, taken

    def bring_back(self, earlier: Earlier) -> None:
        """Adds what `set_aside` took to what has come since."""
        self.aside = []
        now = {place: part for record, state in self._states() for place, part in _arrived(record, state)}
        for place, gradient in earlier[0].items():
            if place not in now:
                raise RuntimeError(
                    f"forward_backward() was called while the parameter {place[1]!r} had a gradient, and afterwards "
                    f"gradient_state() of the strategy names no gradient of {place[2]} of it to add it to."
                )
            now[place].add_(gradient)
        for parameter, gradient in earlier[1]:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def stand_ins(self, parameters: Iterable[torch.Tensor]) -> list[nn.Parameter]:
        """For each part of the gradients of `parameters`, a tensor whose `.grad` it is, live."""
        found: Any = [(part, part.detach()) for _, part in self.of(parameters)]
        for part, stand_in in found:
            stand_in.grad = part
        return [stand_in for _, stand_in in found]

    def _states(self) -> Iterator[tuple[PreparedModel, GradientState]]:
        if self._state is not None:
            for record in self._models:
                if not record.evaluation:
                    yield record, self._state(record.original, record.prepared)


def _arrived(record: PreparedModel, state: GradientState) -> Iterator[tuple[Place, torch.Tensor]]:
    """The parts of gradients that have travelled, each with its place."""
    for name, terms in state.items():
        for term in terms:
            if isinstance(term, Elementwise):
                yield from (((id(record), name, piece.box), piece.data) for piece in term.pieces)


def _memory(terms: Iterable[Elementwise | Partial]) -> Iterator[torch.Tensor]:
    for term in terms:
        yield from memory_of(term)


def _zero(terms: Iterable[Elementwise | Partial]) -> None:
    for part in _memory(terms):
        part.zero_()

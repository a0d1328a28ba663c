"""The gradients of models whose strategy says where it keeps them: the hook `gradient_state`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel_core.contract.tensor_layouts import Elementwise, GradientState, Partial, memory_of
from accel_core.loop.gradients import Earlier, Gradients

if TYPE_CHECKING:
    from accel_core.loop.gradients import Place
    from accel_core.loop.preparation import PreparedModel

GradientHook = Callable[[nn.Module, nn.Module], GradientState]


class KeptGradients(Gradients):
    """Those of trained models, as the hook `gradient_state` gives them; of other parameters, `.grad`.

    `models` is what is prepared; the list grows.
    """

    are_elsewhere = True

    def __init__(self, models: Sequence[PreparedModel], state: GradientHook) -> None:
        self._models = models
        self._state = state

    def kept(self, parameters: Iterable[torch.Tensor]) -> dict[int, Sequence[Elementwise | Partial]]:
        """See `Gradients`."""
        wanted = set(map(id, parameters))
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
        """See `Gradients`."""
        given = {id(parameter): parameter for parameter in parameters}
        kept = self.kept(given.values())
        for key, parameter in given.items():
            if key in kept:
                yield from ((parameter, part) for term in kept[key] for part in memory_of(term))
            elif parameter.grad is not None:
                yield parameter, parameter.grad

    def tensors(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """See `Gradients`."""
        return [part for _, part in self.of(parameters)]

    def waiting(self) -> Iterator[torch.Tensor]:
        """See `Gradients`."""
        for _, state in self._states():
            yield from (term.data for terms in state.values() for term in terms if isinstance(term, Partial))

    def clear_kept(self, parameters: Iterable[torch.Tensor]) -> None:
        """See `Gradients`."""
        if any(state for _, state in self._states()):  # nothing as a rule, where it keeps some beside `.grad`
            for terms in self.kept(parameters).values():
                _zero(terms)

    def drop(self, parameters: Iterable[torch.Tensor], earlier: Earlier | None = None) -> None:
        """See `Gradients`."""
        names = set() if earlier is None else {place[:2] for place in earlier.kept}
        stays = set()
        for record, state in self._states():
            for terms in state.values():
                _zero(terms)
            stays |= {id(record.named.get(name)) for name in state if (id(record), name) in names}
        super().drop([parameter for parameter in parameters if id(parameter) not in stays])

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Earlier:
        """See `Gradients`."""
        kept = {}
        for record, state in self._states():
            parameters = [each for each in parameters if id(each) not in record.ids]
            for place, part in _arrived(record, state):
                kept[place] = part.clone()
                part.zero_()
        return Earlier(kept, super().set_aside(parameters).taken)

    def bring_back(self, earlier: Earlier) -> None:
        """See `Gradients`."""
        now = {place: part for record, state in self._states() for place, part in _arrived(record, state)}
        for place, gradient in earlier.kept.items():
            if place not in now:
                raise RuntimeError(
                    f"forward_backward() was called while the parameter {place[1]!r} had a gradient, and afterwards gradient_state() of "
                    f"the strategy names no gradient of {place[2]} of it, to which the former could be added. A gradient "
                    f"that is zeroed in place stays there."
                )
            now[place].add_(gradient)
        super().bring_back(earlier)

    def _states(self) -> Iterator[tuple[PreparedModel, GradientState]]:
        for record in self._models:
            if not record.evaluation:
                yield record, self._state(record.original, record.prepared)


def _arrived(record: PreparedModel, state: GradientState) -> Iterator[tuple[Place, torch.Tensor]]:
    """The parts of gradients that have travelled, each with its place."""
    for name, terms in state.items():
        for term in terms:
            if isinstance(term, Elementwise):
                yield from (((id(record), name, piece.box), piece.data) for piece in term.pieces)


def _zero(terms: Iterable[Elementwise | Partial]) -> None:
    for term in terms:
        for part in memory_of(term):
            part.zero_()

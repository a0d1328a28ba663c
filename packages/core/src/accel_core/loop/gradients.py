"""The gradients of prepared models, in `.grad`. `kept_gradients` has those of strategies that keep them elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from accel_core.contract.tensor_layouts import Box, Elementwise, Partial

    Place = tuple[int, str, Box]  # a model, a parameter of it, and a part of that


def as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """One parameter, or any iterable of them (a generator is consumed once), as a list."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return list(given)


def listed(names: Sequence[str]) -> str:
    """The first eight names of parameters, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class Earlier(NamedTuple):
    """Gradients that were set aside: of the strategy, by their place, and of `.grad`."""

    kept: Mapping[Place, torch.Tensor]
    taken: list[tuple[torch.Tensor, torch.Tensor]]


class Gradients:
    """Reads and changes gradients where nobody owns the hook `gradient_state`: all of them are in `.grad`.

    `are_elsewhere` says whether the strategy keeps them.
    """

    are_elsewhere = False

    def kept(self, parameters: Iterable[torch.Tensor]) -> Mapping[int, Sequence[Elementwise | Partial]]:  # noqa: ARG002
        """The terms of the gradients that the strategy keeps, by the `id` of the parameter."""
        return {}

    def of(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part that this rank has of the gradients, live, with its parameter."""
        for parameter in {id(parameter): parameter for parameter in parameters}.values():
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def tensors(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of `parameters` that this rank has, live."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def waiting(self) -> Iterator[torch.Tensor]:
        """The terms that no backward has sent to the other ranks: none, as all gradients are in `.grad`."""
        return iter(())

    def scale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """Multiplies them in place."""
        found = self.tensors(parameters)
        dense = [gradient for gradient in found if not gradient.is_sparse]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in found:
            if gradient.is_sparse:
                gradient.mul_(factor)

    def clear_kept(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes zero what the strategy keeps of the gradients of `parameters`, in its memory."""

    def drop(self, parameters: Iterable[torch.Tensor], earlier: Earlier | None = None) -> None:  # noqa: ARG002
        """Clears those of `parameters`, and all that is kept; `earlier` ones stay, as zeros."""
        for parameter in parameters:
            parameter.grad = None

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> Earlier:
        """Takes the gradients that are there away, so that those to come can be scaled alone."""
        # A copy: the wrapper of a strategy may own the memory and write the next gradient to it.
        taken = [(each, each.grad.detach().clone()) for each in parameters if each.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return Earlier({}, taken)

    def bring_back(self, earlier: Earlier) -> None:
        """Adds what `set_aside` took to what has come since."""
        for parameter, gradient in earlier.taken:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def stand_ins(self, parameters: Iterable[torch.Tensor]) -> list[nn.Parameter]:
        """For each part of the gradients of `parameters`, a tensor whose `.grad` it is, live."""
        return [_with_gradient(part) for _, part in self.of(parameters)]


def _with_gradient(gradient: torch.Tensor) -> nn.Parameter:
    stand_in = gradient.detach()
    stand_in.grad = gradient
    return stand_in  # type: ignore[return-value]

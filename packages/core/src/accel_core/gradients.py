"""Small operations on the `.grad` of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


def as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """One parameter, or any iterable of them (a generator is consumed once), as a list."""
    if not isinstance(parameters, Iterable):
        raise _no_parameters(parameters)
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in found:
        if not isinstance(parameter, torch.Tensor):
            raise _no_parameters(parameter)
    return found  # type: ignore[return-value]


def _no_parameters(found: object) -> TypeError:
    return TypeError(
        f"expected parameters, found {type(found).__name__}. Pass model.parameters(), or a list of tensors."
    )


def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies the gradients in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(factor)


def set_aside(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Takes the gradients that are there away, so that those to come can be scaled alone."""
    taken = []
    for parameter in parameters:
        if parameter.grad is not None:
            # A copy: the wrapper of a strategy may own the memory and write the next gradient to it.
            taken.append((parameter, parameter.grad.detach().clone()))
            parameter.grad = None
    return taken


def bring_back(taken: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Adds what `set_aside` took to what has come since."""
    for parameter, gradient in taken:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)

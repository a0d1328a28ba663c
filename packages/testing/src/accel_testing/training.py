"""What the jobs of all suites train with: a prepared model, a stand-in for a loader, and whole tensors.

Read off the Accelerator is only what no user asks for, and what no test may depend on having
installed: the shard, and the place where a loader reports, because the core has no loader for a
larger world.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_core import Rows
from accel_core.api.component import gather_objects
from accel_core.api.layouts import Elementwise, GradientState, Partial
from accel_testing import models

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Accelerator
    from accel_testing.models import Gradients, State


class Training:
    """A prepared model with its optimizer."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
        self.accelerator = accelerator
        self.shard = accelerator._layout.shard
        self.user_model: Any = model
        self.model, self.optimizer = accelerator.prepare(model, optimizer)

    def gradients(self) -> Gradients:
        """See `gradients_of`."""
        return gradients_of(self.accelerator, self.model)

    def state(self) -> State:
        """See `state_of`."""
        return state_of(self.accelerator, self.model)

    def end(self) -> dict[str, object]:
        """Ends the training. Returns what is to be freed with its last reference, by name."""
        self.accelerator.end_training()
        return {
            "the Accelerator": self.accelerator,
            "the user's model": self.user_model,
            "the prepared model": self.model,
            "a parameter": next(self.user_model.parameters()),
            "the optimizer": self.optimizer,
        }


def fed(accelerator: Accelerator, batches: int) -> Iterator[int]:
    """Stands in for a prepared loader: yields numbers, and reports as loaders do."""
    passage = accelerator._feed.enter()
    try:
        for index in range(batches):
            passage.advance(batches - index - 1, Rows(models.ROWS, models.ROWS))
            yield index
    finally:
        passage.leave()


def gradients_of(accelerator: Accelerator, model: nn.Module) -> Gradients:
    """Copies of the gradients under the user's parameter names, whole.

    A collective under strategies that say where gradients are.
    """
    state = accelerator._relay.gradient_state(accelerator.unwrap_model(model), model)
    found: Gradients = {}
    for name, terms in state.items():
        for term in terms:
            if isinstance(term, Partial):
                found[name] = found.get(name, 0) + whole(term.data)
    if accelerator._parts.activation.owners["gradient_state"] is not None:
        for name, gradient in _assembled(accelerator, state).items():
            found[name] = found.get(name, 0) + gradient
    return found


def _assembled(accelerator: Accelerator, state: GradientState) -> Gradients:
    """The gradients that were sent, from the pieces of all ranks; this rank's have priority."""
    mine = [
        (name, term.shape, piece.box, whole(piece.data))
        for name, terms in state.items()
        for term in terms
        if isinstance(term, Elementwise)
        for piece in term.pieces
    ]
    ranks = gather_objects([mine], accelerator._world)
    found: Gradients = {}
    for name, shape, box, part in (part for parts in (*ranks, mine) for part in parts):
        found.setdefault(name, torch.zeros(shape, dtype=part.dtype))[box.slices] = part
    return found


def state_of(accelerator: Accelerator, model: nn.Module) -> State:
    """A copy of the state under the user's names; may be empty but on the main process."""
    return {name: whole(value) for name, value in accelerator.get_state_dict(model).items()}


def whole(tensor: Any) -> torch.Tensor:
    """A copy in CPU memory, of a tensor in parts the whole."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    copy: torch.Tensor = full.detach().to("cpu", copy=True)
    return copy


def fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds all numbers of a tensor exactly."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)

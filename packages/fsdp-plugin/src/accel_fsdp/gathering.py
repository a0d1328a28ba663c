"""In which dtypes the parameters of a unit are gathered, and in which their gradients travel.

Where matrix products are computed in a narrow dtype, autocast casts their weights, and autograd
keeps what was cast until the backward: the whole model, on every rank. Weights that are gathered in
that dtype need no cast, go when their unit has computed, and are half of the communication. Norms
and embeddings, which autocast leaves alone, are gathered in their own dtype, a table that is tied to
a head too: its rows begin the stream of activations, and the product of the head casts it in any
case. So every number is the one that one process computes, but for what a module computes by itself
with weights of two and more dims, and with parameters that it has beside its children: outside of
autocast, these are rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_fsdp.engine_internals import engine_state

if TYPE_CHECKING:
    import torch

    from accel_core import PrepareRequest
    from accel_fsdp.wrapping import Unit


class Gathering:
    """The dtypes of one model.

    Args:
        model: the root.
        whole: its parameters that are not cut.
        request: the dtypes of the precision, and whether autocast is on.
        dtype: the one in which all parameters are gathered; None: the policy decides.

    Attributes:
        as_stored: the modules that autocast leaves alone: embeddings, and those of one dim. Their
            parameters are gathered in the dtype in which they are stored, whoever else has them.
    """

    def __init__(
        self, model: nn.Module, whole: Collection[nn.Parameter], request: PrepareRequest, dtype: torch.dtype | None
    ) -> None:
        self._dtype, self._reduce = dtypes_asked_for(request, dtype)
        self._keeps = dtype is None and self._dtype is not None
        self._whole = {id(parameter) for parameter in whole}
        self.as_stored = {each for each in model.modules() if self._keeps and self._is_left_alone(each)}

    def __str__(self) -> str:
        if self._dtype is None:
            return ""
        name = str(self._dtype).removeprefix("torch.")
        return f"{name}, norms and embeddings in their own dtype" if self._keeps else name

    def policy(self, unit: Unit) -> Any:
        """The dtypes of a unit. Inputs and outputs are cast by the calls of the root alone."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        reduce = self._reduce
        if reduce is None and self._dtype is not None:  # torch's own choice would be the dtype of gathering
            members = unit if isinstance(unit, list) else [unit]
            stored = [each for member in members for each in _uncut(member) if id(each) not in self._whole]
            # Frozen weights may come first, in a narrow dtype or as integers; what is trained has one dtype.
            trained = max(stored, key=lambda each: (each.requires_grad, each.is_floating_point()), default=None)
            reduce = None if trained is None else trained.dtype
        return MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=reduce, cast_forward_inputs=False)

    def _is_left_alone(self, module: nn.Module) -> bool:
        own = [each for each in module.parameters(recurse=False) if id(each) not in self._whole]
        is_leaf = len(own) > 0 and len(list(module.parameters())) == len(list(module.parameters(recurse=False)))
        return is_leaf and (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or all(each.dim() < 2 for each in own))


def dtypes_asked_for(
    request: PrepareRequest, dtype: torch.dtype | None
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """In which dtypes parameters are to be gathered and gradients to travel; None: in their own.

    Args:
        request: the dtypes of the precision, and whether autocast is on.
        dtype: the one in which all parameters are gathered; None: the policy decides.
    """
    compute = request.policy.compute if request.autocast.enabled else None
    return compute if dtype is None else dtype, request.policy.reduce or request.policy.param


def _uncut(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module that are in none of the units inside it, which are cut before it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if engine_state(child) is None:
            yield from _uncut(child)


def is_lookup(unit: Unit) -> bool:
    """Whether a unit reads rows of a table, whose gradient needs no table."""
    if not isinstance(unit, nn.Embedding) or "weight" not in unit._parameters:  # but computed from others
        return False
    return type(unit).forward is nn.Embedding.forward and "forward" not in vars(unit)

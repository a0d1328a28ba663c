"""In which dtypes the parameters of a unit are gathered, and in which their gradients travel.

Where matrix products are computed in a narrow dtype, autocast casts their weights, and autograd
keeps what was cast until the backward: the whole model, on every rank. Weights that are gathered in
that dtype need no cast, go when their unit has computed, and are half of the communication. Norms
and embeddings, which autocast leaves alone, are gathered in their own dtype. So every number is the
one that one process computes, but for what a module computes by itself with weights of two and more
dims, and with parameters that it has beside its children: outside of autocast, these are rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

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
        as_stored: the modules whose parameters are gathered in the dtype in which they are stored.
    """

    def __init__(
        self, model: nn.Module, whole: Collection[nn.Parameter], request: PrepareRequest, dtype: torch.dtype | None
    ) -> None:
        self._policy = request.policy
        compute = request.policy.compute if request.autocast.enabled else None
        self._dtype = compute if dtype is None else dtype
        self._keeps = dtype is None and compute is not None
        self._whole = {id(parameter) for parameter in whole}
        self.as_stored = set(self._left_alone(model)) if self._keeps else set()

    def __str__(self) -> str:
        if self._dtype is None:
            return ""
        name = str(self._dtype).removeprefix("torch.")
        return f"{name}, norms and embeddings in their own dtype" if self._keeps else name

    def policy(self, unit: Unit) -> Any:
        """The dtypes of a unit. Inputs and outputs are cast by the calls of the root alone."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        reduce = self._policy.reduce or self._policy.param
        if reduce is None and self._dtype is not None:  # torch's own choice would be the dtype of gathering
            members = unit if isinstance(unit, list) else [unit]
            stored = (each for member in members for each in member.parameters() if id(each) not in self._whole)
            reduce = next((each.dtype for each in stored), None)
        return MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=reduce, cast_forward_inputs=False)

    def _left_alone(self, model: nn.Module) -> Iterator[nn.Module]:
        """Modules whose parameters autocast leaves alone: embeddings, and those of one dim."""
        owners: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(module)
        alone = {id(module) for module in model.modules() if self._is_left_alone(module)}
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if id(module) in alone and all(id(other) in alone for each in own for other in owners[id(each)]):
                yield module

    def _is_left_alone(self, module: nn.Module) -> bool:
        own = [each for each in module.parameters(recurse=False) if id(each) not in self._whole]
        is_leaf = len(own) > 0 and len(list(module.parameters())) == len(list(module.parameters(recurse=False)))
        return is_leaf and (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or all(each.dim() < 2 for each in own))


def is_lookup(unit: Unit) -> bool:
    """Whether a unit reads rows of a table, whose gradient needs no table."""
    plain = isinstance(unit, nn.Embedding) and type(unit).forward is nn.Embedding.forward
    return plain and "forward" not in vars(unit)

"""Parameters that are not sharded (0-d, or ignored): their gradients are averaged too.

At the end of each backward that synchronises, all of them, whichever took part on this rank: the
ranks then agree on what travels, and what was accumulated without travelling does not stay behind
where the closing micro-batch uses other parameters. Not earlier: a rank that does not use one of
them would send later than the others, and collectives of two communicators would run in unlike order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core.api.component import flatten
from accel_fsdp.engine_internals import current_backward

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_fsdp.gradient_sync import Synchronisation


class WholeParameters:
    """Those of one model.

    Args:
        parameters: plain tensors, equal on all ranks, in one order; frozen ones may be trained
            later.
        mesh: over which the other parameters are cut and replicated.
        dtype: in which gradients travel; None: their own.

    Attributes:
        changed: those whose gradients have changed since they were averaged last.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self._parameters = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        self._groups = [mesh.get_group(number) for number in range(mesh.ndim) if mesh.size(number) > 1]
        self._ranks, self._dtype = mesh.size(), dtype
        self._awaited = -1  # the backward at whose end they are averaged
        self.changed: deque[nn.Parameter] = deque(maxlen=2 * len(self._parameters))
        for parameter in self._parameters if self._groups else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.changed.append)

    def follow(self, output: Any, synchronisation: Synchronisation) -> None:
        """Has the backward of a model's outputs average the gradients, if it synchronises."""
        if not (self._groups and self._parameters):
            return

        def begins(_: torch.Tensor) -> None:
            backward = current_backward()
            if self._awaited != backward and synchronisation.travels:
                self._awaited = backward
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._average)

        for leaf in flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(begins)

    def local(self) -> set[int]:
        """The `id` of each whose gradient differs from rank to rank."""
        return {id(each) for each in self.changed if each.grad is not None and bool(each.grad.any())}

    @torch.no_grad()
    def _average(self) -> None:
        """Puts the mean of all that was accumulated into the gradients. At the end of a backward."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            self._average_together(parameters)
        self.changed.clear()

    def _average_together(self, parameters: list[nn.Parameter]) -> None:
        """Those of one dtype, in one flat tensor."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        narrow = self._dtype is not None and flat.is_floating_point()
        sent = (flat.to(self._dtype) if narrow else flat).div_(self._ranks)
        for group in self._groups:
            dist.all_reduce(torch.view_as_real(sent) if sent.is_complex() else sent, group=group)
        for gradient, mean in zip(gradients, sent.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view(gradient.shape))

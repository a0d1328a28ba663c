"""Parameters that are not sharded (0-d, or ignored): their gradients are averaged too.

Once in each backward that synchronises, all of them, whichever took part on this rank: the ranks
then agree on what travels, and what was accumulated without travelling does not stay behind where
the closing micro-batch uses other parameters. Large ones travel, in groups of their own, as soon as
the last of them has its gradient, while the backward goes on; others at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core import World
from accel_core.api.component import flatten
from accel_fsdp.engine_internals import current_backward

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_fsdp.gradient_sync import Synchronisation


EARLY = 2**20
"""The bytes of parameters from which on it is worth a process group to send gradients early."""


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
        self._running = False  # it
        self._left: set[int] = set()  # which have no gradient in it yet
        self._again = False  # whether one has got more than one
        self._is_early = False  # whether each had exactly one in the last
        self._sent: list[tuple[list[torch.Tensor], torch.Tensor, dist.Work | None]] = []
        self.changed: deque[nn.Parameter] = deque(maxlen=2 * len(self._parameters))
        self._is_large = sum(each.nbytes for each in self._parameters) >= EARLY
        if self._is_large:  # the ranks need not send them between the same two messages of other groups
            world = World.current()
            self._groups = [world.group_beside(group, "whole parameters") for group in self._groups]
        for parameter in self._parameters if self._groups else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrived)

    def follow(self, output: Any, synchronisation: Synchronisation) -> None:
        """Has the backward of a model's outputs average the gradients, if it synchronises."""
        if not (self._groups and self._parameters):
            return
        if current_backward() == -1:  # the last one may not have come to its end
            self._running = False
            self._sent.clear()

        def begins(_: torch.Tensor) -> None:
            backward = current_backward()
            if self._awaited != backward and synchronisation.travels:
                self._awaited, self._running, self._again = backward, True, False
                self._left = {id(each) for each in self._parameters if each.requires_grad}
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._average)

        for leaf in flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(begins)

    def local(self) -> set[int]:
        """The `id` of each whose gradient differs from rank to rank."""
        return {id(each) for each in self.changed if each.grad is not None and bool(each.grad.any())}

    def _arrived(self, parameter: nn.Parameter) -> None:
        self.changed.append(parameter)
        if not (self._running and self._is_large):
            return
        if self._sent:
            raise RuntimeError(
                f"A parameter of shape {tuple(parameter.shape)} that FSDP keeps whole got a second gradient in one backward, after all had "
                f"been sent to the other ranks, and in the backward before it had one. Use it equally often in every step."
            )
        self._again |= id(parameter) not in self._left
        self._left.discard(id(parameter))
        if self._is_early and not self._left:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            self._send_together(parameters)

    def _send_together(self, parameters: list[nn.Parameter]) -> None:
        """Begins to reduce one flat tensor: the mean of all that was accumulated."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        narrow = self._dtype is not None and flat.is_floating_point()
        sent = (flat.to(self._dtype) if narrow else flat).div_(self._ranks)
        travels = torch.view_as_real(sent) if sent.is_complex() else sent
        self._sent.append((gradients, sent, dist.all_reduce(travels, group=self._groups[0], async_op=True)))

    @torch.no_grad()
    def _average(self) -> None:
        """Puts the means into the places of the gradients. At the end of a backward."""
        self._running = False
        self._is_early = not (self._again or self._left)
        if not self._sent:
            self._send()
        self.changed.clear()
        for gradients, sent, work in self._sent:
            if work is not None:
                work.wait()
            for group in self._groups[1:]:
                dist.all_reduce(torch.view_as_real(sent) if sent.is_complex() else sent, group=group)
            for gradient, mean in zip(gradients, sent.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(mean.view(gradient.shape))
        self._sent.clear()

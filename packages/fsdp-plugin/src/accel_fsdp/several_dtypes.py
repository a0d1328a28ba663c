"""Two dtypes in one message of torch's engine of FSDP, for versions of torch that cannot send them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core.api.component import reduce_scatter_single
from accel_fsdp.torch_versions import held_gradient, is_gathered_once

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed import ProcessGroup


class SeveralDtypes:
    """A unit's parameters are gathered in two dtypes, or its gradients have two, in one message.

    Before 2.15, torch gathers tensors of several dtypes as bytes, and refuses gradients of several. Those of the
    kept parameters are put into the message, which has the dtype of the reduction, when the others
    are there. In a window, what was held back has another dtype than what takes part for the first
    time in the last backward, which then gets it too.

    Args:
        group: the engine's group of the unit's parameters.
        kept: those that are gathered as they are stored, while the others are cast.
    """

    def __init__(self, group: Any, kept: Sequence[Any]) -> None:
        self._group, self._kept = group, kept
        self._init_dtypes, self._post_backward = group._init_mp_dtypes, group.post_backward
        self._finalize = group.finalize_backward
        self._places: list[tuple[int, int, torch.Tensor]] = []
        self._sent: list[torch.Tensor] = []
        self._message: torch.Tensor | None = None
        group._init_mp_dtypes, group.post_backward = self.init_dtypes, self.post_backward
        group.finalize_backward = self.finalize_backward
        group._reduce_scatter_comm = self

    def init_dtypes(self) -> None:
        """Leaves the kept parameters in their dtype."""
        self._init_dtypes()
        for cut in self._kept:
            cut.param_dtype = None

    def post_backward(self, *unused: Any) -> None:
        """Gives all gradients that travel one dtype, and notes which are to be put in exactly."""
        group, self._message, self._places = self._group, None, []
        if group.reduce_grads:
            for cut in group.fsdp_params:
                cut.accumulate_unsharded_grad_if_needed()
            travel = [cut for cut in group.fsdp_params if is_gathered_once(cut) and self._travels(cut)]
            is_held = any(cut.unsharded_accumulated_grad is not None for cut in travel)
            dtype = group._reduce_dtype if is_held else group.mp_policy.param_dtype
            offset = 0
            for cut in travel:
                gradient, size = held_gradient(cut), cut.padded_sharded_param_size.numel()
                if gradient is None:
                    gradient = torch.zeros_like(cut._unsharded_param)
                if gradient.dtype != dtype:
                    cut._unsharded_param.grad = None
                    if is_held:
                        cut.unsharded_accumulated_grad = gradient.to(dtype)
                    else:
                        cut.unsharded_accumulated_grad = torch.empty_like(cut._unsharded_param, dtype=dtype)
                        self._places.append((offset, size, cut._get_grad_inner_tensor(gradient)))
                offset += size
            self._sent += [gradient for _, _, gradient in self._places]  # another stream reads them
        self._post_backward(*unused)

    def finalize_backward(self) -> None:
        """Lets go of what was put in: nothing reads it any more."""
        self._finalize()
        self._sent.clear()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The message of gradients; and then, when it is filled, what comes back."""
        if self._message is None:
            self._message = torch.empty(*size, dtype=dtype, device=device)
            return self._message
        ranks = self._message.numel() // math.prod(size)
        message, self._message = self._message.view(ranks, -1), None
        for offset, width, gradient in self._places:
            flat = gradient.reshape(-1)
            padded = torch.nn.functional.pad(flat, (0, ranks * width - flat.numel()))
            message[:, offset : offset + width].copy_(padded.view(ranks, width))
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces, as torch does."""
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)

    def _travels(self, cut: Any) -> bool:
        unused = self._group.reduce_scatter_unused_params and cut._unsharded_param.requires_grad
        return unused or held_gradient(cut) is not None

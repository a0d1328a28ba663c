"""The norm of gradients of which ranks have parts, without counting copies, and scaling by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from accel_megatron.model_engine import ModelEngine

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


@torch.no_grad()
def joint_norm(
    engines: Sequence[ModelEngine], parameters: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """The norm over all parts of the gradients of `parameters`, 0-d, float32. A collective.

    Of copies, which Megatron marks (tensor-parallel duplicates, the embedding of the last stage),
    one counts. Raises `ValueError` for a `norm_type` that is not positive.
    """
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_(norm_type={norm_type}) was asked for under Megatron, which sums powers over the ranks: expected a positive "
            f"number, or math.inf for the largest element. Leave norm_type out for the Euclidean norm."
        )
    own = {id(each): each for each in parameters}
    dense: list[torch.Tensor] = []
    expert: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for key, parameter in own.items():
        engine = next((each for each in engines if key in each.parts), None)
        if engine is None:
            others += [parameter.grad] if parameter.grad is not None else []
        elif engine.has_gradients and _counts(parameter):
            part = engine.gradient(parameter) if engine.is_final else parameter.main_grad  # type: ignore[attr-defined]
            (dense if getattr(parameter, "allreduce", True) else expert).append(part)
    is_shared_out = any(engine.options.distributed_optimizer for engine in engines)
    total = _sum(_power(dense, norm_type, device), norm_type, _group(False, is_shared_out))
    with_experts = _sum(_power(expert, norm_type, device), norm_type, _group(True, is_shared_out))
    powers = torch.stack([total, with_experts, _power(others, norm_type, device)])
    return (powers.max() if math.isinf(norm_type) else powers.sum() ** (1.0 / norm_type)).float()


def factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """By what gradients of a norm are to be multiplied, so that it is at most `max_norm`; 0-d."""
    return 1.0 / torch.clamp((norm + _EPSILON) / max_norm, min=1.0)


def _counts(parameter: Any) -> bool:
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))


def _group(experts: bool, is_shared_out: bool) -> Any:
    """The ranks that have different parts; None: all."""
    from megatron.core import parallel_state

    if is_shared_out:
        return None
    if experts:
        return parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return parallel_state.get_model_parallel_group()


def _sum(power: torch.Tensor, norm_type: float, group: Any) -> torch.Tensor:
    dist.all_reduce(power, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return power


def _power(gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    kept = [each for each in gradients if each.numel()]
    if not kept:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(kept, norm_type)).double()
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()

"""Strategy "deepspeed" in stages 1 to 3, with DeepSpeed's own sizes of buffers, one group, no offload.

Gradients are copied into a bucket of 500 million elements. On accelerators it is there as a whole;
on CPUs the system gives the part that was written. What is in the bucket is copied once more when
it is reduced. Masters are in fp32, also beside parameters in fp32: in stage 3 only on CPUs, for
there DeepSpeed takes "cpu" and "cpu:0" for two devices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from accel_big_model.estimate.strategies import activations_and_gradients

if TYPE_CHECKING:
    from accel_big_model.estimate.result import StrategyEstimate
    from accel_big_model.estimate.strategies import Facts

BUCKET, AHEAD, LIVE = 500_000_000, 50_000_000, 1_000_000_000
"""DeepSpeed's reduce_bucket_size, stage3_prefetch_bucket_size, stage3_max_live_parameters, in elements."""

FP32 = torch.float32.itemsize


def zero(facts: Facts, stage: int) -> StrategyEstimate:
    """The estimate of a stage."""
    return _sharded(facts) if stage == 3 else _partitioned(facts, stage)


def _bucket(facts: Facts) -> tuple[int, int]:
    """Bytes of the bucket that are there, and of gradients that are reduced at a time."""
    size, gradients = BUCKET * facts.dtype.itemsize, facts.gradients
    return size if facts.accelerator else min(size, gradients), min(size, gradients)


def _part(facts: Facts) -> int:
    """Elements of a rank's part of the trained parameters."""
    return math.ceil(facts.shape.trained_numel / facts.ranks)


def _partitioned(facts: Facts, stage: int) -> StrategyEstimate:
    part, cost = _part(facts), facts.flat_cost()
    weights = facts.weights + part * FP32
    kept = weights + cost.state
    bucket, reduced = _bucket(facts)
    gradients = part * facts.dtype.itemsize
    if facts.gradients > reduced:  # a bucket is reduced while the backward goes on
        backward = bucket + reduced + gradients + facts.timeline.peak
    elif facts.accelerator:
        backward = bucket + max(facts.timeline.peak, reduced)
    else:  # the bucket grows with the gradients
        backward = max([2 * reduced, *activations_and_gradients(facts, facts.timeline)])
    return facts.row(
        f"zero{stage}",
        weights=weights,
        gradients=max(gradients, part * FP32),
        optimizer=cost.state,
        communication=bucket + reduced,
        timeline=facts.timeline,
        moments={
            "forward": kept + facts.timeline.forward,
            "backward": kept + backward,
            "step": kept + part * FP32 + cost.temporary,
        },
    )


def _sharded(facts: Facts) -> StrategyEstimate:
    part, cost = _part(facts), facts.flat_cost()
    size = facts.dtype.itemsize
    masters = part * FP32 if size < FP32 or not facts.accelerator else 0
    weights = math.ceil(facts.shape.numel / facts.ranks) * size + facts.shape.buffers + masters
    bucket, reduced = _bucket(facts)
    kept = weights + part * size + cost.state + bucket
    gathered = min(facts.shape.numel, LIVE) * size
    ahead = min(facts.shape.numel, AHEAD) * size
    return facts.row(
        "zero3",
        weights=weights,
        gradients=part * size + part * FP32,  # what was reduced, and the copy that is stepped by
        optimizer=cost.state,
        communication=bucket + gathered + max(ahead, reduced),
        timeline=facts.timeline,
        moments={
            # What is gathered at a time goes before activations are at their most.
            "forward": kept + gathered + max(ahead, facts.timeline.forward),
            "backward": kept + gathered + max(reduced, facts.timeline.peak),
            "step": kept + part * FP32 + cost.temporary,
        },
    )

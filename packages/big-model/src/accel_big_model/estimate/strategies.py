"""Strategies by name, and those in which every rank has the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from accel_big_model.estimate.optimizers import OptimizerCost, OptimizerMaker, Shape, cost_of
from accel_big_model.estimate.result import StrategyEstimate
from accel_big_model.estimate.shapes import ModelShape, bytes_of

if TYPE_CHECKING:
    from accel_big_model.estimate.activations import Timeline
    from accel_big_model.estimate.precisions import Precision

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "tensor")

FORMULAS: Mapping[str, str] = MappingProxyType(
    {
        "single": "backward = weights + optimizer + max(activations + gradients so far); step = weights + optimizer + gradients + "
        "what the optimizer needs",
        "ddp": "as single, but for gradients: they lie in buckets, which are there from the beginning to the end",
        "fsdp": "kept = (weights + optimizer) / ranks. forward: + root + 3 × the largest unit + activations. backward: + root + unit + "
        "the unit gathered ahead + its whole gradients + the last unit's gradients in what is reduced (on CPUs also gloo's copy of that) + "
        "sharded gradients so far + activations. step: + gradients / ranks + what the optimizer needs. Units are the repeated blocks, the root is the rest",
        "zero1": "kept = whole weights + (fp32 masters + optimizer) / ranks. backward: + max(activations + gradients so far, gradients in "
        "the bucket + their flat copy). step: + gradients and what the optimizer needs for one flat part of parameters / ranks",
        "zero2": "as zero1: a bucket of DeepSpeed's size (500 million elements) holds all gradients of a smaller model. A larger one "
        "has a bucket, its copy, and gradients / ranks",
        "zero3": "kept = (weights + fp32 masters + gradients + optimizer) / ranks + the bucket. forward: + gathered weights (at most a "
        "billion elements) + max(what is gathered at a time (50 million), activations). backward: + gathered weights + max(activations, the "
        "bucket's copy). step: + gradients and what the optimizer needs for one flat part of parameters / ranks",
        "tensor": "layers are divided by the tensor-parallel ranks as parallelize_plan says, and the rest is fsdp over the other "
        "ranks. Without a plan all matrices are, and activations count "
        "whole, which is an upper bound: 6 % above what an MLP took on four ranks, and 15 % above a Llama",
    }
)
"""How each strategy's row is made, in words."""


@dataclass(frozen=True)
class Facts:
    """What strategies calculate from.

    Args:
        shape: the parameters.
        precision: the dtypes; parameters are trained in them.
        timeline: of a rank that has all weights.
        gathered: of a rank under "fsdp", which gathers weights in the compute dtype.
        optimizer: its name, class or maker.
        ranks: all processes.
        tensor: how many of them share a layer under "tensor".
        accelerator: whether buffers count with their whole size, and optimizers step all at once.
    """

    shape: ModelShape
    precision: Precision
    timeline: Timeline
    gathered: Timeline
    optimizer: str | OptimizerMaker
    ranks: int
    tensor: int
    accelerator: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters."""
        assert self.precision.param is not None, "others are not trained"
        return self.precision.param

    @property
    def weights(self) -> int:
        """Bytes of all parameters and buffers."""
        return bytes_of(self.shape.parameters, self.dtype) + self.shape.buffers

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return bytes_of(self.shape.trained, self.dtype)

    def cost(self, shapes: Sequence[Shape], dtype: torch.dtype) -> OptimizerCost:
        """The bytes of the optimizer for what a rank steps."""
        return cost_of(self.optimizer, shapes, dtype, self.accelerator)

    def row(
        self,
        strategy: str,
        *,
        weights: int,
        gradients: int,
        optimizer: int,
        communication: int,
        timeline: Timeline,
        moments: Mapping[str, int],
    ) -> StrategyEstimate:
        """The row of a strategy; `timeline`: of the activations."""
        ranks = 1 if strategy == "single" else self.ranks
        activations = timeline.peak if timeline.known else None
        parts = (weights, gradients, optimizer, communication, activations)
        return StrategyEstimate(strategy, self.precision.name, ranks, *parts, moments)

    def flat_cost(self) -> OptimizerCost:
        """The cost for a rank's part of fp32 masters, laid end to end."""
        return self.cost([(math.ceil(self.shape.trained_numel / self.ranks),)], torch.float32)


def activations_and_gradients(facts: Facts, timeline: Timeline) -> Iterator[int]:
    """For each part of a backward, the bytes of activations and whole gradients at most."""
    sizes = {each.name: each.numel * facts.dtype.itemsize for each in facts.shape.trained}
    complete = 0
    for segment in timeline.backward:
        yield segment.peak + complete
        complete += sizes.get(segment.parameter, 0)


def replicated(facts: Facts, strategy: str) -> StrategyEstimate:
    """Every rank has everything: "single" and "ddp"."""
    cost = facts.cost([each.shape for each in facts.shape.trained], facts.dtype)
    kept = facts.weights + cost.state
    if strategy == "ddp":  # whose gradients are views of its buckets
        kept += facts.gradients
        backward, gradients = max((each.peak for each in facts.timeline.backward), default=0), 0
    else:
        backward, gradients = max(activations_and_gradients(facts, facts.timeline), default=0), facts.gradients
    return facts.row(
        strategy,
        weights=facts.weights,
        gradients=facts.gradients,
        optimizer=cost.state,
        communication=0,
        timeline=facts.timeline,
        moments={
            "forward": kept + facts.timeline.forward,
            "backward": kept + backward,
            "step": kept + gradients + cost.temporary,
        },
    )

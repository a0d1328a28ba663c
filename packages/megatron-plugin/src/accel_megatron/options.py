"""The options of the strategy that concern each model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """See `Megatron`."""

    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "Megatron(overlap_param_gather=True) gathers what the distributed optimizer has stepped while the next forward computes: it "
                "needs distributed_optimizer=True and overlap_grad_reduce=True. Give these too, or leave it out."
            )

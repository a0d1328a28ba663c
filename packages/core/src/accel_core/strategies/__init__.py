"""The strategies of the core: one process, and distributed data parallelism."""

from accel_core.contract.strategy import Strategy
from accel_core.strategies.ddp import DDP, DistributedDataParallelKwargs
from accel_core.strategies.placement import check_alike, place_model
from accel_core.strategies.single import Single

__all__ = ["DDP", "DistributedDataParallelKwargs", "Single", "Strategy", "check_alike", "place_model"]

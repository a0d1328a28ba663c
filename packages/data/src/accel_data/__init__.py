"""Sharded loading for accel-core: every rank reads its own part, and evaluation counts every sample once."""

from accel_data.batches import BatchSamplerShard
from accel_data.loader import LoaderDescription, ShardedLoader
from accel_data.sharded import Sharded

__all__ = ["BatchSamplerShard", "LoaderDescription", "Sharded", "ShardedLoader"]

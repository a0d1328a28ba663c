"""Loaders as scripts ask about them: accel-data's, with further attributes and keywords."""

from accel_compat.loaders.component import Loaders
from accel_compat.loaders.prepared import (
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
)
from accel_compat.loaders.preparing import prepare_data_loader, skip_first_batches

__all__ = [
    "DataLoaderDispatcher", "DataLoaderShard", "DataLoaderStateMixin", "Loaders", "SkipBatchSampler", "SkipDataLoader",
    "get_sampler", "prepare_data_loader", "skip_first_batches",
]  # fmt: skip

"""Loaders, and what shares data out."""

from accel_compat.loaders import (
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accel_compat.missing_names import refuse_from
from accel_data import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler

__getattr__ = refuse_from(__name__)

__all__ = [
    "BatchSamplerShard", "DataLoaderDispatcher", "DataLoaderShard", "DataLoaderStateMixin", "IterableDatasetShard",
    "SeedableRandomSampler", "SkipBatchSampler", "SkipDataLoader", "get_sampler", "prepare_data_loader",
    "skip_first_batches",
]  # fmt: skip

"""Loading for accel-core: every loader, one position, exact evaluation on any number of ranks."""

from accel_data.batches import BatchSamplerShard
from accel_data.configuration import DataLoaderConfiguration
from accel_data.description import LoaderDescription
from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.iterable import IterableDatasetShard
from accel_data.loader import DataLoaderShard
from accel_data.preparing import prepare_data_loader
from accel_data.rows import slice_tensors
from accel_data.seedable import SeedableRandomSampler
from accel_data.sharded import Sharded
from accel_data.skipping import skip_first_batches

__all__ = [
    "BatchSamplerShard",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "LoaderDescription",
    "SeedableRandomSampler",
    "Sharded",
    "prepare_data_loader",
    "skip_first_batches",
    "slice_tensors",
]

"""Loading for accel-core: every loader, one position, exact evaluation on any number of ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_data.batch_rows import slice_tensors
    from accel_data.batches import BatchSamplerShard
    from accel_data.configuration import DataLoaderConfiguration
    from accel_data.dispatcher import DataLoaderDispatcher
    from accel_data.iterable import IterableDatasetShard
    from accel_data.loader import DataLoaderShard
    from accel_data.positioned_loader import LoaderDescription
    from accel_data.preparing import prepare_data_loader, skip_first_batches
    from accel_data.seedable import SeedableRandomSampler
    from accel_data.sharded import Sharded

__all__ = [
    "BatchSamplerShard", "DataLoaderConfiguration", "DataLoaderDispatcher", "DataLoaderShard", "IterableDatasetShard",
    "LoaderDescription", "SeedableRandomSampler", "Sharded", "prepare_data_loader", "skip_first_batches", "slice_tensors",
]  # fmt: skip

# The component `sharded` is imported with every Accelerator, and all that loaders need takes some 14 ms more: names are looked up
# when they are used.
_MODULES = {
    "BatchSamplerShard": "batches",
    "DataLoaderConfiguration": "configuration",
    "DataLoaderDispatcher": "dispatcher",
    "DataLoaderShard": "loader",
    "IterableDatasetShard": "iterable",
    "LoaderDescription": "positioned_loader",
    "SeedableRandomSampler": "seedable",
    "Sharded": "sharded",
    "prepare_data_loader": "preparing",
    "skip_first_batches": "preparing",
    "slice_tensors": "batch_rows",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

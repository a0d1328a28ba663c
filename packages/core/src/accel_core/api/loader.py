"""Names for loaders beside `accel_core.Feed`, `Rows`, `Shard`: copies that read another source."""

from accel_core.contract.loader_progress import Positions
from accel_core.loading.index_source import (
    IndexRead,
    IndexSource,
    SourceIteration,
    SourceProgress,
    as_data_loader,
    length_of,
    looked_ahead,
    source_after,
)
from accel_core.loading.prepared_loader import (
    CountingIterator,
    Outlet,
    PreparedLoader,
    index_sampler,
    overridden_copy,
    prepare_copy,
    prepare_local_loader,
    source_attributes,
    unmatched_message,
)

__all__ = [
    "CountingIterator", "IndexRead", "IndexSource", "Outlet", "Positions", "PreparedLoader", "SourceIteration",
    "SourceProgress", "as_data_loader", "index_sampler", "length_of", "looked_ahead", "overridden_copy",
    "prepare_copy", "prepare_local_loader", "source_after", "source_attributes", "unmatched_message",
]  # fmt: skip

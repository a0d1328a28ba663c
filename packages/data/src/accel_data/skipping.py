"""Leaving out the first batches of a loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from accel_core.api.loader import PreparedLoader, overridden_copy
from accel_data.loader import DataLoaderShard, reading_part
from accel_data.request import Request


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader that leaves out the first batches of each iteration, unread where they have indices.

    Of a prepared loader it is a copy that shares its epochs: loop over it for the rest of an epoch,
    and over the loader itself from then on. Batches of this rank are counted from the beginning of
    the epoch, also behind `load_state_dict`: as many as were done lead where the loader goes on by
    itself, and the loaded position is used up. 0 leaves out nothing, so the loaded position holds.
    Of any other loader, the result reads all of it in this process, in an order that is a function
    of seed and epoch; that is a collective in a world larger than one, which agrees on the seed.

    Raises:
        TypeError: if it is no `DataLoader`.
        ValueError: if the number is negative, or no whole number. When iterated: if a dataset that
            keeps a position of its own would have to go back from the one that was loaded.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader.behind(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"skip_first_batches() was given a {type(dataloader).__name__}, expected a torch.utils.data.DataLoader. Of other "
            f"iterables, itertools.islice(batches, {num_batches!r}, None) leaves out the first."
        )
    twin = overridden_copy(dataloader, DataLoaderShard, **reading_part(dataloader, Request.alone(None, None)))
    assert isinstance(twin, DataLoaderShard)
    return twin.behind(num_batches)

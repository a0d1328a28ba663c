"""Loaders that one rank reads for all, as an Accelerator prepares them, and what they read."""

from __future__ import annotations

import itertools

from torch.utils.data import IterableDataset

from accel_core import Shard, World
from accel_data import Sharded


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Measured(Stream):
    def __len__(self):
        return self.n


class StatefulStream(Stream):
    """Begins where it stands."""

    def __init__(self, n):
        super().__init__(n)
        self.at = 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Sizes:
    """A batch sampler of the user's own."""

    def __init__(self, *sizes, **attributes):
        self.sizes = sizes
        self.__dict__.update(attributes)

    def __iter__(self):
        indices = itertools.count()
        return (list(itertools.islice(indices, size)) for size in self.sizes)

    def __len__(self):
        return len(self.sizes)


class Opaque:
    """Cannot be cut into rows, but be sent."""

    def __init__(self, ids):
        self.ids = ids

    def to(self, device):
        raise AssertionError(device)


class Items(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def dispatched(loader, feed, *, group=None, slice_fn=None, seed=0, **options):
    """As an Accelerator prepares it."""
    world = World.current(cpu=True)
    channel = world.channel(group)
    shard = Shard(channel.rank, channel.size)
    component = Sharded(dispatch_batches=True, **options)
    return component.prepare_loader(loader, shard, feed, None, seed, 0, group, slice_fn)


def real(batch, feed):
    """The ids in a batch, without padding."""
    rows = feed.current_rows()
    ids = batch.tolist()
    return ids if rows is None else ids[: rows.real]


def taken(loader, feed, steps=None):
    return [real(batch, feed) for batch in itertools.islice(loader, steps)]


def in_order(ranks):
    """The samples of an epoch, rank after rank within each step."""
    return [i for step in itertools.zip_longest(*ranks, fillvalue=()) for part in step for i in part]

"""Loaders that ranks share out by arithmetic, prepared in one process, and what they read."""

from __future__ import annotations

import itertools

from torch.utils.data import Dataset, IterableDataset, Sampler

from accel_core import Feed, Shard
from accel_data import Sharded


def prepare(loader, rank=0, ranks=1, *, feed=None, seed=0, device=None, **options):
    return Sharded(**options).prepare_loader(loader, Shard(rank, ranks), feed or Feed(), device, seed)


def ids(loader):
    return [batch.tolist() for batch in loader]


def flat(batches):
    return list(itertools.chain(*batches))


def global_order(make, ranks, *, epochs=1, seed=0, **options):
    """The real samples of each epoch, rank after rank within each step."""
    orders = [[] for _ in range(epochs)]
    feeds = [Feed() for _ in range(ranks)]
    loaders = [prepare(make(), r, ranks, feed=feeds[r], seed=seed, **options) for r in range(ranks)]
    for order in orders:
        for step in itertools.zip_longest(*loaders):
            for feed, batch in zip(feeds, step, strict=True):
                order += [] if batch is None else batch.tolist()[: feed.current_rows().real]
    return orders


class Evens(Sampler):
    """A sampler of the user's own, that takes no generator."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(0, 10, 2))


class Told(Dataset):
    """Remembers the epochs that it was told."""

    def __init__(self, count=6):
        self.count = count
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Triples:
    """A batch sampler without a length."""

    batch_size = 3

    def __init__(self, count=10):
        self.count = count
        self.asked = 0

    def __iter__(self):
        for start in range(0, self.count, 3):
            self.asked += 1
            yield list(range(start, min(start + 3, self.count)))

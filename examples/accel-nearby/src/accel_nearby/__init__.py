"""A loader in a distribution of its own: shuffles in blocks, so that samples which are read after each other lie together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel_core import Feed, Rows, hookimpl
from accel_core.api.component import derive_seed, loader_seed
from accel_core.api.loader import IndexRead, Outlet, PreparedLoader, SourceIteration, SourceProgress, prepare_copy

if TYPE_CHECKING:
    from accel_core import Shard

__all__ = ["Nearby", "NearbyLoader"]

Part = tuple[list[int], int]
"""A batch of indices, and how many of them are real: the others fill it up."""


class Nearby:
    """Each rank takes its turn at the batches of an order that is shuffled block by block.

    Args:
        block: how many neighbouring samples are shuffled among themselves, before the next block is read.

    Raises:
        ValueError: if that is not at least 1.
    """

    def __init__(self, block: int = 1024) -> None:
        if block < 1:
            raise ValueError(
                f"Nearby(block={block}) holds no samples: a block has at least 1. Type Nearby(block=1024)."
            )
        self._block = block

    @hookimpl
    def prepare_loader(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        feed: Feed,
        device: torch.device | None,
        seed: int,
        number: int,
    ) -> DataLoader[Any]:
        """A copy of the loader that reads one shard."""
        if not isinstance(loader, PreparedLoader):  # which `prepare_copy` refuses
            _refuse_unserved(loader)
        epochs = Epochs(loader, shard, loader_seed(seed, number), self._block)
        outlet, own = Outlet(feed, device), {"place": epochs.place, "generator": epochs.workers}
        return prepare_copy(loader, NearbyLoader, epochs, outlet, strict=True, **own)


class NearbyLoader(PreparedLoader):
    """A prepared loader that knows its position: the epoch, and the samples of it that all ranks have yielded."""

    dataset: Any
    place: Place

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`."""
        self.place.next, self.place.current = SourceProgress(epoch), None

    def state_dict(self) -> dict[str, int]:
        """Where this loader stands; the same on every rank. Not a collective."""
        position = self.place.position()
        return {"epoch": position.epoch, "samples": position.samples, "length": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration goes on where `state` was taken, on any number of ranks; the one after it is whole.

        Raises:
            ValueError: if it is the state of a loader over a dataset of another length.
        """
        if state["length"] != len(self.dataset):
            raise ValueError(
                f"load_state_dict() was given the state of a loader over {state['length']} samples, and this one reads "
                f"{len(self.dataset)}. Load it into a loader over the dataset with which it was saved."
            )
        self.place.next, self.place.current = SourceProgress(state["epoch"], state["samples"]), None


class Place:
    """Where a loader stands, and where copies of it stand that leave out batches."""

    def __init__(self) -> None:
        self.next = SourceProgress()
        self.current: SourceProgress | None = None

    def begin(self, progress: SourceProgress) -> None:
        """The first batch of an iteration is asked for: the one after it is the next epoch."""
        self.current, self.next = progress, SourceProgress(progress.epoch + 1)

    def position(self) -> SourceProgress:
        """Of the iteration that is under way, else of the next one."""
        return self.next if self.current is None or self.current.finished else self.current


class Epochs:
    """What one shard reads, epoch after epoch.

    Args:
        loader: the user's.
        shard: which turn at the batches is taken.
        seed: of the order.
        block: see `Nearby`.
    """

    def __init__(self, loader: Any, shard: Shard, seed: int, block: int) -> None:
        self.sampler = loader.batch_sampler
        self.size = len(loader.dataset)
        self.shuffled = type(self.sampler) is BatchSampler and isinstance(self.sampler.sampler, RandomSampler)
        self.shard, self.seed, self.block = shard, seed, block
        self.place = Place()
        self.workers = torch.Generator()  # of which torch takes the seeds of workers
        self.skipped = 0

    def open(self, feed: Feed) -> SourceIteration:
        """An iteration. It begins its epoch when the first batch is asked for."""
        if feed.even_batches is False:
            raise ValueError(
                "even_batches=False was asked for, and Nearby always gives the ranks equally many batches. Leave it out, or "
                "use another loader."
            )
        following = self.place.next
        self.workers.manual_seed(derive_seed(self.seed, following.epoch, self.shard.index))
        # Batches that are left out are counted from the beginning of the epoch.
        progress = SourceProgress(following.epoch, 0 if self.skipped else following.samples)
        return Iteration(self.place, self.reads(progress), progress)

    def reads(self, progress: SourceProgress) -> Iterator[IndexRead]:
        """The turns of this shard: indices, how many follow, which rows are real, and what all ranks have read by then."""
        rounds = self.rounds(progress)
        samples = progress.samples
        for number, parts in enumerate(rounds, 1):
            samples += sum(real for _, real in parts)
            if number <= self.skipped:
                continue
            indices, real = parts[self.shard.index]
            yield indices, len(rounds) - number, Rows(len(indices), real), samples

    def rounds(self, progress: SourceProgress) -> list[list[Part]]:
        """What is left of an epoch: in each round, one batch for each shard."""
        count = self.shard.count
        batches = list(self.left(progress))
        rounds = [batches[start : start + count] for start in range(0, len(batches), count)]
        if self.drops and rounds and len(rounds[-1]) < count:
            del rounds[-1]
        first = [index for batch in batches[:count] for index in batch]
        return [self.filled(batches, first) for batches in rounds]

    def left(self, progress: SourceProgress) -> Iterator[list[int]]:
        """The batches of an epoch that begin behind a position."""
        behind = progress.samples
        for batch in self.batches(progress.epoch):
            if behind < len(batch):
                yield batch[behind:]
            behind = max(0, behind - len(batch))

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """The batches of an epoch, in the order of one process."""
        if not self.shuffled:
            return map(list, self.sampler)
        return iter(BatchSampler(self.order(epoch), self.sampler.batch_size, self.drops))

    def order(self, epoch: int) -> list[int]:
        """Blocks in a random order, and so the samples of each."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order: list[int] = []
        for block in torch.randperm(-(-self.size // self.block), generator=generator).tolist():
            start = block * self.block
            rows = min(self.block, self.size - start)
            order += (start + torch.randperm(rows, generator=generator)).tolist()
        return order

    def filled(self, batches: Sequence[list[int]], first: Sequence[int]) -> list[Part]:
        """A round in which all shards have equally many rows, filled up from the `first` samples."""
        if self.shard.count == 1 or self.drops:
            return [(batch, len(batch)) for batch in batches]
        rows = getattr(self.sampler, "batch_size", None) or max(map(len, batches))
        spare = cycle(first)
        missing = [*batches, *[[]] * (self.shard.count - len(batches))]
        return [([*batch, *islice(spare, rows - len(batch))], len(batch)) for batch in missing]

    @property
    def drops(self) -> bool:
        """Whether an incomplete round is left out."""
        return bool(getattr(self.sampler, "drop_last", False))

    def __len__(self) -> int:
        batches, count = len(self.sampler), self.shard.count
        rounds = batches // count if self.drops else -(-batches // count)
        return int(max(0, rounds - self.skipped))


class Iteration(SourceIteration):
    """One iteration of `Epochs`. torch may open several, and begins one."""

    def __init__(self, place: Place, reads: Iterator[IndexRead], progress: SourceProgress) -> None:
        super().__init__(reads, progress)
        self.place = place

    def start(self) -> None:
        """Its first batch is asked for."""
        self.place.begin(self.progress)


def _refuse_unserved(loader: DataLoader[Any]) -> None:
    """Raises for what has no order by index, or one that would differ from rank to rank."""
    asked = "prepare() was given a loader"
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ValueError(
            f"{asked} without batches of indices, and Nearby divides those. Give it a dataset that has a length, and a batch_size."
        )
    if type(loader.batch_sampler) is BatchSampler and type(sampler) not in (SequentialSampler, RandomSampler):
        raise ValueError(
            f"{asked} with a {type(sampler).__name__}, whose order may differ from rank to rank. Use shuffle=True, or a batch "
            f"sampler that yields the same on every rank."
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.generator is not None):
        raise ValueError(
            f"{asked} that shuffles with replacement or with a generator of its own; Nearby's order comes from the seed of the "
            f"run. Use shuffle=True alone, and set_seed() before."
        )
    if isinstance(sampler, RandomSampler) and len(sampler) != len(loader.dataset):
        raise ValueError(
            f"{asked} whose RandomSampler draws {len(sampler)} samples, and Nearby shuffles all {len(loader.dataset)} of the "
            f"dataset. Leave num_samples out, or give the loader a torch.utils.data.Subset."
        )

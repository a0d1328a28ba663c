"""What a prepared loader reads, epoch by epoch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel_core.loading import Opening, Read, index_sampler, length_of, local_reads, looked_ahead
from accel_core.seeding import derive_seed
from accel_data.batches import BatchSamplerShard
from accel_data.order import DrawnOrder, Order, SequentialOrder, ShuffledOrder
from accel_data.streams import DrawnApart, draws_globally

if TYPE_CHECKING:
    from accel_core.layout import Shard


class Epochs:
    """Numbers the iterations of one loader. Each that is advanced at least once is an epoch."""

    def __init__(self) -> None:
        self.following = 0
        self._latest: weakref.ref[EpochOpening] | None = None

    def set(self, epoch: int) -> None:
        """The next iteration is `epoch`."""
        self.following = epoch
        self._latest = None

    def number(self) -> int:
        """The epoch of an iteration that is opened now.

        One that was opened before, and may still be advanced, has its own: `zip(loader, loader)` pairs two epochs.
        """
        latest = self._latest() if self._latest is not None else None
        return self.following if latest is None else max(self.following, latest.epoch + 1)

    def open(self, epoch: int, reads: Iterator[Read]) -> EpochOpening:
        """An iteration of that epoch."""
        opening = EpochOpening(epoch, reads, self)
        self._latest = weakref.ref(opening)
        return opening

    def __getstate__(self) -> dict[str, Any]:
        return {"following": self.following, "_latest": None}


class EpochOpening(Opening):
    """One iteration of a numbered epoch."""

    __slots__ = ("_epochs", "epoch")

    def __init__(self, epoch: int, reads: Iterator[Read], epochs: Epochs) -> None:
        super().__init__(reads)
        self.epoch = epoch
        self._epochs = epochs

    def start(self) -> None:
        """The epoch begins."""
        self._epochs.following = max(self._epochs.following, self.epoch + 1)


class EpochSource:
    """What one rank reads of a loader: the order is a function of seed and epoch, the part is arithmetic.

    Args:
        loader: the user's loader. Its samplers and its dataset are told the epoch, and otherwise not changed.
        shard: which part.
        seed: the seed of the run.
        split_batches: see `Sharded`.
        even_batches: see `Sharded`.
        worker_generator: from which torch is made to draw the base of its workers' seeds; None leaves torch's own.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        seed: int,
        *,
        split_batches: bool,
        even_batches: bool,
        worker_generator: torch.Generator | None = None,
    ) -> None:
        self.dataset = loader.dataset
        self.sampler = index_sampler(loader)
        self.batched = loader.batch_sampler is not None
        self.shard = shard
        self.seed = seed
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epochs = Epochs()
        self._torch_generator = loader.generator
        self._worker_generator = worker_generator

    def open(self, ahead: int) -> Opening:
        """Begins an iteration.

        Taking its first read is a collective if the user handed in a generator and the world is larger than one.
        """
        epoch = self.epochs.number()
        self.tell_epoch(epoch)
        if self._worker_generator is not None:
            self._worker_generator.manual_seed(derive_seed(self.seed, epoch, self.shard.index))
        return self.epochs.open(epoch, self._reads(derive_seed(self.seed, epoch), ahead))

    def tell_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the dataset, the batch sampler and the sampler, where they take it."""
        for target in (self.dataset, self.sampler, getattr(self.sampler, "sampler", None)):
            forward = getattr(target, "set_epoch", None)
            if forward is not None:
                forward(epoch)

    def batches(self, batch_sampler: Any = None) -> BatchSamplerShard:
        """The shard of the loader's batch sampler, or of a copy of it."""
        sampler = self.sampler if batch_sampler is None else batch_sampler
        count, index = self.shard.count, self.shard.index
        return BatchSamplerShard(sampler, count, index, self.split_batches, self.even_batches)

    def __len__(self) -> int:
        return len(self.batches()) if self.batched else len(self.sampler)

    def most_steps(self) -> int | None:
        """The batches of an epoch on the rank that has most of them, which is the first; None if that is not known."""
        if isinstance(self.dataset, IterableDataset):
            return None
        if not self.batched:
            return length_of(self.sampler)
        first = BatchSamplerShard(self.sampler, self.shard.count, 0, self.split_batches, self.even_batches)
        return length_of(first)

    def _reads(self, key: int, ahead: int) -> Iterator[Read]:
        if self._worker_generator is not None:
            # torch's draw is made all the same, so that the stream that it is made from goes on as it would.
            torch.empty((), dtype=torch.int64).random_(generator=self._torch_generator)
        for generator in _given_generators(self.sampler):
            _adopt_first_rank(generator)
        parts = self.batches().parts() if self.batched else None
        order = None if parts is None else _known_order(self.sampler.sampler, key)
        if parts is not None and order is not None:
            yield from parts.reads(order)
            return
        iterable = isinstance(self.dataset, IterableDataset)
        sampler = self.sampler if iterable else seeded(self.sampler, key)
        if iterable or not self.batched:
            yield from local_reads(sampler, ahead, batched=self.batched, endless=iterable)
            return
        if self.shard.count > 1 and draws_globally(sampler):
            sampler = DrawnApart(sampler, key)
        shard = self.batches(sampler)
        for (indices, rows), remaining in looked_ahead(shard.rows(), ahead, length_of(shard)):
            yield indices, remaining, rows


def _known_order(sampler: Any, key: int) -> Order | None:
    """The order of torch's own sequential and shuffling samplers, which are not asked; None for all others."""
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if type(sampler) is not RandomSampler or sampler.generator is not None:
        return None
    # torch's sampler draws its seed from the global stream when it is first asked; what is drawn later depends on that.
    torch.empty((), dtype=torch.int64).random_()
    kind = DrawnOrder if sampler.replacement else ShuffledOrder
    return kind(len(sampler.data_source), len(sampler), key)


def seeded(sampler: Any, seed: int) -> Any:
    """A copy of a sampler that draws from a generator with this seed; the sampler itself if it takes no generator.

    A batch sampler gets a copy of its sampler. Generators that the user handed in stay.
    """
    changes: dict[str, Any] = {}
    if getattr(sampler, "generator", sampler) is None:
        changes["generator"] = torch.Generator().manual_seed(seed)
    inner = getattr(sampler, "sampler", None)
    replaced = inner if inner is None else seeded(inner, seed)
    if replaced is not inner:
        changes["sampler"] = replaced
    if not changes:
        return sampler
    twin = copy.copy(sampler)
    for name, value in changes.items():
        setattr(twin, name, value)
    return twin


def _given_generators(sampler: Any) -> list[torch.Generator]:
    """The generators that the user handed to a batch sampler or its sampler."""
    found: list[torch.Generator] = []
    for holder in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def _adopt_first_rank(generator: torch.Generator) -> None:
    """Sets the generator to the state that it has on rank 0. A collective of the world, whatever the shards.

    Ranks that read the same part need the same order as well, so the number of shards does not tell whether to share.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    from accel_core.collectives import broadcast_object
    from accel_core.world import World

    generator.set_state(broadcast_object(generator.get_state(), World.current()))

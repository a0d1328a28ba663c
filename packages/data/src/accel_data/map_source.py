"""The source of a loader over a map-style dataset, epoch by epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_core import Rows, Shard
from accel_core.api.component import derive_seed, loader_seed
from accel_core.api.loader import IndexRead, index_sampler, length_of, looked_ahead
from accel_data.batches import BatchSamplerShard, Lone
from accel_data.generators import between_epochs, check_between, given_generators, restore_between, settle
from accel_data.loader_state import EpochOpening, EpochProgress, Epochs, Start, tell_epoch
from accel_data.order import DrawnOrder, Order, SequentialOrder, ShuffledOrder
from accel_data.seedable import SeedableRandomSampler
from accel_data.streams import drawn_apart, draws_globally

if TYPE_CHECKING:
    from accel_core import Feed
    from accel_data.generators import Synchronise
    from accel_data.loader_fingerprint import Identity


class EpochSource:
    """One rank's part of a loader: the order is a function of seed and epoch, the part arithmetic.

    Samplers and dataset are told the epoch, and otherwise not changed. `worker_generator`: from
    which torch draws the base of its workers' seeds; None leaves torch's own. `seedable`: a
    shuffling sampler has the order of `SeedableRandomSampler`.

    Attributes:
        skipped: batches of this rank that every iteration leaves out at its beginning; `restarts`:
            also where a position inside the epoch was loaded.
        synchronised: a generator made equal to that of rank 0, beside those of the samplers.
        first: the first index batches of the epoch of the latest iteration, at least `keeps_first`,
            if it left some out: a last step may be filled up from them. They may be in one piece.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        identity: Identity,
        *,
        split_batches: bool = False,
        even_batches: bool = True,
        worker_generator: torch.Generator | None = None,
        synchronise: Synchronise | None = None,
        seedable: bool = False,
    ) -> None:
        self.dataset = loader.dataset
        self.sampler = index_sampler(loader)
        self.batched = loader.batch_sampler is not None
        self.shard = shard
        self.split_batches = split_batches
        self.even_batches = even_batches
        if isinstance(self.sampler, BatchSamplerShard) and shard.count == 1:
            self._take_over(self.sampler)
        if seedable:
            self.sampler = with_inner(self.sampler, made_seedable)
        self.identity = identity
        self.epochs = Epochs()
        self.skipped = 0
        self.restarts = False
        self.synchronised: torch.Generator | None = None
        self.keeps_first = 0
        self.first: list[list[Any]] = []
        self._torch_generator = loader.generator
        self._draws_base_once = loader.persistent_workers and worker_generator is None
        self._has_drawn_base = False
        self._worker_generator = worker_generator
        self._synchronise = synchronise

    def _take_over(self, sharded: BatchSamplerShard) -> None:
        """The user has shared the batches out already: reads that part of them, padding known."""
        self.sampler = sharded.batch_sampler
        self.shard = Shard(sharded.process_index, sharded.num_processes)
        self.split_batches = sharded.split_batches
        self.even_batches = sharded.even_batches

    def open(self, feed: Feed) -> EpochOpening:
        """Begins an iteration.

        Taking its first read is a collective if streams of the ranks are made equal.
        """
        start = self.epochs.next().leaving_out(self.skipped, restarts=self.restarts)
        self.tell_epoch(start.epoch)
        if self._worker_generator is not None:
            self._worker_generator.manual_seed(derive_seed(self.identity.seed, start.epoch, self.shard.index))
        opening = self.epochs.open(start)
        opening.before = self._between_epochs()
        self._has_drawn_base = True
        opening.reads = self._reads(start, feed, opening.progress)
        return opening

    @property
    def resumes(self) -> bool:
        """Whether the next iteration goes on from a loaded position, inside an epoch or by hand."""
        return self.epochs.resumes

    @property
    def restarts_workers(self) -> bool:
        """Whether persistent workers are about to start, which the continued run had already."""
        return self._draws_base_once and self.epochs.restarts

    def tell_epoch(self, epoch: int) -> None:
        """Passes the epoch on to dataset, batch sampler and sampler, where they take it."""
        tell_epoch(epoch, self.dataset, self.sampler, getattr(self.sampler, "sampler", None))

    def batches(self, batch_sampler: Any = None, even_batches: bool | None = None) -> BatchSamplerShard:
        """The shard of the loader's batch sampler, or of a copy of it."""
        sampler = self.sampler if batch_sampler is None else batch_sampler
        even = self.even_batches if even_batches is None else even_batches
        if not self.batched:
            return BatchSamplerShard(LoneBatches(sampler), self.shard.count, self.shard.index, False, even)
        return BatchSamplerShard(sampler, self.shard.count, self.shard.index, self.split_batches, even)

    def of_batches(self, indices: list[Any], epoch: int) -> EpochSource:
        """A source of index batches that were `first` in an epoch."""
        if type(self.sampler) is BatchSampler:
            flat = chain(*indices)
            indices = list(iter(lambda: list(islice(flat, self.sampler.batch_size)), []))
        twin = copy.copy(self)
        twin.sampler, twin.epochs, twin.skipped, twin._torch_generator = indices, Epochs(), 0, None
        twin.epochs.set(epoch)
        return twin

    def __len__(self) -> int:
        return max(len(self.batches()) - self.skipped, 0)

    def global_batch(self) -> int | None:
        """Rows of a batch over all ranks; None if they vary, or are not made by the loader."""
        size = self.batches().batch_size if self.batched else None
        return size if size is None or self.split_batches else size * self.shard.count

    def most_steps(self) -> int | None:
        """The batches of an epoch on the first rank, which has most; None if that is unknown."""
        first = self.batches()
        first.process_index = 0
        steps = length_of(first)
        return None if steps is None else max(steps - self.skipped, 0)

    def reading(self) -> str:
        """The way in which the ranks get their parts, in words."""
        return "every rank reads its own part"

    def ending(self) -> str:
        """The handling of an incomplete last global batch, in words."""
        if not self.batched:
            return "batches come as the dataset gives them"
        if self.batches().drop_last:
            return "an incomplete last global batch is dropped"
        if self.shard.count == 1:
            return "the last batch may be short"
        if self.even_batches:
            return "an incomplete last global batch is filled from the first samples, which metrics leave out"
        return "an incomplete last global batch is left as it is: ranks may differ by one batch"

    def position(self) -> Start:
        """The position of the loader, and the states of the user's generators."""
        position = self.epochs.position()
        if position.extras or position.samples:
            return position
        waiting = self.epochs.waiting()
        extras = self._between_epochs() if waiting is None else waiting.before
        return Start(position.epoch, position.samples, extras)

    def _between_epochs(self) -> dict[str, Any]:
        """The generators' states. Persistent workers draw the base of their seeds once."""
        return between_epochs(given_generators(self.sampler), begun=self._draws_base_once and self._has_drawn_base)

    def check(self, start: Start) -> None:
        """Raises `ValueError` for a position behind the end of an epoch of known length."""
        sampler = getattr(self.sampler, "sampler", self.sampler)
        if type(sampler) in (SequentialSampler, RandomSampler) and start.samples > len(sampler):
            raise ValueError(
                f"load_state_dict() was given a position behind {start.samples} samples, but an epoch has {len(sampler)}. Load it "
                f"into the loader that was saved, or begin a new epoch without a state."
            )
        check_between(given_generators(self.sampler), start.extras)

    def restore(self, start: Start) -> None:
        """The next iteration begins there."""
        extras = restore_between(given_generators(self.sampler), dict(start.extras))
        self.epochs.restore(Start(start.epoch, start.samples, extras))

    def _reads(self, start: Start, feed: Feed, progress: EpochProgress) -> Iterator[IndexRead]:
        if self._worker_generator is not None:
            # torch's draw is made all the same, so that the stream that it is made from goes on as it would.
            torch.empty((), dtype=torch.int64).random_(generator=self._torch_generator)
        self.first = []
        settle(given_generators(self.sampler), start, progress, self._synchronise, self.synchronised)
        key = derive_seed(loader_seed(self.identity.seed, self.identity.number), start.epoch)
        even = self.even_batches if feed.even_batches is None else feed.even_batches
        parts = self.batches(even_batches=even).parts(start.samples) if self.batched else None
        order = None if parts is None else _known_order(self.sampler.sampler, key)
        if parts is not None and order is not None:
            parts = parts.behind(start.skipped)
            if parts.start:
                self.first = [read[0] for read in islice(replace(parts, start=0).reads(order), self.keeps_first)]
            progress.samples, progress.end = min(parts.start, parts.total), parts.end
            yield from parts.reads(order)
        else:
            yield from self._asked(key, start, even, feed.lookahead, progress)

    def _asked(self, key: int, start: Start, even: bool, ahead: int, progress: EpochProgress) -> Iterator[IndexRead]:
        """The index reads of the user's sampler, from `start` on."""
        sampler = with_inner(self.sampler, lambda inner: seeded(inner, key, self.identity.seed))
        shard = self.batches(sampler, even)
        drawn = partial(drawn_apart, seed=key) if draws_globally(sampler) else None
        total = None if start.samples or start.skipped else length_of(shard)
        parts = islice(shard.rows(start.samples, drawn, self.first, self.keeps_first), start.skipped, None)
        known = shard.parts(start.samples)
        progress.end = None if known is None else known.end
        for (indices, rows, read), remaining in looked_ahead(parts, ahead, total):
            if not remaining and (progress.end is None or even or not self.shard.index):  # lengths may be wrong
                progress.end = read
            if self.batched:
                yield indices, remaining, rows, read
            else:
                index = indices[0] if type(indices) is Lone else indices
                yield index, remaining, None if rows.real else _FILLER, read


_FILLER = Rows(None, 0)


class LoneBatches:
    """Batches of a sampler whose loader makes none: each index, or each list of indices, is one."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        for item in self.sampler:
            yield item if isinstance(item, list) else Lone([item])

    def __len__(self) -> int:
        return len(self.sampler)


def _known_order(sampler: Any, key: int) -> Order | None:
    """The order of torch's own sequential and shuffling samplers; None for all others."""
    if type(sampler) is SequentialSampler:
        return SequentialOrder()
    if type(sampler) is not RandomSampler or sampler.generator is not None:
        return None
    # torch's sampler draws its seed from the global stream when it is first asked; what is drawn later depends on that.
    torch.empty((), dtype=torch.int64).random_()
    size = len(sampler.data_source)
    return DrawnOrder(size, key) if sampler.replacement else ShuffledOrder(size, len(sampler), key)


def with_inner(sampler: Any, change: Callable[[Any], Any]) -> Any:
    """A sampler and the one inside it, as `change` makes them; a copy where one changes."""
    changed = change(sampler)
    inner = getattr(sampler, "sampler", None)
    replaced = inner if inner is None else change(inner)
    if replaced is inner:
        return changed
    twin = copy.copy(changed)
    twin.sampler = replaced
    return twin


def seeded(sampler: Any, key: int, run_seed: int) -> Any:
    """A copy of a sampler with a generator of this seed, if it takes one and has none."""
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.with_seed(run_seed)
    if getattr(sampler, "generator", sampler) is not None:
        return sampler
    twin = copy.copy(sampler)
    twin.generator = torch.Generator().manual_seed(key)
    return twin


def made_seedable(sampler: Any) -> Any:
    """A `SeedableRandomSampler` in the place of torch's shuffling sampler; any other as it is."""
    return SeedableRandomSampler.like(sampler) if type(sampler) is RandomSampler else sampler

"""What a sharded loader offers beside its batches."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch.utils.data import IterableDataset

from accel_core.loading import PreparedLoader, length_of

if TYPE_CHECKING:
    from accel_data.source import EpochSource


@dataclass(frozen=True)
class LoaderDescription:
    """What the batch size is, in every sense; None where it varies or is not known.

    Args:
        per_rank_batch: rows of a batch on one rank.
        global_batch: rows of a batch over all ranks.
        effective_batch: rows of an accumulation window over all ranks: of one optimizer step.
        accumulation: batches of a window.
        ranks: how many ranks read different parts.
        samples: samples in the dataset.
        steps: batches of an epoch on the rank that has most of them; windows are `steps / accumulation`, rounded up.
        ending: how an incomplete last global batch is handled.
    """

    per_rank_batch: int | None
    global_batch: int | None
    effective_batch: int | None
    accumulation: int
    ranks: int
    samples: int | None
    steps: int | None
    ending: str

    def __str__(self) -> str:
        def shown(number: int | None, unknown: str) -> str:
            return unknown if number is None else str(number)

        return (
            f"batch per rank {shown(self.per_rank_batch, 'varies')}, global batch {shown(self.global_batch, 'varies')} on "
            f"{self.ranks} data-parallel rank(s), effective batch {shown(self.effective_batch, 'varies')} with "
            f"accumulation {self.accumulation}; {shown(self.steps, 'unknown')} steps per epoch over "
            f"{shown(self.samples, 'an unknown number of')} samples; {self.ending}"
        )


class ShardedLoader(PreparedLoader):
    """A prepared loader that reads one shard. Made by `Sharded`; not to be constructed."""

    _accel_source: EpochSource

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`; without this call, each iteration is the next epoch.

        Passed on to the dataset, the batch sampler, the sampler and the loader's own class, where they take it.
        """
        inherited = getattr(super(), "set_epoch", None)
        if inherited is not None:
            inherited(epoch)
        self._accel_source.epochs.set(epoch)
        self._accel_source.tell_epoch(epoch)

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a batch over all ranks; None if batches vary, or are not made by the loader."""
        source = self._accel_source
        size = source.batches().batch_size if source.batched else None
        return size if size is None or source.split_batches else size * source.shard.count

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all ranks.

        Raises:
            TypeError: if the dataset has no length.
        """
        return len(cast(Sized, self.dataset))

    def describe(self) -> LoaderDescription:
        """The batch size in every sense, the steps of an epoch, and how its end is handled; `print` it."""
        source, accumulation = self._accel_source, self._accel_outlet.feed.lookahead
        total, ranks = self.total_batch_size, source.shard.count
        return LoaderDescription(
            per_rank_batch=None if total is None else total // ranks,
            global_batch=total,
            effective_batch=None if total is None else total * accumulation,
            accumulation=accumulation,
            ranks=ranks,
            samples=length_of(self.dataset),
            steps=source.most_steps(),
            ending=self._ending(),
        )

    def _ending(self) -> str:
        source = self._accel_source
        if isinstance(self.dataset, IterableDataset) or not source.batched:
            return "batches come as the dataset gives them"
        if source.batches().drop_last:
            return "an incomplete last global batch is dropped"
        if source.shard.count == 1:
            return "the last batch may be short"
        if source.even_batches:
            return "an incomplete last global batch is filled from the first samples, which metrics leave out"
        return "an incomplete last global batch is left as it is: ranks may differ by one batch"

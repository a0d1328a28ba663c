"""The base class of this package's loaders: position, epochs, and their description."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader

from accel_core.api.loader import IndexSource, PreparedLoader, source_after
from accel_data.loader_fingerprint import extras_of
from accel_data.loader_state import Start
from accel_data.shard_arithmetic import without_length

if TYPE_CHECKING:
    from accel_data.dispatching import DispatchSource
    from accel_data.iterable_source import StreamSource
    from accel_data.map_source import EpochSource


@dataclass(frozen=True)
class LoaderDescription:
    """The batch sizes of a loader, and its steps; None where a number varies or is not known.

    `effective_batch`: rows of an optimizer step over all ranks, `accumulation` batches. `batches`
    and `steps`: of an epoch, on the rank that has most. `reading`: how the ranks come to their
    parts; `ending`: how an incomplete last global batch is handled.
    """

    per_rank_batch: int | None
    global_batch: int | None
    effective_batch: int | None
    accumulation: int
    ranks: int
    samples: int | None
    batches: int | None
    steps: int | None
    reading: str
    ending: str

    def __str__(self) -> str:
        def shown(number: int | None, unknown: str) -> str:
            return unknown if number is None else str(number)

        return (
            f"batch per rank {shown(self.per_rank_batch, 'varies')}, global batch {shown(self.global_batch, 'varies')} on "
            f"{self.ranks} data-parallel rank(s), effective batch {shown(self.effective_batch, 'varies')} with "
            f"accumulation {self.accumulation}; {shown(self.batches, 'unknown')} batches per rank and "
            f"{shown(self.steps, 'unknown')} steps per epoch over {shown(self.samples, 'an unknown number of')} "
            f"samples; {self.ending}; {self.reading}"
        )


class PositionedLoader(PreparedLoader):
    """A prepared loader that can say where it is, and go on from there."""

    _accel_source: EpochSource | StreamSource | DispatchSource

    def __len__(self) -> int:
        """The number of batches of an epoch on this rank; TypeError if that is not known."""
        original: Any = type(self).__bases__[-1]
        if original.__len__ is not DataLoader.__len__:  # a class that iterates in its own way counts in its own way
            length: int = original.__len__(self)
            return length
        return len(self._accel_source)

    def state_dict(self) -> dict[str, Any]:
        """The position: seed, epoch, and samples yielded of the global order, over all ranks.

        Numbers, and tensors of bytes where generators or the dataset have states of their own. The
        state of rank 0 serves every rank, and any number of them. Not a collective.

        Where every rank has a stream of its own (`presharded`), each saves its own state, and loads
        it again.

        Raises:
            ValueError: with workers whose batches come out of order, for they are no beginning of
                the order; and for a class of loader that does not iterate as torch does.
        """
        if self.num_workers and not self.in_order:
            raise ValueError(
                "state_dict() was called on a loader with in_order=False: what it has yielded is no beginning of the order, so "
                "no position says it. Use in_order=True to resume inside an epoch."
            )
        indices = self.__dict__.get("_accel_indices")
        if indices is not None and indices.bypassed:
            raise ValueError(
                f"state_dict() was called on a {type(self).__name__} whose __iter__ yields batches without taking any from "
                f"super().__iter__(), so where it stands is not known here. Take them from there, or keep its position yourself."
            )
        return self._accel_source.identity.state(self._position())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where `state` was taken; the one after it is a whole epoch.

        At the end of an epoch that was not left yet, the next iteration is the rest of it: empty.
        Not a collective: every rank loads the same state, which any rank of a world of any size has
        saved. Raises TypeError for no state of a loader, ValueError for one of another dataset,
        loader or run.
        """
        source = self._accel_source
        start = self.check_state_dict(state)
        source.identity.seed = state["seed"]
        source.restore(start)

    def check_state_dict(self, state: dict[str, Any]) -> Start:
        """The position at which `load_state_dict(state)` resumes. Raises as it does."""
        source = self._accel_source
        checked = source.identity.check(state)
        start = Start(checked["epoch"], checked["samples"], extras_of(checked))
        source.check(start)
        return start

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`; without this call, each iteration is the next epoch.

        Passed on to the dataset, the batch sampler, the sampler and the loader's own class, where
        they take it.
        """
        inherited = getattr(super(), "set_epoch", None)
        if inherited is not None:
            inherited(epoch)
        self._accel_source.epochs.set(epoch)
        self._accel_source.tell_epoch(epoch)

    def restart_epoch(self) -> None:
        """The next iteration is the whole epoch in which the loader stands, or the next if that has ended.

        For loops that skip batches by themselves after `load_state`. Not a collective.
        """
        position = self._position()
        if position.extras.get("ended"):
            self._accel_source.restore(Start(position.epoch + 1))
        elif position.samples:
            self._accel_source.restore(position.at_beginning())

    def behind(self, batches: int) -> PositionedLoader:
        """A copy whose iterations leave out so many more of this rank's batches, from the start.

        See `skip_first_batches`. Raises ValueError if the number is negative, or no whole number.
        """
        source = source_after(self._accel_source, batches)
        source.restarts = source.restarts or batches > 0
        twin = copy.copy(self)
        indexed = "_accel_indices" in self.__dict__
        twin.__dict__.update(self._reading_from(cast(IndexSource, source)) if indexed else {}, _accel_source=source)
        return twin

    def _position(self) -> Start:
        return self._accel_source.position()

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a batch over all ranks; None if batches vary, or are not made by the loader."""
        return self._accel_source.global_batch()

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all ranks; TypeError if it has no length."""
        length = self._accel_source.identity.length
        if length is None:
            raise without_length("total_dataset_length", self.dataset)
        return length

    def describe(self) -> LoaderDescription:
        """Batch sizes, steps of an epoch, and how its end is handled; `print` it."""
        source, accumulation = self._accel_source, self._accel_outlet.feed.lookahead
        total, ranks, batches = self.total_batch_size, source.shard.count, source.most_steps()
        return LoaderDescription(
            per_rank_batch=None if total is None else total // ranks,
            global_batch=total,
            effective_batch=None if total is None else total * accumulation,
            accumulation=accumulation,
            ranks=ranks,
            samples=source.identity.length,
            batches=batches,
            steps=None if batches is None else math.ceil(batches / accumulation),
            reading=source.reading(),
            ending=source.ending(),
        )

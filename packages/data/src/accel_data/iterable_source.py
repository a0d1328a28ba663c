"""The source of a loader over an iterable dataset: no indices, only samples in sequence.

Going on inside an epoch therefore reads what is left out, batch by batch, unless dataset or loader
has a state of its own: then that is kept beside the position, as it was when the latest batch was
yielded, and restored.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch.utils.data import DataLoader

from accel_core import Rows
from accel_core.api.component import capture_random_state, restore_random_state, restored_behind
from accel_core.api.loader import Positions, length_of, looked_ahead
from accel_data.generators import between_epochs, check_between, given_generators, restore_between, settle
from accel_data.loader_state import EpochOpening, Epochs, Start, tell_epoch
from accel_data.sample_count import Counting, taken
from accel_data.shard_arithmetic import without_length

if TYPE_CHECKING:
    import torch

    from accel_core import Feed, Shard
    from accel_core.api.loader import Outlet
    from accel_data.generators import Synchronise
    from accel_data.loader_fingerprint import Identity


class Stateful(Protocol):
    """An object with a state of its own."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state: dict[str, Any]) -> None: ...  # noqa: D102


class Fetched(NamedTuple):
    """A batch, its rows, the samples that all ranks have read, its position, and its samples."""

    batch: Any
    rows: Rows | None
    samples: int
    extras: dict[str, Any]
    positions: Positions | None = None


class StreamSource:
    """Every batch that a loader gives, in order: what one process reads that shares with nobody.

    Attributes:
        inherits_state: whether a loader class that keeps a position of its own is asked for it.
        skipped: batches that every iteration leaves out at its beginning; `restarts`: also where a
            position inside the epoch was loaded.
        synchronised: a generator that is made equal to that of rank 0, beside that of the dataset.
        delivered: what torch's latest iterator has delivered, where samples are counted; else None.
        first: of the batches that the latest iteration read and left out, the first `keeps_first`,
            with their samples where these are counted: a last step may be filled up from them.
    """

    inherits_state = True

    def __init__(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        identity: Identity,
        dataset: Any = None,
        *,
        synchronise: Synchronise | None = None,
    ) -> None:
        self.dataset = loader.dataset if dataset is None else dataset
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self.shard = shard
        self.identity = identity
        self.epochs = Epochs()
        self.skipped = 0
        self.restarts = False
        self.synchronised: torch.Generator | None = None
        self.delivered: deque[Any] | None = None
        self.keeps_first = 0
        self.first: list[tuple[Any, int | None]] = []
        self._synchronise = synchronise
        # Only the last batch may be short. Workers end one after the other, and other classes may yield what they like.
        self._is_regular = type(loader) is DataLoader and not loader.num_workers and bool(loader.batch_size)
        self._workers_persist = loader.persistent_workers

    def iterate(self, fetched: Callable[[], Iterable[Any]], outlet: Outlet, stateful: Stateful | None) -> Iterator[Any]:
        """One iteration over what `fetched` gives: it begins a pass over the batches.

        `stateful` keeps a position of its own, the dataset or the loader; None: batches are
        counted. Raises ValueError if what is left out ends before a position to which the dataset
        has gone on.
        """
        self.first = []
        resumes, restarts = self.epochs.resumes, self._workers_persist and self.epochs.restarts
        before = capture_random_state(outlet.device) if resumes or restarts else {}
        start = self._beginning(stateful)
        self.tell_epoch(start.epoch)
        opening = self.epochs.open(start)
        settle(given_generators(self.dataset), start, opening.progress, self._synchronise, self.synchronised)
        arriving = self._arriving(start, fetched, stateful)
        if start.extras.get("ended"):
            # A stream of a rank's own that ended with another one had been read one batch further, and may have no end.
            arriving = _unseen(arriving, 1 if self.owners else None)
        if resumes:
            arriving = restored_behind(1, arriving, before, outlet.device)
        elif restarts:
            restore_random_state(before, outlet.device)
        return self._reported(opening, arriving, outlet)

    @property
    def step(self) -> int:
        """The samples that all ranks read in a step."""
        return self.batch_size or 1

    def tell_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the dataset, if it takes it."""
        tell_epoch(epoch, self.dataset)

    def position(self, stateful: Stateful | None = None) -> Start:
        """The position of the loader, with the states of its generators and of `stateful`."""
        position = self.epochs.position()
        if position.extras or position.samples:
            return position
        extras = between_epochs(given_generators(self.dataset))
        if stateful is not None:
            extras["stream"] = self._cut() or snapshot(stateful, "between")
        return Start(position.epoch, position.samples, extras)

    def _cut(self) -> dict[str, Any] | None:
        """The state behind the latest epoch's last batch, if other ranks ended before this one's stream."""
        current = self.epochs.current
        state = None if current is None or self.owners is None else current.extras.get("stream")
        return {**state, "standing": "cut"} if state is not None and state["standing"] == "inside" else None

    @property
    def owners(self) -> int | None:
        """The number of ranks with streams of their own; None if there is one stream."""
        return None

    def check(self, start: Start) -> None:
        """Raises `ValueError` for a position in the own streams of another number of ranks."""
        ranks = start.extras.get("ranks")
        if start.samples and ranks != self.owners:
            raise ValueError(
                f"load_state_dict() was given a position in the streams of {ranks or 'no'} ranks that have their own, this "
                f"loader goes on in those of {self.owners or 'no'} such ranks. Go on with as many ranks as were saved and the "
                f"same presharded, or begin a new epoch without a state."
            )
        check_between(given_generators(self.dataset), start.extras)

    def restore(self, start: Start) -> None:
        """The next iteration begins there. Raises as `check`."""
        self.check(start)
        extras = restore_between(given_generators(self.dataset), dict(start.extras))
        self.epochs.restore(Start(start.epoch, start.samples, extras))

    def global_batch(self) -> int | None:
        """Rows of a batch; None if the dataset makes them."""
        return self.batch_size

    def most_steps(self) -> int | None:
        """Batches of an epoch, as far as the dataset has a length."""
        samples = length_of(self.dataset)
        if samples is None:
            return None
        size = self.step // (self.owners or 1)
        steps = samples // size if self.drop_last else -(-samples // size)
        return max(steps - self.skipped, 0)

    def reading(self) -> str:
        """The way in which the ranks get their parts, in words."""
        return "the stream is read here, whole"

    def ending(self) -> str:
        """The handling of an incomplete last global batch, in words."""
        return "batches come as the dataset gives them"

    def __len__(self) -> int:
        steps = self.most_steps()
        if steps is None:
            raise without_length("The number of batches", self.dataset)
        return steps

    def _beginning(self, stateful: Stateful | None) -> Start:
        loaded = self.epochs.next()
        start = loaded.leaving_out(self.skipped, restarts=self.restarts)
        if stateful is None or start.samples == loaded.samples or "stream" not in loaded.extras:
            return start
        further, inside_a_step = divmod(self.skipped * self.step - loaded.samples, self.step)
        if further >= 0 and loaded.extras["stream"]["standing"] == "end":
            return loaded
        if further >= 0 and not inside_a_step:  # the dataset goes on by itself, and then what is missing is left out
            return replace(loaded, skipped=further)
        # A dataset that is not told the epoch may know from its state only which one it is.
        if self.epochs.has_opened or (loaded.epoch and not callable(getattr(self.dataset, "set_epoch", None))):
            raise ValueError(
                f"skip_first_batches(num_batches={self.skipped}) counts from the beginning of the epoch, but "
                f"{type(self.dataset).__name__} cannot be read from there: a state was loaded behind {loaded.samples} samples "
                f"of epoch {loaded.epoch}, and the dataset goes on by itself. Leave the skip out: iterate over the loader, "
                f"which continues where the state was taken."
            )
        return start

    def _reported(self, opening: EpochOpening, batches: Iterator[Fetched], outlet: Outlet) -> Iterator[Any]:
        progress = opening.progress
        with outlet.passage() as passage:
            opening.start()
            for fetched, remaining in self._ended(batches, outlet.feed):
                placed, rows = outlet.placed(fetched.batch, fetched.rows, remaining)
                whole = fetched.rows is not None or remaining or self.drop_last
                passage.advance(remaining, rows, fetched.positions if whole else None)
                progress.samples = fetched.samples
                if fetched.extras:
                    progress.extras = {**progress.extras, **fetched.extras}
                if not remaining:
                    progress.end = fetched.samples
                yield placed
            progress.finished = True

    def _ended(self, batches: Iterator[Fetched], feed: Feed) -> Iterator[tuple[Fetched, int]]:
        """The batches, each with how many follow; the last that there is with its state marked."""
        for fetched, following in looked_ahead(batches, feed.lookahead):
            yield fetched if following else at_the_end(fetched), following

    def _arriving(
        self, start: Start, fetched: Callable[[], Iterable[Any]], stateful: Stateful | None
    ) -> Iterator[Fetched]:
        saved = None if stateful is None else start.extras.get("stream")
        if saved is None and start.extras.get("ended") and self.owners is None:
            # The size of its last batch depends on the ranks.
            return self._from_the_beginning(fetched, Start(start.epoch), None)
        if stateful is None or (saved is None and not self.epochs.begins_from_a_state):
            return self._from_the_beginning(fetched, start, stateful)
        if saved is not None:
            stateful.load_state_dict(copy.deepcopy(saved["state"]))
            if saved["standing"] in ("end", "between"):
                self.tell_epoch(start.epoch)  # the state may hold the epoch before
        self.epochs.begins_from_a_state = saved is not None and saved["standing"] == "end"
        if self.epochs.begins_from_a_state:
            return iter(())
        standing = "end" if saved is None else saved["standing"]
        if standing != "inside":
            anew = _restarted if standing != "cut" else _behind_a_cut
            fetched = partial(anew, fetched, partial(self.tell_epoch, start.epoch))
        return self._from_a_state(fetched, start, stateful)

    def _from_the_beginning(
        self, fetched: Callable[[], Iterable[Any]], start: Start, stateful: Stateful | None
    ) -> Iterator[Fetched]:
        """The batches behind `start` of a pass that begins at the beginning of the epoch."""
        behind = self._batches_behind(start.samples)
        return self._counted(self._left_out(self._told(fetched()), behind, start.samples), start, stateful)

    def _from_a_state(
        self, fetched: Callable[[], Iterable[Any]], start: Start, stateful: Stateful
    ) -> Iterator[Fetched]:
        """The batches behind `start` of a pass that begins at `start`."""
        return self._counted(self._told(fetched()), start, stateful)

    def _told(self, batches: Iterable[Any]) -> Iterator[tuple[Any, int | None]]:
        """The batches, each with the samples that it was made of, where these are counted."""
        delivered = batches.delivered if isinstance(batches, Counting) else None
        for batch in batches:
            # The user's class may have asked for torch's iterator only now.
            delivered = self.delivered if delivered is None else delivered
            yield batch, taken(delivered, batch)

    def _counted(
        self, batches: Iterable[tuple[Any, int | None]], start: Start, stateful: Stateful | None
    ) -> Iterator[Fetched]:
        size = self.batch_size or 1
        samples = start.samples + size * start.skipped
        batches = iter(batches)
        self._passed_over(batches, start.skipped)
        for batch, count in batches:
            samples += size
            rows = None if count is None else Rows(count, count)
            positions = Positions(samples - size, size if count is None else count)
            known = count is not None or self._is_regular
            yield Fetched(batch, rows, samples, inside(stateful), positions if known else None)

    def _left_out(
        self, batches: Iterator[tuple[Any, int | None]], behind: int, samples: int
    ) -> Iterator[tuple[Any, int | None]]:
        """The batches but for the first, which have so many samples."""
        read = self._passed_over(batches, behind)
        if read < behind:
            raise ValueError(
                f"A position behind {samples} samples was loaded, but {type(self.dataset).__name__} yields only {read} batches in "
                f"this epoch. Load it for the dataset of the run that was saved, or begin a new epoch without a state."
            )
        yield from batches

    def _passed_over(self, batches: Iterator[tuple[Any, int | None]], number: int) -> int:
        """Reads so many batches, and keeps the first of them; returns how many there were."""
        kept = list(islice(batches, min(number, self.keeps_first - len(self.first))))
        self.first += kept
        return len(kept) + sum(1 for _ in islice(batches, number - len(kept)))

    def _batches_behind(self, samples: int) -> int:
        """The number of batches to leave out in order to resume behind so many samples."""
        size = self.batch_size or 1
        if samples % size:
            raise ValueError(
                f"A position behind {samples} samples was loaded, which lies inside a batch of {size}: a stream is left "
                f"out batch by batch. Use a batch size that divides {samples}, or begin a new epoch without a state."
            )
        return samples // size


def inside(stateful: Stateful | None) -> dict[str, Any]:
    """The extras of a position inside an epoch: the state of `stateful`, if there is one."""
    return {} if stateful is None else {"stream": snapshot(stateful, "inside")}


def at_the_end(fetched: Fetched) -> Fetched:
    """The last batch of a stream: its state, if there is one, may be that of the next epoch already."""
    if "stream" not in fetched.extras:
        return fetched
    return fetched._replace(extras={**fetched.extras, "stream": {**fetched.extras["stream"], "standing": "end"}})


def snapshot(stateful: Stateful, standing: Literal["inside", "between"]) -> dict[str, Any]:
    """A state, and where it was taken: inside an epoch, or between epochs.

    What was taken inside may turn out to be behind the last batch of the stream, "end", or where
    the epoch has ended before it, "cut". A copy: some hand out what they go on changing.
    """
    return {"standing": standing, "state": copy.deepcopy(stateful.state_dict())}


def _unseen(batches: Iterator[Fetched], most: int | None) -> Iterator[Fetched]:
    """Nothing, of an epoch at its end: its batches are read, so that what they are drawn from goes on."""
    for _ in islice(batches, most):
        pass
    yield from ()


def _restarted(fetched: Callable[[], Iterable[Any]], tell: Callable[[], None]) -> Iterator[Any]:
    """A pass from a state at the end of an epoch.

    Some pipelines begin anew from there, others end once more first; where a loader and its dataset
    both have a state, each of them may. `tell` tells the dataset the epoch, for a loader may have
    put it into its older state only now. What an empty pass draws is drawn again by the next one.
    """
    before = capture_random_state(None)
    for number in range(3):
        empty = True
        if number:
            restore_random_state(before, None)
            tell()
        for batch in fetched():
            empty = False
            yield batch
        if not empty:
            return


def _behind_a_cut(fetched: Callable[[], Iterable[Any]], tell: Callable[[], None]) -> Iterator[Any]:
    """A pass behind one that other ranks ended: that is left again, as far as it had been read ahead.

    Else what was cut off would be the beginning of this one. What it draws is drawn again.
    """
    before = capture_random_state(None)
    for _ in fetched():
        break
    restore_random_state(before, None)
    tell()
    yield from fetched()

"""An iterable dataset that every rank reads, and keeps its part of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from accel_core import Rows, Shard, World
from accel_core.api.loader import Positions, unmatched_message
from accel_data.iterable_source import Fetched, StreamSource, at_the_end, inside
from accel_data.sample_count import Counting
from accel_data.shard_arithmetic import piece_of
from accel_data.uneven_streams import even_ends
from accel_data.worker_streams import Counted, CountedCollate, ShardedStream, WorkerStart

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_core import Feed
    from accel_data.configuration import Uneven
    from accel_data.iterable_source import Stateful
    from accel_data.loader_state import Start
    from accel_data.request import Request
    from accel_data.worker_streams import Mark


def sharing_stream(loader: DataLoader[Any], request: Request) -> dict[str, Any]:
    """The attributes that make a copy of `loader` a `DataLoaderShard` of a part of a stream."""
    source = SharedStreamSource(loader, request)
    attributes = {
        "_accel_outlet": request.outlet(),
        "_accel_source": source,
        "dataset": source.stream,
        "collate_fn": CountedCollate(loader.collate_fn),
        "worker_init_fn": WorkerStart(loader.worker_init_fn),
    }
    if loader.batch_sampler is not None:  # of an iterable dataset, it only says how many samples make a batch
        attributes["batch_sampler"] = BatchSampler(loader.sampler, source.stream.part, loader.drop_last)
    return attributes


class SharedStreamSource(StreamSource):
    """The part of one rank of an iterable dataset that all ranks read, as `stream`.

    An incomplete last step is filled from the first samples of the epoch. Where a dataset went on
    from a state of its own they are not read again: then it is filled from the first samples behind
    the state, so that the rows which metrics leave out, and training does not, are others than
    those of a run that was not interrupted.
    """

    inherits_state = False  # it would be that of one rank's part

    def __init__(self, loader: DataLoader[Any], request: Request) -> None:
        super().__init__(loader, request.shard, request.identity(loader), synchronise=request.synchronise())
        options = request.options
        self.uneven: Uneven = options.uneven
        self.presharded = options.presharded
        self.split_batches = options.split_batches
        self._group = request.group
        shard = Shard(0, 1) if self.presharded else self.shard
        self.stream = ShardedStream(loader.dataset, shard, self._part(), self.drop_last, fill=True)

    @property
    def step(self) -> int:
        """The samples that all ranks read in a step."""
        return self.stream.part * self.shard.count

    def tell_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the dataset, if it takes it, also in workers that run already."""
        self.stream.set_epoch(epoch)

    def global_batch(self) -> int | None:
        """Rows of a batch over all ranks; None if the dataset makes them."""
        return None if self.batch_size is None else self.step

    def reading(self) -> str:
        """The way in which the ranks get their parts, in words."""
        if self.presharded:
            return "every rank reads a stream of its own"
        return "every rank reads the whole stream, and keeps its part"

    def ending(self) -> str:
        """The handling of an incomplete last global batch and of uneven ends, in words."""
        last = "dropped" if self.drop_last else "filled from the first samples, which metrics leave out"
        if self.presharded:
            last = "dropped" if self.drop_last else "left as it is"
        policies = {
            "pad": "a rank that ends before the others goes on with batches that metrics leave out",
            "stop": "all ranks end with the first",
            "join": "each rank ends by itself",
        }
        return f"an incomplete last global batch is {last}; {policies[self.uneven]}"

    @property
    def owners(self) -> int | None:
        """The number of ranks with streams of their own; None if there is one stream."""
        return self.shard.count if self.presharded else None

    def _part(self) -> int:
        """The samples that one rank reads in a step."""
        size, count = self.batch_size, self.shard.count
        if not self.split_batches or self.presharded:
            return size or 1
        if size is None:
            raise ValueError(
                "split_batches=True cuts each batch into equal pieces, but with batch_size=None the dataset makes the batches. Use "
                "split_batches=False, or dispatch_batches=True, which cuts what can be cut."
            )
        return piece_of(size, count)

    def _ended(self, batches: Iterator[Fetched], feed: Feed) -> Iterator[tuple[Fetched, int]]:
        """The batches until the common end, each with how many follow."""
        if self.uneven == "join" and not feed.joining:
            raise RuntimeError(
                "uneven='join' lets each rank end by itself, so the others would wait for it outside of join_uneven_inputs(). Put "
                "the loop into `with accelerator.join_uneven_inputs([model])`, or use uneven='pad' or 'stop'."
            )
        policy: Uneven = "join" if feed.joining else self.uneven
        read, own = 0, Held(batches)
        for fetched, is_real, following in even_ends(own, policy, World.current(), self._group, feed.lookahead):
            if is_real:
                own.held -= 1
                read = fetched.samples
                yield at_the_end(fetched) if own.has_ended and not own.held else fetched, following
            else:
                rows = None if fetched.rows is None else fetched.rows.rows
                positions = None if fetched.positions is None else Positions(fetched.positions.first, 0)
                extras = {"ranks": self.shard.count} if self.presharded else {}
                yield Fetched(fetched.batch, Rows(rows, 0), read, extras, positions), following

    def _from_the_beginning(
        self, fetched: Callable[[], Iterable[Any]], start: Start, stateful: Stateful | None
    ) -> Iterator[Fetched]:
        # Of a stream that all ranks see, the beginning is left out by whoever reads it; else its batches are, here.
        self.stream.begin(skip=0 if self.presharded else start.samples)
        single = [start.samples // (self.owners or 1) if self.presharded else 0]
        behind = start.extras.get("lanes", single) if start.samples else None
        return islice(self._delivered(fetched(), behind, stateful), start.skipped, None)

    def _from_a_state(
        self, fetched: Callable[[], Iterable[Any]], start: Start, stateful: Stateful
    ) -> Iterator[Fetched]:
        self.stream.begin(read=start.samples // (self.owners or 1))
        return islice(self._delivered(fetched(), None, stateful), start.skipped, None)

    def _delivered(
        self, batches: Iterable[Any], behind: list[int] | None, stateful: Stateful | None
    ) -> Iterator[Fetched]:
        """The batches that are kept, each with its rows and the samples of all ranks."""
        delivered = batches.delivered if isinstance(batches, Counting) else None
        lanes = Lanes(behind, type(self.stream.dataset).__name__)
        constant = {"ranks": self.shard.count} if self.presharded else {}
        for batch in batches:
            if delivered is None:  # the user's class has made torch's iterator only now
                delivered = self.delivered
            if not delivered:
                raise RuntimeError(unmatched_message("more batches than"))
            counted = delivered.popleft()
            positions = self._positions(counted, lanes.read)
            if lanes.advance(counted.mark):
                extras = {**constant, **lanes.extras(), **inside(stateful)}
                yield Fetched(batch, counted.rows, lanes.read * (self.owners or 1), extras, positions)

    def _positions(self, counted: Counted, before: int) -> Positions | None:
        """The positions of a batch's samples after `before` others; None unless streams are one."""
        mark, rows = counted.mark, counted.rows
        if self.presharded or mark.lanes > 1 or rows is None or rows.rows is None:
            return None
        first = max(before, mark.skipped, self.stream.begun_behind) + self.shard.index * self.stream.part
        return Positions(first, rows.real)


class Held:
    """A rank's batches: how many are `held`, which is for the user to count down; and whether all have come."""

    def __init__(self, batches: Iterator[Fetched]) -> None:
        self._batches = batches
        self.held = 0
        self.has_ended = False

    def __iter__(self) -> Iterator[Fetched]:
        for fetched in self._batches:
            self.held += 1
            yield fetched
        self.has_ended = True


class Lanes:
    """The progress of each stream of a dataset that splits itself over workers, or of its only one.

    `behind`: for each, how many samples a loaded position leaves out; `dataset`: for messages.
    """

    def __init__(self, behind: list[int] | None, dataset: str) -> None:
        self._behind = behind
        self._dataset = dataset
        self._read: list[int] = []

    @property
    def read(self) -> int:
        """Samples of all lanes together."""
        return sum(self._read)

    def extras(self) -> dict[str, Any]:
        """The extras of a position: the samples read of each lane, if there are several."""
        return {"lanes": list(self._read)} if len(self._read) > 1 else {}

    def advance(self, mark: Mark) -> bool:
        """A batch has come. Returns whether it is not left out.

        Raises ValueError if the position has another number of lanes, or lies inside the batch.
        """
        if not self._read:
            self._begin(mark.lanes)
        before, self._read[mark.lane] = self._read[mark.lane], mark.read
        behind = 0 if self._behind is None else self._behind[mark.lane]
        if before < behind < mark.read:
            raise ValueError(
                f"A position behind {behind} samples of stream {mark.lane} was loaded, which lies inside a batch: batches of "
                f"{self._dataset} end there at {before} and {mark.read}. Use the batch size and the number of ranks of the run "
                f"that was saved, or begin a new epoch without a state."
            )
        return mark.read > behind

    def _begin(self, lanes: int) -> None:
        self._read = [0] * lanes
        if self._behind is not None and len(self._behind) != lanes:
            raise ValueError(
                f"A position in {len(self._behind)} stream(s) was loaded, but {self._dataset} gives {lanes} here: it splits "
                f"itself over its workers, so its order depends on how many there are. Use num_workers as in the run that was "
                f"saved, or begin a new epoch without a state."
            )

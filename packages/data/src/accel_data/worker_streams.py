"""Iterable datasets that every rank reads whole: the part of each rank and of its workers.

Every worker of a loader has a copy of the dataset, and iterates it. There are two kinds of
datasets:

- One that *splits itself* gives each worker a stream of its own, a *lane*. The rank's part is taken
  of each lane.
- Any other gives each worker the same stream, so all samples once per worker. There the workers of
  a rank take turns: worker w keeps the steps w, w + W, w + 2·W, … torch asks the workers in turn,
  so the batches arrive in the order of the stream.

Which of the two it is cannot be asked, but it can be watched: a stream can only depend on the
worker if it asks for the worker. So what `get_worker_info` returns notes whether its `id` or
`num_workers` is read until the first sample is there, and whether a `worker_init_fn` reaches for
the dataset. Once seen, a worker keeps to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_core import Rows
from accel_core.api.loader import length_of
from accel_data.iterable import Piece, Steps, asked
from accel_data.loader_state import tell_epoch
from accel_data.shard_arithmetic import without_length

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_core import Shard

_TELLING = frozenset({"id", "num_workers"})


class Mark(NamedTuple):
    """The position of a batch: in `lane` of the `lanes` that the dataset has split itself into.

    All ranks have `read` so many samples of the lane with this batch, of which `skipped` were left
    out as asked; a dataset that splits itself leaves out none: whoever receives its batches has to.
    """

    lanes: int
    lane: int
    read: int
    skipped: int


class Element(NamedTuple):
    """A sample on its way to the collate function, and whether it is real."""

    sample: Any
    is_real: bool
    mark: Mark


class Counted(NamedTuple):
    """A batch in the main process, how many samples it has and are real, and where it stands.

    Where the dataset makes the batches, rows are None, and `Rows(None, 0)` of one that fills up.
    """

    batch: Any
    rows: Rows | None
    mark: Mark


class StandIn(IterableDataset[Any]):
    """Stands for the user's iterable dataset in a prepared loader, with the same attributes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.watched: WatchedInfo | None = None  # in a worker
        self.splits_itself = False
        self._plan = _Plan()

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the dataset, if it takes it, here and in running workers."""
        self._plan.write(epoch=epoch)
        tell_epoch(epoch, self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # a copy that is being made has no attributes yet
            raise AttributeError(name)
        return getattr(self.dataset, name)


class ToldStream(StandIn):
    """Tells the epoch to workers that go on from one to the next: their dataset is a copy."""

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan.read()
        if get_worker_info() is not None and "epoch" in plan:
            tell_epoch(plan["epoch"], self.dataset)
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)


def telling(loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes with which a copy of `loader` tells its workers the epoch; {} if none does."""
    if not loader.persistent_workers or not callable(getattr(loader.dataset, "set_epoch", None)):
        return {}
    return {"dataset": ToldStream(loader.dataset), "worker_init_fn": WorkerStart(loader.worker_init_fn)}


class ShardedStream(StandIn):
    """Stands for the user's iterable dataset in a prepared loader; yields one rank's elements.

    The loader's batch size has to be `part`, its collate function a `CountedCollate`, its
    `worker_init_fn` a `WorkerStart`. Every rank must see the same stream, or the same lanes. An
    incomplete last step of each is dropped, or filled from its first samples, or left as it is.
    """

    def __init__(self, dataset: Any, shard: Shard, part: int, drop_last: bool, fill: bool, skip: int = 0) -> None:
        super().__init__(dataset)
        self.shard = shard
        self.part = part
        self.drop_last = drop_last
        self._resumed = False  # in a worker that has iterated before
        self.begin(skip=skip, fill=fill)

    def begin(self, *, skip: int = 0, fill: bool = True, read: int = 0) -> None:
        """Says how the next iteration goes, also to workers that are already running.

        `skip` samples of the stream are left out; `read` lie before it, as the dataset itself goes
        on from a state; `fill`: whether an incomplete last step is filled.
        """
        self._plan.write(skip=skip, fill=int(fill), read=read)

    @property
    def begun_behind(self) -> int:
        """The number of samples before the stream, as the dataset itself resumes from a state."""
        return self._plan.given["read"]

    def __len__(self) -> int:
        """The number of this rank's samples, filling up included; TypeError if not known."""
        total = length_of(self.dataset)
        if total is None:
            raise without_length("The number of samples", self.dataset)
        return self._steps(self._plan.given).length(total)

    def __iter__(self) -> Iterator[Element]:
        """Begins at once: by the first element the main process may have sent the next epoch."""
        info = get_worker_info()
        if info is None:
            return self._whole(iter(self.dataset), self._plan.given)
        watched = self.watched = self.watched or watch(info, self.dataset)
        watched.asked.clear()
        plan = self._plan.read() if self._resumed else self._plan.given
        if self._resumed and "epoch" in plan:
            tell_epoch(plan["epoch"], self.dataset)
        self._resumed = True
        return self._in_worker(asked(iter(self.dataset)), plan, watched)

    def _steps(self, plan: dict[str, int]) -> Steps:
        shard = self.shard
        return Steps(self.part, shard.index, shard.count, self.drop_last, bool(plan["fill"]), plan["skip"])

    def _whole(self, samples: Iterator[Any], plan: dict[str, int]) -> Iterator[Element]:
        for piece in self._steps(plan).pieces(samples):
            yield from _elements(piece, Mark(1, 0, plan["read"] + piece.read, plan["skip"]))

    def _in_worker(self, samples: Iterator[Any], plan: dict[str, int], watched: WatchedInfo) -> Iterator[Element]:
        head = list(islice(samples, 1))
        if not head:
            return
        self.splits_itself = self.splits_itself or not watched.asked.isdisjoint(_TELLING)
        stream, steps = chain(head, samples), self._steps(plan)
        lane, lanes = watched.place
        if self.splits_itself and lanes > 1:
            for piece in replace(steps, skip=0).pieces(stream):
                yield from _elements(piece, Mark(lanes, lane, piece.read, 0))
            return
        for piece in self._prompt(replace(steps, turn=lane, turns=lanes).pieces(stream), watched):
            yield from _elements(piece, Mark(1, 0, plan["read"] + piece.read, plan["skip"]))

    def _prompt(self, pieces: Iterator[Piece], watched: WatchedInfo) -> Iterator[Piece]:
        """The pieces; raises if the dataset turns out to split itself when it is too late."""
        _, lanes = watched.place
        while True:
            watched.asked.clear()  # collate functions may ask
            following = next(pieces, None)
            if lanes > 1 and "num_workers" in watched.asked:
                raise RuntimeError(
                    f"{type(self.dataset).__name__} asked get_worker_info() for num_workers only behind its first sample, when "
                    f"its workers had begun to take turns: if it splits itself among them, samples are lost. Ask at the "
                    f"beginning of its __iter__, or use num_workers=0."
                )
            if following is None:
                return
            yield following


class CountedCollate:
    """The collate function of a loader over a `ShardedStream`."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, data: Element | list[Element]) -> Counted:
        """The counted batch of some elements, or of one where the dataset makes the batches."""
        if isinstance(data, Element):
            return Counted(self.collate_fn(data.sample), None if data.is_real else Rows(None, 0), data.mark)
        assert data[0].mark == data[-1].mark, "the batch size of the loader is the part of the rank"
        rows = Rows(len(data), sum([element.is_real for element in data]))
        return Counted(self.collate_fn([element.sample for element in data]), rows, data[0].mark)


class WorkerStart:
    """The `worker_init_fn` of a loader over a `StandIn`: the user's, shown its dataset."""

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Runs in each worker, once, before it begins."""
        info = get_worker_info()
        assert info is not None
        stream = info.dataset
        assert isinstance(stream, StandIn)
        stream.watched = watched = watch(info, stream.dataset)
        if self.worker_init_fn is None:
            return
        before = dict(getattr(stream.dataset, "__dict__", {}))
        self.worker_init_fn(worker_id)
        after = getattr(stream.dataset, "__dict__", {})
        changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        stream.splits_itself = "dataset" in watched.asked or changed


class WatchedInfo(torch_worker.WorkerInfo):
    """The result of `get_worker_info` in a worker of ours: `asked` are attributes that were read.

    `place` is which worker this is, and of how many; reading it is not noted.
    """

    __slots__ = ("asked", "place")

    asked: set[str]
    place: tuple[int, int]

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "asked", set())
        object.__setattr__(self, "place", (values["id"], values["num_workers"]))
        super().__init__(**values)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name != "asked":
            object.__getattribute__(self, "asked").add(name)
        return value


def watch(info: torch_worker.WorkerInfo, dataset: Any) -> WatchedInfo:
    """Watches what `get_worker_info` returns in this worker, and shows the user's dataset there.

    torch has no public way to do that. The process is a worker's, which does nothing else.
    """
    # A dataclass since torch 2.13; annotated before, too.
    values = {name: getattr(info, name) for name in torch_worker.WorkerInfo.__annotations__}
    watched = WatchedInfo(**{**values, "dataset": dataset})
    torch_worker._worker_info = watched
    assert get_worker_info() is watched
    return watched


class _Plan:
    """Numbers that the main process sets, and that its running workers read when they begin anew.

    A worker that begins for the first time takes `given`, which it got when it was started: by the
    time that it is up, the shared numbers may be those of a later iteration.
    """

    _NAMES = ("epoch", "skip", "fill", "read")

    def __init__(self) -> None:
        self.given: dict[str, int] = {}
        self._shared = torch.full((len(self._NAMES),), -1, dtype=torch.int64, device="cpu").share_memory_()

    def write(self, **numbers: int) -> None:
        self.given = {**self.given, **numbers}
        for name, number in numbers.items():
            self._shared[self._NAMES.index(name)] = number

    def read(self) -> dict[str, int]:
        values: list[int] = self._shared.tolist()
        return {name: value for name, value in zip(self._NAMES, values, strict=True) if value >= 0}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Plan:
        twin = _Plan()
        twin.write(**self.given)
        return twin


def _elements(piece: Piece, mark: Mark) -> Iterator[Element]:
    for place, sample in enumerate(piece.samples):
        yield Element(sample, place < piece.real, mark)

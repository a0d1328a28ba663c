"""Evaluates one loader after the other on one rank, and returns what each of them gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_core import Accelerator, set_seed
from accel_core.loading.index_source import length_of

SEED = 5


@dataclass(frozen=True)
class Case:
    """One evaluation.

    Args:
        samples: in the dataset.
        batch: the batch size of the loader; of `order="varying"` the largest.
        order: "in turn" or "shuffled" by torch's samplers; a batch sampler of the user's own of a "fixed" size, of "varying"
            sizes, or one that is "sized": says its `batch_size`.
        iterable: the dataset has no indices.
        kind: of sample: "number", "text", "record" (collated to a dict of a tensor and a list), "list" (a collate function
            returns the samples as they are) or "ragged" (tensors of different lengths).
    """

    samples: int
    batch: int
    order: str = "in turn"
    drop_last: bool = False
    dispatch: bool = False
    iterable: bool = False
    split: bool = False
    even: bool = True
    kind: str = "number"
    workers: int = 0

    @property
    def may_end_apart(self) -> bool:
        """Whether a rank may get a batch less than another, so that nothing can be gathered in the loop.

        The stream of an iterable dataset that every rank reads by itself is always filled up.
        """
        return not self.even and (self.dispatch or not self.iterable)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case.

    Args:
        gathered: the ids of `gather_for_metrics`, step by step; empty where ranks may end at different steps.
        read: the ids in the batches of this rank.
        length: `len(loader)`; None if it has none.
    """

    gathered: list[list[int]]
    read: list[list[int]]
    length: int | None


class Records(Dataset[Any]):
    """Sample i says i, in the way of a kind."""

    def __init__(self, count: int, kind: str) -> None:
        self.count, self.kind = count, kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return MAKERS[self.kind](index)


class Stream(IterableDataset[Any]):
    """The same samples without indices."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return map(self.records.__getitem__, range(len(self.records)))


class OwnBatches:
    """A batch sampler of the user's own, without attributes that anybody expects."""

    def __init__(self, lists: Sequence[list[int]]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._lists)


class SizedBatches(OwnBatches):
    """One that says its size and its length."""

    def __init__(self, lists: Sequence[list[int]], batch_size: int) -> None:
        super().__init__(lists)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self._lists)


MAKERS: dict[str, Callable[[int], Any]] = {
    "number": lambda i: i,
    "text": str,
    "record": lambda i: {"id": torch.tensor([i, -i]), "name": f"sample {i}"},
    "list": lambda i: [i, {"name": str(i)}],
    "ragged": lambda i: torch.full((i % 3 + 1,), i),
}


def batches_of(samples: int, sizes: Sequence[int]) -> list[list[int]]:
    """The ids 0 to `samples` - 1, cut into lists of these sizes in turn."""
    lists: list[list[int]] = []
    start = 0
    while start < samples:
        stop = min(start + sizes[len(lists) % len(sizes)], samples)
        lists.append(list(range(start, stop)))
        start = stop
    return lists


def varying(largest: int) -> list[int]:
    """Sizes of batches up to the largest, small and large ones in turn."""
    return [size for pair in zip(range(largest, 0, -1), range(1, largest + 1), strict=True) for size in pair]


def loader_of(case: Case) -> DataLoader[Any]:
    """The loader, as a user builds it."""
    records = Records(case.samples, case.kind)
    options: dict[str, Any] = {"num_workers": case.workers, "multiprocessing_context": "fork"} if case.workers else {}
    if case.kind in ("list", "ragged"):
        options["collate_fn"] = list
    if case.order == "fixed":
        options["batch_sampler"] = OwnBatches(batches_of(case.samples, [case.batch]))
    elif case.order == "varying":
        options["batch_sampler"] = OwnBatches(batches_of(case.samples, varying(case.batch)))
    elif case.order == "sized":
        options["batch_sampler"] = SizedBatches(batches_of(case.samples, [case.batch]), case.batch)
    else:
        options.update(batch_size=case.batch, drop_last=case.drop_last, shuffle=case.order == "shuffled" or None)
    return DataLoader(Stream(records) if case.iterable else records, **options)


def gathered_ids(accelerator: Accelerator, batch: Any, kind: str) -> list[int]:
    """The ids of the batch on all ranks."""
    gathered = accelerator.gather_for_metrics
    if kind == "number":
        return gathered(batch).tolist()
    if kind == "text":
        return [int(text) for text in gathered(batch)]
    if kind == "list":
        return [number for number, _ in gathered(batch)]
    if kind == "ragged":
        return [ragged_id(row) for row in gathered(batch, use_gather_object=True)]
    rows, names = gathered(batch["id"]), gathered(batch["name"])
    assert names == [f"sample {number}" for number in rows[:, 0].tolist()]
    return rows[:, 0].tolist()


def ids(batch: Any, kind: str) -> list[int]:
    """The ids of a batch of this rank."""
    if kind == "number":
        return batch.tolist()
    if kind == "record":
        return batch["id"][:, 0].tolist()
    return [ragged_id(row) if kind == "ragged" else int(row if kind == "text" else row[0]) for row in batch]


def ragged_id(row: torch.Tensor) -> int:
    """The id of a ragged sample; its length has to go with it."""
    number = int(row[0])
    assert row.tolist() == [number] * (number % 3 + 1)
    return number


def evaluated(case: Case) -> Outcome:
    """The outcome of a case on this rank."""
    set_seed(SEED)
    accelerator = Accelerator(
        cpu=True, split_batches=case.split, even_batches=case.even, dispatch_batches=case.dispatch
    )
    loader = accelerator.prepare(loader_of(case))
    gathered, read = [], []
    for batch in loader:
        read.append(ids(batch, case.kind))
        if not case.may_end_apart:
            gathered.append(gathered_ids(accelerator, batch, case.kind))
    return Outcome(gathered, read, length_of(loader))


def outcomes(cases: Sequence[Case]) -> list[Outcome]:
    """The outcomes of all cases on this rank."""
    found = []
    for case in cases:
        try:
            found.append(evaluated(case))
        except Exception as error:  # the others may go on with a collective of the next case, and wait for ever
            raise RuntimeError(f"{case} raised {type(error).__name__}: {error}") from error
    return found

"""Dispatched loaders on real ranks: what one rank raises, and ranks that part ways."""

from __future__ import annotations

import itertools

import pytest
import torch
from dispatched_loaders import Items, Opaque, dispatched, in_order, real, taken
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_core import Feed, World
from accel_testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


class Failing(Dataset):
    def __init__(self, at):
        self.at = at

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == self.at:
            raise LookupError(f"sample {index} is broken")
        return index


class FailingStream(IterableDataset):
    def __init__(self, at):
        self.at = at

    def __iter__(self):
        yield from range(self.at)
        raise LookupError(f"sample {self.at} is broken")


def unsendable(ids):
    return (lambda: ids) if 11 in ids else torch.tensor(ids)


def uncuttable(batch, *_, **__):
    raise LookupError(f"{len(batch)} rows cannot be cut")


def what_is_raised(loader, **options):
    """What a rank has got before, and what it raises; afterwards another loader is read as if nothing had happened."""
    found, feed, text = [], Feed(), "nothing"
    try:
        for batch in dispatched(loader, feed, **options):
            found += [real(batch, feed)]
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    after = taken(dispatched(DataLoader(range(6), batch_size=2), feed), feed)
    return found, text, after


def failures():
    return {
        "first": what_is_raised(DataLoader(Failing(0), batch_size=2)),
        "later": what_is_raised(DataLoader(Failing(29), batch_size=2)),
        "later, by workers": what_is_raised(DataLoader(Failing(29), batch_size=2, num_workers=2)),
        "first of a stream": what_is_raised(DataLoader(FailingStream(0), batch_size=2)),
        "later in a stream": what_is_raised(DataLoader(FailingStream(30), batch_size=2)),
        "later in a stream, by a worker": what_is_raised(DataLoader(FailingStream(30), batch_size=2, num_workers=1)),
        "unsendable": what_is_raised(DataLoader(range(40), batch_size=2, collate_fn=unsendable)),
        "split": what_is_raised(DataLoader(Items([Opaque([0])]), batch_size=None), split_batches=True),
        "slice_fn": what_is_raised(DataLoader(range(40), batch_size=2), slice_fn=uncuttable),
        "not divisible": what_is_raised(DataLoader(range(40), batch_size=3), split_batches=True),
    }


@pytest.fixture(scope="module")
def failed():
    return run_ranks(failures, 2)


@pytest.mark.parametrize(("kind", "steps", "message"), [
    ("first", 0, "LookupError: sample 0 is broken"),
    ("later", 7, "LookupError: sample 29 is broken"),
    ("later, by workers", 7, "LookupError: Caught LookupError in DataLoader worker process"),
    ("first of a stream", 0, "LookupError: sample 0 is broken"),
    ("later in a stream", 7, "LookupError: sample 30 is broken"),
    ("later in a stream, by a worker", 7, "LookupError: Caught LookupError in DataLoader worker process"),
    ("slice_fn", 0, "LookupError: 4 rows cannot be cut"),
])  # fmt: skip
def test_all_ranks_raise_what_one_raises_after_the_batches_before(failed, kind, steps, message):
    (mine, text, after), (others, quoted, after_there) = (by_rank[kind] for by_rank in failed)
    assert text.startswith(message)
    assert quoted.startswith("RuntimeError: The next batch was asked for from rank 0")
    assert message in quoted
    assert in_order([mine, others]) == list(range(4 * steps))
    assert (after, after_there) == ([[0, 1], [4]], [[2, 3], [5]])


@pytest.mark.parametrize(("kind", "message", "before"), [
    ("unsendable", "cannot be pickled", [[[0, 1]], [[2, 3]]]),
    ("split", "cannot be cut into", [[], []]),
    ("not divisible", "split_batches=True cuts each batch into 2 equal pieces, but batch_size=3", [[], []]),
])  # fmt: skip
def test_all_ranks_raise_for_a_batch_that_cannot_be_shared_out(failed, kind, message, before):
    for by_rank, parts in zip(failed, before, strict=True):
        found, text, after = by_rank[kind]
        assert message in text
        assert found == parts
        assert len(after) == 2


def epochs_apart(leaving):
    """The rank `leaving` breaks out before the other, and begins another epoch."""
    loader = dispatched(DataLoader(range(40), batch_size=2), Feed())
    if World.current().rank == leaving:
        next(iter(loader))
        return attempt(lambda: next(iter(loader)))
    return attempt(lambda: list(itertools.islice(loader, 2)))


def loaders_apart():
    """One rank leaves its loop early, and goes on with another loader."""
    loader, other = (dispatched(DataLoader(range(n), batch_size=2), Feed()) for n in (40, 50))
    if World.current().rank == 0:
        return list(itertools.islice(other, 1))
    return attempt(lambda: next(iter(loader)))


def attempt(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("leaving", [0, 1])
def test_leaving_a_loop_at_different_batches_is_an_error_on_the_rank_that_receives(leaving):
    messages = run_ranks(epochs_apart, 2, leaving)
    assert "The ranks left the loop at different batches" in messages[1]
    assert messages[0] is None


def test_batches_of_another_loader_are_never_taken_for_those_of_this_one():
    assert "The ranks iterate over different loaders" in run_ranks(loaders_apart, 2)[1]

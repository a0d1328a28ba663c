"""Dispatched loaders on real ranks: where they stand, and how they go on."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from dispatched_loaders import Sizes, StatefulStream, Stream, dispatched, in_order, real, taken
from torch.utils.data import DataLoader, Sampler

from accel_core import Feed, World
from accel_core.api.component import broadcast_object
from accel_data import skip_first_batches
from accel_testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

LOADERS = {
    "in order": lambda: DataLoader(range(26), batch_size=2),
    "shuffled": lambda: DataLoader(range(26), batch_size=2, shuffle=True),
    "workers": lambda: DataLoader(range(26), batch_size=2, shuffle=True, num_workers=2),
    "batch sampler": lambda: DataLoader(range(26), batch_sampler=Sizes(*[2] * 13)),
    "stream": lambda: DataLoader(Stream(26), batch_size=2),
    "stateful stream": lambda: DataLoader(StatefulStream(26), batch_size=2),
    "generator": lambda: DataLoader(
        range(26), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(World.current().rank)
    ),
}
WITH_WORKERS = {0, 3, 8}
"""After which steps runs with workers, which take long to start, are resumed."""


def whole_run():
    """Two epochs; and the states in the second one, after each of its steps, as this rank has them."""
    found = {}
    for kind, make in LOADERS.items():
        feed = Feed()
        loader = dispatched(make(), feed, seed=2**40)
        first = taken(loader, feed)
        states, second = [loader.state_dict()], []
        for batch in loader:
            second.append(real(batch, feed))
            states.append(loader.state_dict())
        states.append(loader.state_dict())
        found[kind] = first, second, states, taken(loader, feed)
    return found


def resumed_run(states):
    """What a state leaves of its epoch, and the next epoch."""
    found = {}
    for kind, saved in states.items():
        for at, state in enumerate(saved):
            if kind == "workers" and at not in WITH_WORKERS:
                continue
            feed = Feed()
            loader = dispatched(LOADERS[kind](), feed, seed=2**41)
            loader.load_state_dict(state)
            assert loader.state_dict()["samples"] == state["samples"]
            found[kind, at] = taken(loader, feed), taken(loader, feed)
    return found


@pytest.fixture(scope="module")
def whole():
    return run_ranks(whole_run, 2)


def test_states_count_what_all_ranks_have_yielded(whole):
    numbers = ("epoch", "samples", "seed", "loader", "length")
    for kind in LOADERS:
        states, there = (by_rank[kind][2] for by_rank in whole)
        for state, other in zip(states, there, strict=True):
            assert [state[name] for name in numbers] == [other[name] for name in numbers], kind
        assert [(state["epoch"], state["samples"]) for state in states] == [
            (1, 0), *[(1, min(4 * step, 26)) for step in range(1, 8)], (2, 0)
        ], kind  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("saved_by", [0, 1])
def test_any_number_of_ranks_goes_on_where_the_state_was_taken(whole, saved_by, ranks):
    """With the state of any rank, but for generators and datasets whose states only the first rank has."""
    kinds = [kind for kind in LOADERS if saved_by == 0 or kind != "generator"]
    found = run_ranks(resumed_run, ranks, {kind: whole[saved_by][kind][2] for kind in kinds})
    for kind in kinds:
        epochs = [in_order([by_rank[kind][part] for by_rank in whole]) for part in (0, 1, 3)]
        assert sorted(epochs[1]) == list(range(26)), kind
        for at, state in enumerate(whole[saved_by][kind][2]):
            if (kind, at) not in found[0]:
                continue
            rest, following = (in_order([by_rank[kind, at][part] for by_rank in found]) for part in (0, 1))
            assert rest == epochs[state["epoch"]][state["samples"] :], (kind, at)
            assert state["epoch"] == 2 or following == epochs[2], (kind, at)


def interleaved():
    loader, again = (dispatched(DataLoader(range(10), batch_size=2, shuffle=True), Feed()) for _ in range(2))
    found = []
    for one, other in zip(loader, loader):  # noqa: B905  (they end alike)
        found.append((one.tolist(), other.tolist(), loader.state_dict()["samples"]))
    return found, [[batch.tolist() for batch in again] for _ in range(2)]


def test_two_iterations_at_a_time_are_two_epochs():
    """The position is that of the one that was begun last."""
    for pairs, (first, second) in run_ranks(interleaved, 2):
        assert [one for one, _, _ in pairs] == first
        assert [other for _, other, _ in pairs] == second
        assert [samples for _, _, samples in pairs] == [4, 8, 10]


def begun_again():
    """What this rank has of an epoch; and of one that is begun again where it was left, by kind."""
    found = {}
    for kind in ("in order", "shuffled", "stream", "stateful stream"):
        feed = Feed()
        loader = dispatched(LOADERS[kind](), feed, seed=2**40)
        whole, states = [], []
        for batch in loader:
            whole.append(real(batch, feed))
            states.append(loader.state_dict())
        feed = Feed()
        other = dispatched(LOADERS[kind](), feed, seed=2**40)
        other.load_state_dict(states[2])
        other.restart_epoch()
        found[kind] = whole, taken(other, feed)
    return found


def epochs_begun_again():
    """The epochs that this rank begins behind each of three batches, where it stands and in a new run; by kind."""
    found = {}
    for kind, data in (("map", range), ("stream", Stream), ("stateful stream", StatefulStream)):
        here, anew = [], []
        for behind in range(1, 4):
            left, resumed = (
                dispatched(DataLoader(data(30), batch_size=4, drop_last=True), Feed(), seed=2**40) for _ in range(2)
            )
            for _ in itertools.islice(left, behind):
                pass
            resumed.load_state_dict(broadcast_object(left.state_dict(), World.current(), 0))
            for loader, epochs in ((left, here), (resumed, anew)):
                loader.restart_epoch()
                epochs.append(loader.state_dict()["epoch"])
        found[kind] = here, anew
    return found


def test_an_epoch_whose_last_batches_are_dropped_has_ended_behind_the_last_that_is_sent():
    for found in run_ranks(epochs_begun_again, 2):
        assert found == dict.fromkeys(("map", "stream", "stateful stream"), ([0, 0, 1], [0, 0, 1]))


def test_an_epoch_is_begun_again_on_all_ranks():
    for found in run_ranks(begun_again, 2):
        for kind, (whole, again) in found.items():
            assert again == whole, kind


class Drawn(Sampler):
    """Draws an order of its own, from torch's stream."""

    def __iter__(self):
        return iter(torch.randperm(9).tolist())

    def __len__(self):
        return 9


class Doubling(DataLoader):
    """Iterates in its own way."""

    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


class Augmented:
    """Draws for each sample."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()), random.random()])


SHORT = {
    "stream": lambda: DataLoader(Stream(9), batch_size=2),
    "in order": lambda: DataLoader(range(9), batch_size=2),
    "shuffled": lambda: DataLoader(range(9), batch_size=2, shuffle=True),
    "workers": lambda: DataLoader(range(9), batch_size=2, shuffle=True, num_workers=1),
    "generator": lambda: DataLoader(
        range(9), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(World.current().rank)
    ),
    "own sampler": lambda: DataLoader(range(9), batch_size=2, sampler=Drawn()),
    "own loader": lambda: Doubling(range(9), batch_size=2, shuffle=True),
    "batch sampler": lambda: DataLoader(range(9), batch_sampler=Sizes(2, 2, 2, 2, 1, batch_size=2)),
    "varying": lambda: DataLoader(range(9), batch_sampler=Sizes(1, 2, 3, 2, 1)),
    "ready batches": lambda: DataLoader([torch.tensor([i, i + 10]) for i in range(5)], batch_size=None),
}
"""Epochs whose last step is filled up, on two ranks."""


def filled_behind_a_position():
    """This rank's batches of such an epoch, and of the next: whole, and behind a state; and behind skipped batches."""
    found = {}
    for kind, split in itertools.product(SHORT, (False, True)):
        if split and kind in ("varying", "ready batches"):
            continue
        loader, again, skipping = (dispatched(SHORT[kind](), Feed(), split_batches=split, seed=2**40) for _ in range(3))
        batches = iter(loader)
        first = next(batches)
        state = broadcast_object(loader.state_dict(), World.current(), 0)
        whole = [first.tolist(), *(batch.tolist() for batch in batches)]
        again.load_state_dict(state)
        behind, skipped = (
            [batch.tolist() for batch in rest] for rest in (again, skip_first_batches(skipping, len(whole) - 1))
        )
        following, resumed = ([batch.tolist() for batch in epoch] for epoch in (loader, again))
        found[kind, split] = whole, behind, skipped, following, resumed
    return found


def test_an_epoch_that_goes_on_fills_its_last_step_from_its_first_samples():
    there = run_ranks(filled_behind_a_position, 2)
    assert [there[1]["stream", split][0][-1] for split in (False, True)] == [[0], [0]]
    for found in there:
        for kind, (whole, behind, skipped, following, resumed) in found.items():
            assert behind == whole[1:], kind
            assert skipped == whole[-1:], kind
            assert resumed == following, kind


def draws_behind_a_position():
    """The random numbers behind a resumed epoch, whose last step is filled up or not."""
    found = []
    for even in (False, True):
        loader = dispatched(DataLoader(Augmented(), batch_size=2), Feed(), even_batches=even, seed=2**40)
        torch.manual_seed(3)
        random.seed(3)
        for _ in skip_first_batches(loader, 1):
            pass
        found.append((torch.rand(()).item(), random.random()))
    return found


def test_reading_the_first_samples_again_draws_no_random_numbers_of_the_run():
    for short, filled in run_ranks(draws_behind_a_position, 2):
        assert filled == short

"""Skipping by hand behind a loaded state: batches are counted from the beginning of the epoch, and never left out twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from accel_core import Accelerator, Feed, Shard, gather_object
from accel_data import DataLoaderDispatcher, DataLoaderShard, Sharded, skip_first_batches
from accel_testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

N = 37
DONE = 3
"""The batches of the second epoch that were done when the state was taken."""


class Varying:
    """A batch sampler of the user's own, without attributes, that draws from the global streams."""

    def __iter__(self):
        indices = iter(torch.randperm(N).tolist())
        for size in itertools.cycle((3, 1, 4)):
            batch = list(itertools.islice(indices, size))
            if not batch:
                return
            yield batch


class Stream(IterableDataset):
    """Each epoch yields other samples."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (100 * self.epoch + i for i in range(N))


class Standing(IterableDataset):
    """Begins a pass where it stands, and only its state says which pass it is in."""

    def __init__(self):
        self.at = self.passes = self.read = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            self.read += 1
            yield 100 * self.passes + self.at - 1
        self.at = 0
        self.passes += 1

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.at, self.passes = state["at"], state["passes"]


class Told(Standing):
    """Takes the number of its pass from the loader."""

    def set_epoch(self, epoch):
        self.passes = epoch


class Own(DataLoader):
    """A class that iterates in its own way."""

    def __iter__(self):
        yield from super().__iter__()


class Remembering(DataLoader):
    """A class that keeps a position of its own."""

    done = 0

    def __iter__(self):
        for batch in itertools.islice(super().__iter__(), self.done, None):
            self.done += 1
            yield batch
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def generator():
    return torch.Generator().manual_seed(5)


MAP = {
    "in order": lambda **options: DataLoader(range(N), batch_size=3, **options),
    "shuffled": lambda **options: DataLoader(range(N), batch_size=3, shuffle=True, **options),
    "sampler": lambda **options: DataLoader(
        range(N), batch_size=3, sampler=SubsetRandomSampler(range(N), generator()), **options
    ),
    "batch sampler": lambda **options: DataLoader(range(N), batch_sampler=Varying(), **options),
    "own class": lambda **options: Own(range(N), batch_size=3, shuffle=True, **options),
}
LOADERS = {**MAP, "stream": lambda **options: DataLoader(Stream(), batch_size=3, **options)}


def prepare(loader, rank=0, ranks=1, *, feed=None, seed=2**40):
    """Seeds above 2**32 are those of runs that set none."""
    return Sharded().prepare_loader(loader, Shard(rank, ranks), feed or Feed(), None, seed)


def ids(loader):
    return [batch.tolist() for batch in loader]


def saved_in_the_second_epoch(loader, done=DONE, epochs=3):
    """The batches of whole epochs, and the state behind so many batches of the second."""
    whole, state = [], None
    for epoch in range(epochs):
        whole.append([])
        for step, batch in enumerate(loader, start=1):
            whole[-1].append(batch.tolist())
            if (epoch, step) == (1, done):
                state = loader.state_dict()
    return whole, state


def an_epoch(accelerator, loader):
    """Each batch of all ranks as metrics see it, with the state behind it."""
    return [(accelerator.gather_for_metrics(batch).tolist(), loader.state_dict()) for batch in loader]


def skipped_on_ranks(worker_counts, dispatching, numbers):
    """What an uninterrupted run gives, and what a run that has loaded its state and skips by hand gives, case by case."""
    found = {}
    for kind, dispatched, workers in itertools.product(LOADERS, dispatching, worker_counts):
        # Without workers that persist, each rank would start them for each of the iterations.
        options = {"num_workers": workers, "persistent_workers": True} if workers else {}

        def begin(kind=kind, dispatched=dispatched, options=options):
            accelerator = Accelerator(cpu=True, dispatch_batches=dispatched)
            return accelerator, accelerator.prepare(LOADERS[kind](**options))

        accelerator, loader = begin()
        whole = [an_epoch(accelerator, loader) for _ in range(3)]
        batches = [[batch for batch, _ in epoch] for epoch in whole]
        (_, state), *_ = gather_object([whole[1][DONE - 1]])
        for number in numbers:
            accelerator, loader = begin()
            loader.load_state_dict(state)
            twin = accelerator.skip_first_batches(loader, number)
            first = DONE if number == 0 else number
            rest = an_epoch(accelerator, twin)
            following = [batch for batch, _ in an_epoch(accelerator, loader)]
            samples = [inside["samples"] for _, inside in rest]
            expected = [inside["samples"] for _, inside in whole[1][first:]]
            found[kind, dispatched, workers, number] = (
                ([batch for batch, _ in rest], samples, following),
                (batches[1][first:], expected, batches[2]),
            )
            if number == 1:
                accelerator, loader = begin()
                loader.load_state_dict(gather_object([rest[0][1]])[0])
                again = [batch for batch, _ in an_epoch(accelerator, loader)]
                found[kind, dispatched, workers, "from inside"] = (again, batches[1][2:])
    return found


@pytest.mark.parametrize(("ranks", "dispatching"), [(1, (False,)), (2, (True, False))])
@pytest.mark.parametrize(
    ("worker_counts", "numbers"),
    [((0,), (0, 1, DONE, DONE + 2, 100)), pytest.param((2,), (1, DONE), marks=pytest.mark.full)],
)
def test_a_script_that_loads_and_skips_lands_where_its_count_says(ranks, dispatching, worker_counts, numbers):
    """Behind a state of the second epoch: what is left, what metrics and positions see, and that the next epoch is whole."""
    for found in run_ranks(skipped_on_ranks, ranks, worker_counts, dispatching, numbers, timeout=200):
        for case, (got, expected) in found.items():
            assert got == expected, case


class Counting(Dataset):
    """Remembers what was read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.read.append(index)
        return index


SAMPLERS = {
    "shuffled": lambda dataset: DataLoader(dataset, batch_size=3, shuffle=True),
    "generator": lambda dataset: DataLoader(dataset, batch_size=3, shuffle=True, generator=generator()),
    "batch sampler": lambda dataset: DataLoader(dataset, batch_sampler=Varying()),
}


@pytest.mark.parametrize("number", [0, 1, DONE, 5])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samples_that_have_indices_are_not_read(kind, number):
    whole, state = saved_in_the_second_epoch(prepare(SAMPLERS[kind](Counting()), 1, 2))
    dataset = Counting()
    loader = prepare(SAMPLERS[kind](dataset), 1, 2)
    loader.load_state_dict(state)
    expected = whole[1][number or DONE :]
    assert ids(skip_first_batches(loader, number)) == expected
    assert dataset.read == list(itertools.chain(*expected))
    assert ids(loader) == whole[2]


@pytest.mark.parametrize("number", [1, 4, 6])
@pytest.mark.parametrize("kind", MAP)
def test_on_another_number_of_ranks_their_own_batches_are_counted(kind, number):
    """Also where the position lies inside one of them."""
    _, state = saved_in_the_second_epoch(prepare(MAP[kind](), 2, 3), done=1)
    for rank in range(2):
        loader = prepare(MAP[kind](), rank, 2)
        loader.load_state_dict({**state, "samples": 0})
        whole = [ids(loader), ids(loader)]
        loader = prepare(MAP[kind](), rank, 2)
        loader.load_state_dict(state)
        assert ids(skip_first_batches(loader, number)) == whole[0][number:]
        assert ids(loader) == whole[1]


def test_a_loaded_position_is_used_up_by_one_iteration():
    """Later ones of the copy leave out the first batches of their own epochs, as ever."""
    whole, state = saved_in_the_second_epoch(prepare(MAP["shuffled"]()), epochs=4)
    loader = prepare(MAP["shuffled"]())
    loader.load_state_dict(state)
    twin = skip_first_batches(skip_first_batches(loader, 1), 1)
    assert [ids(twin), ids(twin), len(twin)] == [whole[1][2:], whole[2][2:], len(whole[1]) - 2]
    assert ids(loader) == whole[3]


def test_nothing_is_used_up_before_the_copy_is_advanced():
    whole, state = saved_in_the_second_epoch(prepare(MAP["sampler"]()))
    loader = prepare(MAP["sampler"]())
    loader.load_state_dict(state)
    iter(skip_first_batches(loader, 1))
    assert loader.state_dict()["samples"] == state["samples"]
    assert ids(loader) == whole[1][DONE:]


def test_copies_that_were_made_before_take_the_seed_that_comes_with_a_state():
    """Neither run has set one, so the order is that of the state."""
    whole, state = saved_in_the_second_epoch(prepare(MAP["shuffled"]()))
    for number in (0, 2):
        loader = prepare(MAP["shuffled"](), seed=2**41)
        twin = skip_first_batches(loader, number)
        loader.load_state_dict(state)
        assert ids(twin) == whole[1][number or DONE :]
        assert ids(loader) == whole[2]


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
@pytest.mark.parametrize("dataset", [range(20), Stream()])
def test_a_loader_that_was_constructed_to_skip_goes_on_where_its_state_was_taken(kind, dataset):
    """The rest of an epoch leaves out nothing more; the epochs behind it leave out their first batches."""

    def make():
        return kind(dataset, batch_size=4, skip_batches=1)

    loader = make()
    whole, state = saved_in_the_second_epoch(loader, done=2)
    resumed = make()
    resumed.load_state_dict(state)
    assert [ids(resumed), ids(resumed)] == [whole[1][2:], whole[2]]
    resumed = make()
    resumed.load_state_dict(state)
    assert ids(skip_first_batches(resumed, 1)) == whole[1][1:]


REFUSED = (
    r"skip_first_batches\(num_batches=2\) counts from the beginning of the epoch, but {dataset} cannot be read from there: "
    r"a state was loaded behind 9 samples of epoch {epoch}.*Leave the skip out"
)


@pytest.mark.parametrize("number", [DONE, DONE + 1, 100])
def test_a_dataset_with_a_state_goes_on_to_the_batch_that_is_asked_for(number):
    """It is not read up to the position, also where only its state knows the epoch."""
    whole, state = saved_in_the_second_epoch(prepare(DataLoader(Standing(), batch_size=3)))
    dataset = Standing()
    loader = prepare(DataLoader(dataset, batch_size=3))
    loader.load_state_dict(state)
    assert ids(skip_first_batches(loader, number)) == whole[1][number:]
    assert dataset.read == N - 3 * DONE
    assert ids(loader) == whole[2]


def test_behind_the_last_batch_nothing_is_left_of_a_dataset_with_a_state():
    (_, last, _), state = saved_in_the_second_epoch(prepare(DataLoader(Standing(), batch_size=3)), done=13)
    assert len(last) == 13
    for number in (13, 14):
        loader = prepare(DataLoader(Standing(), batch_size=3))
        loader.load_state_dict(state)
        assert ids(skip_first_batches(loader, number)) == []
        assert ids(loader)[0] == [200, 201, 202]


def test_a_dataset_with_a_state_is_read_from_its_beginning_while_it_stands_there():
    """Which is the beginning of the epoch if it is told which, or if this is the first."""
    whole, state = saved_in_the_second_epoch(prepare(DataLoader(Told(), batch_size=3)))
    loader = prepare(DataLoader(Told(), batch_size=3))
    loader.load_state_dict(state)
    assert ids(skip_first_batches(loader, 2)) == whole[1][2:]
    assert ids(loader) == whole[2]
    loader = prepare(DataLoader(Standing(), batch_size=3))
    list(itertools.islice(loader, DONE))
    state = loader.state_dict()
    loader = prepare(DataLoader(Standing(), batch_size=3))
    loader.load_state_dict(state)
    assert ids(skip_first_batches(loader, 2))[0] == [6, 7, 8]
    assert ids(loader)[0] == [100, 101, 102]


def test_a_dataset_whose_state_alone_knows_the_epoch_is_not_taken_back():
    """The loader itself goes on."""
    whole, state = saved_in_the_second_epoch(prepare(DataLoader(Standing(), batch_size=3)))
    loader = prepare(DataLoader(Standing(), batch_size=3))
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=REFUSED.format(dataset="Standing", epoch=1)):
        iter(skip_first_batches(loader, 2))
    assert [ids(loader), ids(loader)] == [whole[1][DONE:], whole[2]]


def test_a_dataset_that_was_given_its_state_already_is_not_taken_back():
    whole, state = saved_in_the_second_epoch(prepare(DataLoader(Told(), batch_size=3)))
    loader = prepare(DataLoader(Told(), batch_size=3))
    loader.load_state_dict(state)
    iter(loader)
    with pytest.raises(ValueError, match=REFUSED.format(dataset="Told", epoch=1)):
        iter(skip_first_batches(loader, 2))
    assert ids(loader) == whole[1][DONE:]


def stateful_on_ranks():
    """For streams with a state, dispatched or read by every rank: the rest of the epoch, and what is said of a way back."""
    found = []
    for dispatched in (True, False):

        def begin(dispatched=dispatched):
            accelerator = Accelerator(cpu=True, dispatch_batches=dispatched)
            return accelerator, accelerator.prepare(DataLoader(Standing(), batch_size=3))

        accelerator, loader = begin()
        whole = [an_epoch(accelerator, loader) for _ in range(3)]
        state, *_ = gather_object([whole[1][DONE - 1][1]])
        for number in (DONE, DONE + 1, 2):
            accelerator, loader = begin()
            loader.load_state_dict(state)
            twin = accelerator.skip_first_batches(loader, number)
            try:
                rest = [batch for batch, _ in an_epoch(accelerator, twin)]
            except (ValueError, RuntimeError) as error:
                rest = str(error)
            found.append((number, rest, [batch for batch, _ in whole[1][number:]]))
    return found


def test_streams_with_a_state_are_exact_or_refused_on_every_rank():
    for found in run_ranks(stateful_on_ranks, 2):
        for number, rest, expected in found:
            if number < DONE:
                assert "Standing cannot be read from there: a state was loaded behind 18 samples of epoch 1" in rest
            else:
                assert rest == expected


def as_they_are(samples):
    return samples


def lists_on_ranks():
    """Lists of samples, each of which has as many numbers as samples were read with the first batch that is not left out."""
    accelerator = Accelerator(cpu=True, dispatch_batches=True)
    samples = [torch.full((6 * DONE + 3,), float(number)) for number in range(N)]
    loader = accelerator.prepare(Own(samples, batch_size=3, collate_fn=as_they_are))
    twin = accelerator.skip_first_batches(loader, DONE)
    return [[[int(sample[0]) for sample in batch] for batch in each] for each in (loader, twin)]


def test_what_was_left_out_is_no_row_of_the_batch_behind_it():
    """What fills up the last batch is what was read first."""
    for whole, rest in run_ranks(lists_on_ranks, 2):
        assert rest[:-1] == whole[DONE:-1]
        assert len(rest[-1]) == len(whole[-1]) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_class_with_a_state_goes_on_to_the_batch_that_is_asked_for(workers):
    def make():
        return prepare(Remembering(Stream(), batch_size=3, num_workers=workers))

    whole, state = saved_in_the_second_epoch(make())
    assert state["stream"]["state"] == {"done": DONE}
    for number in (0, 1, DONE, DONE + 1):
        loader = make()
        loader.load_state_dict(state)
        assert ids(skip_first_batches(loader, number)) == whole[1][number or DONE :]
        assert ids(loader) == whole[2]

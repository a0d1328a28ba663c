"""Iterable datasets that every rank reads: parts, padding, positions over ranks and workers, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from accel_core import Accelerator, Feed, Rows, Shard
from accel_data import DataLoaderConfiguration, DataLoaderShard, Sharded
from accel_testing.ranks import run_ranks

N = 23


def prepare(loader, rank=0, ranks=2, *, feed=None, **options):
    """In a process of its own a part ends by itself, so that one process can look at those of all ranks."""
    options = {"dispatch_batches": False, **options}
    return Sharded(**options).prepare_loader(loader, Shard(rank, ranks), feed or Feed(), None, 2**40)


class Stream(IterableDataset):
    """Does not know of workers."""

    def __init__(self, length=N):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Split(Stream):
    """Splits itself over the workers."""

    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, self.length, step))


class Stateful(Stream):
    def __init__(self):
        super().__init__()
        self.at = 0

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def parts(make, ranks, **options):
    """What each rank reads: its batches with their rows."""
    found = []
    for rank in range(ranks):
        feed = Feed()
        loader = prepare(make(), rank, ranks, feed=feed, **options)
        found.append([(batch.tolist(), feed.current_rows()) for batch in loader])
    return found


def order_of(found):
    """The real samples, rank after rank within each step."""
    return [
        sample
        for step in itertools.zip_longest(*found, fillvalue=([], Rows(0, 0)))
        for batch, rows in step
        for sample in batch[: rows.real]
    ]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stream_is_read_once_by_all_ranks_and_workers_in_its_order(ranks, workers):
    """Workers x ranks never duplicate."""
    found = parts(lambda: DataLoader(Stream(), batch_size=4, num_workers=workers), ranks)
    assert order_of(found) == list(range(N))
    assert len({len(batches) for batches in found}) == 1
    assert {len(batch) for batches in found for batch, _ in batches} == {4}


def test_a_stream_that_splits_itself_is_read_once():
    found = parts(lambda: DataLoader(Split(), batch_size=4, num_workers=2), 2)
    assert sorted(order_of(found)) == list(range(N))
    assert len({len(batches) for batches in found}) == 1


def test_split_batches_cuts_the_batch_of_the_loader():
    found = parts(lambda: DataLoader(Stream(10), batch_size=4), 2, split_batches=True)
    assert [[batch for batch, _ in batches] for batches in found] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]


def test_elements_that_are_batches_are_shared_out_whole():
    found = parts(lambda: DataLoader(Tensors(), batch_size=None), 2)
    assert found == [[([0], None), ([2, 2, 2], None)], [([1, 1], None), ([0], Rows(None, 0))]]


class Tensors(Stream):
    def __iter__(self):
        return iter(torch.full((n + 1,), n) for n in range(3))


class Doubling(DataLoader):
    """Looks at its batches, which are the user's."""

    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_loader_class_that_iterates_in_its_own_way_sees_its_own_batches(options):
    loader = prepare(Doubling(Stream(8), batch_size=2, **options), 1, 2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[4, 6], [12, 14]]
    assert isinstance(loader, Doubling)
    assert isinstance(loader, DataLoaderShard)


class Hasty(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


def test_a_loader_class_that_yields_more_batches_is_refused():
    with pytest.raises(RuntimeError, match="yielded more batches than it takes from .*Which of them are padded"):
        list(prepare(Hasty(Stream(8), batch_size=2)))


MAKERS = {
    "shared": lambda **options: DataLoader(Stream(), batch_size=2, **options),
    "split": lambda **options: DataLoader(Split(), batch_size=2, **options),
    "stateful": lambda **options: DataLoader(Stateful(), batch_size=2, **options),
}


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize(("kind", "workers", "presharded"), [
    ("shared", 0, False), ("shared", 2, False), ("split", 2, False), ("stateful", 0, False), ("stateful", 2, False),
    ("shared", 0, True), ("split", 2, True), ("stateful", 0, True),
])  # fmt: skip
def test_a_new_process_goes_on_inside_the_stream(kind, workers, presharded, steps):

    def make():
        return prepare(MAKERS[kind](num_workers=workers), 1, 2, presharded=presharded)

    whole = [batch.tolist() for batch in make()]
    saved = make()
    iterator = iter(saved)
    begun = [next(iterator).tolist() for _ in range(min(steps, len(whole)))]
    assert begun == whole[: len(begun)]
    state = saved.state_dict()
    assert (state["samples"] == 0) == (steps == 0)
    resumed = make()
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    filled = kind == "stateful" and not presharded  # from what it has read since, for the beginning is not read again
    assert [sorted(batch)[-1:] if filled else batch for batch in rest[:-1]] == [
        sorted(batch)[-1:] if filled else batch for batch in whole[len(begun) : -1]
    ]
    assert len(rest) == len(whole) - len(begun)
    assert [batch.tolist() for batch in resumed] == whole


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(4, 2), (2, 3), (2, 1)])
def test_any_number_of_ranks_goes_on_in_a_stream_that_all_see(saved_on, resumed_on):
    loaders = [prepare(MAKERS["shared"](), rank, saved_on) for rank in range(saved_on)]
    begun = [sample for loader in loaders for sample in next(iter(loader)).tolist()]
    state = {**loaders[0].state_dict(), "samples": len(begun), "epoch": 0}
    found = []
    for rank in range(resumed_on):
        feed = Feed()
        loader = prepare(MAKERS["shared"](), rank, resumed_on, feed=feed)
        loader.load_state_dict({**state, "workers": loader.state_dict()["workers"]})
        found.append([(batch.tolist(), feed.current_rows() or Rows(len(batch), len(batch))) for batch in loader])
    assert begun + order_of(found) == list(range(N))


def test_a_position_among_other_workers_of_a_stream_that_splits_itself_is_refused():
    saved = prepare(MAKERS["split"](num_workers=2))
    next(iter(saved))
    for workers in (0, 1):
        resumed = prepare(MAKERS["split"](num_workers=workers))
        resumed.load_state_dict({**saved.state_dict(), "epoch": 0})
        with pytest.raises(
            ValueError, match=r"A position in 2 stream\(s\) was loaded, but Split gives 1 here: .*num_workers"
        ):
            next(iter(resumed))


def test_a_position_inside_a_batch_of_a_stream_that_splits_itself_is_refused():
    saved = prepare(MAKERS["split"](num_workers=2))
    next(iter(saved))
    resumed = prepare(DataLoader(Split(), batch_size=3, num_workers=2))
    resumed.load_state_dict({**saved.state_dict(), "epoch": 0})
    with pytest.raises(
        ValueError, match="behind 4 samples of stream 0 was loaded, which lies inside a batch: .*at 0 and 6"
    ):
        next(iter(resumed))


def test_a_position_behind_the_end_of_a_stream_is_refused():
    loader = prepare(MAKERS["shared"]())
    loader.load_state_dict({**loader.state_dict(), "samples": 100})
    with pytest.raises(ValueError, match="behind 100 samples was loaded, but the dataset yields only 23"):
        next(iter(loader))


def test_a_position_in_streams_of_other_ranks_is_refused():
    saved = prepare(MAKERS["shared"](), presharded=True)
    next(iter(saved))
    with pytest.raises(
        ValueError, match="in the streams of 2 ranks that have their own, this loader goes on in those of 3 such"
    ):
        prepare(MAKERS["shared"](), 0, 3, presharded=True).load_state_dict(saved.state_dict())
    with pytest.raises(
        ValueError, match="in the streams of 2 ranks that have their own, this loader goes on in those of no such"
    ):
        prepare(MAKERS["shared"](), 0, 2).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("batch_size", "message"), [
    (3, "cuts each batch into 2 equal pieces, but batch_size=3 is not a multiple of 2. Use batch_size=4"),
    (None, "with batch_size=None the dataset makes the batches. Use split_batches=False"),
])  # fmt: skip
def test_batches_that_cannot_be_split_are_refused_at_once(batch_size, message):
    with pytest.raises(ValueError, match=message):
        prepare(DataLoader(Stream(), batch_size=batch_size), split_batches=True)


def test_each_rank_ends_by_itself_only_where_the_strategy_joins():
    loader = prepare(MAKERS["shared"](), uneven="join")
    with pytest.raises(
        RuntimeError, match=r"uneven='join' lets each rank end by itself, .*outside of join_uneven_inputs\(\)"
    ):
        next(iter(loader))
    feed = Feed()
    feed.joining = True
    assert len(list(prepare(MAKERS["shared"](), uneven="join", feed=feed))) == 6


def test_a_datapipe_is_refused():
    with pytest.raises(ValueError, match="over an IterDataPipe, which torch shares out among ranks itself"):
        prepare(DataLoader(IterableWrapper(range(4)), batch_size=2))


@pytest.mark.parametrize(("presharded", "expected"), [(False, "keeps its part"), (True, "a stream of its own")])
def test_a_stream_can_be_described(presharded, expected):
    loader = prepare(DataLoader(Sized(), batch_size=4), presharded=presharded)
    assert expected in str(loader.describe())
    assert loader.total_batch_size == 8
    assert loader.total_dataset_length == N
    assert len(loader) == len(list(loader))


class Sized(Stream):
    def __len__(self):
        return N


def test_a_stream_without_a_length_says_so():
    with pytest.raises(TypeError, match="Stream has no length. Give it a __len__"):
        len(prepare(MAKERS["shared"]()))


class Own(IterableDataset):
    """Another number of samples on each rank."""

    def __init__(self, counts, rank):
        self.counts, self.rank = counts, rank

    def __iter__(self):
        return iter(100 * self.rank + i for i in range(2 * self.counts[self.rank]))


def uneven_ranks(policy, counts):
    options = DataLoaderConfiguration(presharded=True, uneven=policy)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(Own(counts, accelerator.process_index), batch_size=2))
    found = []
    for _ in range(2):
        found.append([accelerator.gather_for_metrics(batch).tolist() for batch in loader])
        accelerator.wait_for_everyone()
    return found


@pytest.mark.timeout(120)
def test_ranks_with_five_three_and_no_batches_end_together():
    """Padding is gathered by nobody, and the second epoch is as the first."""
    expected = [[0, 1, 100, 101], [2, 3, 102, 103], [4, 5, 104, 105], [6, 7], [8, 9]]
    assert run_ranks(uneven_ranks, 3, "pad", (5, 3, 0)) == [[expected] * 2] * 3
    assert (
        run_ranks(uneven_ranks, 3, "stop", (5, 3, 2))
        == [[[[0, 1, 100, 101, 200, 201], [2, 3, 102, 103, 202, 203]]] * 2] * 3
    )


class OfEpoch(IterableDataset):
    """Other samples in each epoch, and as many as is said for the rank: None, and they never end."""

    epoch = 0

    def __init__(self, counts, rank):
        self.count, self.rank = counts[rank], rank

    def set_epoch(self, epoch):
        self.epoch = epoch

    def samples(self, start=0):
        places = itertools.count(start) if self.count is None else range(start, self.count)
        for place in places:
            self.at = place + 1
            yield 1000 * self.epoch + 100 * self.rank + place

    def __iter__(self):
        return self.samples()


class Restoring(OfEpoch):
    """A pass begins where a loaded state says, and otherwise at the beginning, as those of Hugging Face."""

    at = 0
    loaded = 0

    def __iter__(self):
        start, self.loaded = self.loaded, 0
        yield from self.samples(start)

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at = self.loaded = state["at"]
        self.epoch = state["epoch"]


class Counting(Restoring):
    """Counts its epochs itself."""

    set_epoch = None

    def __iter__(self):
        if not self.loaded:
            self.epoch += 1
        yield from super().__iter__()


class Continuing(Restoring):
    """A pass goes on where the one before was left."""

    def __iter__(self):
        yield from self.samples(self.at)
        self.at = 0

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def resumed_otherwise(policy, counts, kinds):
    """Three epochs, resumed on this rank behind each batch and between epochs; those that go on in another way."""
    options = DataLoaderConfiguration(presharded=True, uneven=policy)

    def prepared(kind):
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        dataset = kind(counts, accelerator.process_index)
        return accelerator, accelerator.prepare(DataLoader(dataset, batch_size=2))

    def taken(accelerator, batch):
        return accelerator.gather_for_metrics(batch).tolist()

    wrong = []
    for kind in kinds:
        accelerator, loader = prepared(kind)
        whole, states = [], []
        for _ in range(3):
            states.append((len(whole), loader.state_dict()))
            for batch in loader:
                whole.append(taken(accelerator, batch))
                states.append((len(whole), loader.state_dict()))
        for number, (behind, state) in enumerate(states):
            accelerator, loader = prepared(kind)
            loader.load_state_dict(state)
            rest = []
            for _ in range(loader.state_dict()["epoch"], 3):
                rest += [taken(accelerator, batch) for batch in loader]
            if rest != whole[behind:]:
                wrong.append((kind.__name__, number, behind, state, whole[behind:], rest))
    return wrong


@pytest.mark.timeout(120)
@pytest.mark.parametrize("counts", [(7, 4), (3, 9), (2, 9), (4, None)])
def test_a_stream_that_stops_with_a_shorter_one_is_resumed_as_it_went_on(counts):
    """What was cut off is not the beginning of the next epoch."""
    kinds = [OfEpoch, Restoring, Counting, Continuing]
    assert run_ranks(resumed_otherwise, 2, "stop", counts, kinds) == [[], []]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("counts", [(0, 7), (5, 0), (3, 8)])
def test_a_rank_whose_stream_ended_before_or_never_began_is_resumed(counts):
    kinds = [OfEpoch, Restoring, Counting, Continuing]
    assert run_ranks(resumed_otherwise, 2, "pad", counts, kinds) == [[], []]


def epochs_begun_again(policy, counts):
    """The epochs that this rank begins behind each batch of one epoch, resumed in a new run."""
    options = DataLoaderConfiguration(presharded=True, uneven=policy)

    def prepared():
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        return accelerator.prepare(DataLoader(Restoring(counts, accelerator.process_index), batch_size=2))

    left, epochs = prepared(), []
    for state in [left.state_dict() for _ in left]:
        loader = prepared()
        loader.load_state_dict(state)
        loader.restart_epoch()
        epochs.append(loader.state_dict()["epoch"])
    return epochs


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("policy", "counts"), [("pad", (0, 5)), ("pad", (2, 5)), ("stop", (9, 5))])
def test_an_epoch_of_streams_of_their_own_ends_on_all_ranks_with_its_last_batch(policy, counts):
    assert run_ranks(epochs_begun_again, 2, policy, counts) == [[0, 0, 1]] * 2

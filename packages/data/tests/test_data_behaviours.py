"""Orders, ends and settings of prepared loaders on real ranks, and what is refused on every one of them."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accel_core import Accelerator, set_seed
from accel_data import DataLoaderConfiguration, DataLoaderDispatcher, DataLoaderShard
from accel_testing.ranks import RanksFailed, run_ranks

WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


class Stream(IterableDataset):
    """Numbers, all of them in every worker."""

    def __init__(self, count, first=0):
        self.numbers = range(first, first + count)

    def __iter__(self):
        return iter(self.numbers)


class Divided(Stream):
    """Numbers that the workers divide among themselves."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers])


class Noisy(Dataset):
    """What an augmentation draws."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randint(2**40, ())


class BreaksOn(Dataset):
    """Cannot be read on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if os.environ["RANK"] == str(self.rank) and index > 20:
            raise LookupError(f"sample {index} is broken")
        return index


class StreamBreaksOn(IterableDataset):
    """The same without indices."""

    def __init__(self, rank):
        self.inner = BreaksOn(rank)

    def __iter__(self):
        return map(self.inner.__getitem__, range(len(self.inner)))


class Pairs:
    """A batch sampler with nothing but batches."""

    def __iter__(self):
        return iter([[0, 1], [2, 3], [4, 5], [6, 7], [8]])


class Flavoured(DataLoader):
    """A loader of the user's own, with an attribute."""

    def __init__(self, *args, flavour, **kwargs):
        super().__init__(*args, **kwargs)
        self.flavour = flavour


class Opaque:
    """A batch that nobody can cut."""

    def to(self, device):
        return self


def accelerator_of(**options):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def gathered(loader, accelerator):
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def flat(batches):
    return [number for batch in batches for number in batch]


RANKS, PART = 3, 2


def own_stream(rank, batches):
    """What a rank's dataset yields, if it is its own: enough for so many batches of the rank."""
    return Stream(batches * RANKS * PART, first=1000 * rank)


def own_batches(rank, batches):
    """The part of each step of its stream that a rank reads."""
    numbers = list(own_stream(rank, batches))
    return [numbers[(step * RANKS + rank) * PART :][:PART] for step in range(batches)]


def uneven_ends(lengths):
    rank = int(os.environ["RANK"])
    found = {}
    for policy in ("pad", "stop"):
        accelerator = accelerator_of(dispatch_batches=False, uneven=policy)
        loader = accelerator.prepare(DataLoader(own_stream(rank, lengths[rank]), PART))
        for epoch in range(2):
            found[policy, epoch] = gathered(loader, accelerator)
    return found


LENGTHS = ((5, 3, 0), (5, 3, 1), (0, 0, 2))


def all_uneven_ends():
    return [uneven_ends(lengths) for lengths in LENGTHS]


@pytest.mark.timeout(120)
def test_ranks_with_uneven_streams_end_as_the_policy_says():
    """In every epoch; what pads is not counted."""
    for by_lengths in run_ranks(all_uneven_ends, RANKS):
        for lengths, found in zip(LENGTHS, by_lengths, strict=True):
            parts = [own_batches(rank, length) for rank, length in enumerate(lengths)]
            steps = [[n for own in parts for n in flat(own[step : step + 1])] for step in range(max(lengths))]
            for epoch in range(2):
                assert found["pad", epoch] == steps, lengths
                assert found["stop", epoch] == steps[: min(lengths)], lengths


def joined_training(lengths):
    rank = int(os.environ["RANK"])
    accelerator = accelerator_of(dispatch_batches=False, uneven="join")
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader, model, optimizer = accelerator.prepare(DataLoader(own_stream(rank, lengths[rank]), PART), model, optimizer)
    read = []
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch[:, None].float()).mean())
            optimizer.step()
            read.append(batch.tolist())
    return read, model.module.weight.item()


@pytest.mark.timeout(120)
def test_ranks_with_uneven_streams_train_to_their_ends_inside_join():
    """Ranks with 5, 3 and 0 batches."""
    reports = run_ranks(joined_training, RANKS, (5, 3, 0))
    assert [read for read, _ in reports] == [own_batches(0, 5), own_batches(1, 3), []]
    assert len({weight for _, weight in reports}) == 1


def streams_with_workers():
    found = {}
    for dataset in (Stream(23), Divided(23)):
        for workers in (0, 1, 2, 3):
            accelerator = accelerator_of(dispatch_batches=False)
            options = {**WORKERS, "num_workers": workers} if workers else {}
            loader = accelerator.prepare(DataLoader(dataset, 2, **options))
            found[type(dataset).__name__, workers] = gathered(loader, accelerator)
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(Divided(23), 2, **WORKERS))
    found["dispatched", 2] = gathered(loader, accelerator)
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 3])
def test_workers_and_ranks_never_read_a_sample_twice(ranks):
    """Whether or not the dataset divides itself among the workers."""
    for found in run_ranks(streams_with_workers, ranks):
        assert len(found) == 9
        for batches in found.values():
            assert sorted(flat(batches)) == list(range(23))


def orders():
    """Ranks that draw differently from the global streams, as users do."""
    found = {}
    for dispatch in (False, True):
        set_seed(3)
        accelerator = accelerator_of(dispatch_batches=dispatch)
        loaders = [accelerator.prepare(DataLoader(range(24), 2, shuffle=True)) for _ in range(2)]
        random.seed(accelerator.process_index)
        torch.manual_seed(accelerator.process_index)
        for number, loader in enumerate(loaders):
            for epoch in range(2):
                read = []
                for batch in loader:
                    torch.rand(accelerator.process_index)
                    read.append(accelerator.gather_for_metrics(batch).tolist())
                found[dispatch, number, epoch] = flat(read)
    noisy = accelerator_of().prepare(DataLoader(Noisy(), 2, **WORKERS))
    return found, torch.cat(list(noisy)).tolist()


@pytest.mark.timeout(120)
def test_orders_differ_by_epoch_and_loader_and_augmentation_by_rank():
    """An order is not touched by what the user draws, nor by the way in which ranks come to their parts."""
    (first, draws), (second, others) = run_ranks(orders, 2)
    assert first == second
    shared = [first[False, number, epoch] for number in range(2) for epoch in range(2)]
    assert shared == [first[True, number, epoch] for number in range(2) for epoch in range(2)]
    assert all(sorted(order) == list(range(24)) for order in shared)
    assert len(set(map(tuple, shared))) == 4
    assert len({*draws, *others}) == 16


def what_survives():
    found = {}
    for kind, options in {"shard": {}, "dispatch": {"dispatch_batches": True}}.items():
        accelerator = accelerator_of(**options)
        original = Flavoured(range(9), batch_size=2, flavour="sweet", prefetch_factor=3, **WORKERS)
        before = dict(vars(original))
        loader = accelerator.prepare(original)
        found[kind, "batches"] = gathered(loader, accelerator)
        found[kind, "attributes"] = (loader.flavour, loader.prefetch_factor, loader.num_workers, loader.batch_size)
        found[kind, "class"] = (
            isinstance(loader, Flavoured),
            type(loader).__name__,
            accelerator.prepare(loader) is loader,
        )
        found[kind, "is ours"] = isinstance(loader, DataLoaderShard), isinstance(loader, DataLoaderDispatcher)
        found[kind, "original"] = vars(original) == before and type(original) is Flavoured
        for name, made in {
            "minimal": DataLoader(range(9), batch_sampler=Pairs()),
            "batches of the dataset": DataLoader([torch.arange(i, i + 3) for i in range(0, 15, 3)], batch_size=None),
        }.items():
            found[kind, name] = flat(gathered(accelerator.prepare(made), accelerator))
    return found


@pytest.mark.timeout(120)
def test_loaders_of_the_users_own_keep_class_attributes_and_samples():
    """Sharded and dispatched."""
    for found in run_ranks(what_survives, 2):
        for kind in ("shard", "dispatch"):
            assert found[kind, "batches"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
            assert found[kind, "attributes"] == ("sweet", 3, 2, 2)
            assert found[kind, "class"] == (True, "Flavoured", True)
            assert found[kind, "is ours"] == (kind == "shard", kind == "dispatch")
            assert found[kind, "original"]
            assert found[kind, "minimal"] == list(range(9))
            assert found[kind, "batches of the dataset"] == list(range(15))


def errors():
    """The error that each mistake gives on this rank, after which all ranks go on."""
    found = {}

    def of(name, mistake):
        with pytest.raises(Exception) as caught:
            mistake()
        found[name] = f"{type(caught.value).__name__}: {caught.value}"

    def loaded(change):
        set_seed(3)
        loader = Accelerator(cpu=True).prepare(DataLoader(range(8), 2, shuffle=True))
        loader.load_state_dict({**loader.state_dict(), **change})

    plain, stream = DataLoader(range(9), 3), DataLoader(Stream(9), 3)
    of("odd shard", lambda: accelerator_of(split_batches=True).prepare(plain))
    of("odd dispatch", lambda: accelerator_of(split_batches=True, dispatch_batches=True).prepare(plain))
    of("odd stream", lambda: accelerator_of(split_batches=True, dispatch_batches=False).prepare(stream))
    of("no size", lambda: accelerator_of(split_batches=True).prepare(DataLoader(range(9), batch_sampler=Pairs())))
    of("no length", lambda: len(Accelerator(cpu=True).prepare(DataLoader(range(9), batch_sampler=Pairs()))))
    of("no length, stream", lambda: len(Accelerator(cpu=True).prepare(stream)))
    of("length", lambda: loaded({"length": 9}))
    of("seed", lambda: loaded({"seed": 4}))
    of("negative", lambda: loaded({"samples": -1}))
    of("nonsense", lambda: loaded({"epoch": "first"}))
    of("join", lambda: next(iter(accelerator_of(dispatch_batches=False, uneven="join").prepare(stream))))
    opaque = DataLoader(range(8), 4, collate_fn=lambda samples: Opaque())
    of("opaque", lambda: next(iter(accelerator_of(split_batches=True, dispatch_batches=True).prepare(opaque))))
    return found


@pytest.mark.timeout(120)
def test_mistakes_are_errors_on_every_rank():
    for rank, found in enumerate(run_ranks(errors, 2)):
        for kind in ("odd shard", "odd dispatch", "odd stream"):
            assert "ValueError: " in found[kind]
            assert "equal pieces, but batch_size=3 is not a multiple of 2" in found[kind]
        assert "ValueError: split_batches=True" in found["no size"]
        assert "TypeError: " in found["no length"]
        assert "Pairs has no length. Give it a __len__" in found["no length"]
        assert "TypeError: " in found["no length, stream"]
        assert "state of a dataset with 9 samples; this loader's has 8 samples" in found["length"]
        assert "a run with seed 4, this run has seed 3" in found["seed"]
        assert "none negative" in found["negative"]
        assert "TypeError: load_state_dict() was given a dict that is no state of a loader" in found["nonsense"]
        assert "Put the loop into `with accelerator.join_uneven_inputs([model])`" in found["join"]
        assert "Opaque" in found["opaque"]
        assert "slice_fn_for_dispatch" in found["opaque"]
        assert "rank 0" in found["opaque"] or rank == 0


def reading_with_workers(dataset, options):
    accelerator = accelerator_of(**options)
    loader = accelerator.prepare(DataLoader(dataset, 2, **WORKERS))
    for batch in loader:
        accelerator.gather(batch)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("dataset", "options", "broken"), [
    (BreaksOn(1), {}, 1),
    (BreaksOn(0), {}, 0),
    (BreaksOn(0), {"dispatch_batches": True}, 0),
    (StreamBreaksOn(0), {}, 0),
    (StreamBreaksOn(1), {"dispatch_batches": False}, 1),
    (StreamBreaksOn(0), {"dispatch_batches": False}, 0),
])  # fmt: skip
def test_a_dataset_that_raises_in_a_worker_of_one_rank_ends_all_ranks(dataset, options, broken):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        # Workers end slowly where others keep the cores busy.
        run_ranks(reading_with_workers, 3, dataset, options, grace=20.0)
    assert time.monotonic() - start < 30
    for rank, report in enumerate(failed.value.reports):
        assert report.state.startswith("raised: "), report
        assert "is broken" in report.traceback, report
        assert "LookupError" in report.traceback, report
        assert rank == broken or f"rank {broken}" in report.traceback, report

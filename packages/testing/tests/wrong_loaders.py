"""Loaders that are wrong in one place each, and a right one: the conformance suite has to tell them apart.

`Right` divides an epoch as plainly as the suite allows: rank `index` of `count` takes each `count`-th batch, and the last round
is filled up from the beginning. Each of the others breaks one sentence in the way that a first draft would.
"""

from __future__ import annotations

import os
import random

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accel_core import Rows, hookimpl
from accel_core.api.component import derive_seed, loader_seed
from accel_core.api.loader import Outlet, PreparedLoader, SourceIteration, SourceProgress, prepare_copy


class Iteration(SourceIteration):
    """One epoch of a `Reading`. torch may open several and begin one, so the epoch is taken at the first batch."""

    def __init__(self, reading):
        progress = SourceProgress(reading.origin.epoch, reading.first())
        super().__init__(reading.reads(progress), progress)
        self.reading = reading

    def start(self):
        self.reading.origin.begin(self.progress)


class Reading:
    """What one shard reads of a loader: the epochs, and where it stands in them."""

    def __init__(self, loader, shard, seed):
        self.sampler = loader.batch_sampler
        self.size = len(loader.dataset)
        inner = getattr(self.sampler, "sampler", None)
        self.shuffled = isinstance(inner, RandomSampler) and len(inner) == self.size
        self.index, self.count, self.seed = shard.index, shard.count, seed
        self.epoch = self.behind = 0  # of the next iteration
        self.skipped = 0
        self.origin = self  # a copy that leaves out batches moves it, too
        self.workers = torch.Generator()  # from which torch draws the seed of its workers
        self.current = SourceProgress()
        self.current.finished = True

    def open(self, feed):
        self.workers.manual_seed(self.key_of_workers(self.origin.epoch))
        return Iteration(self)

    def key_of_workers(self, epoch):
        return derive_seed(self.seed, epoch, self.index)

    def first(self):
        """Batches that are left out are counted from the beginning of the epoch."""
        return 0 if self.skipped else self.origin.behind

    def begin(self, progress):
        self.current = progress
        self.epoch, self.behind = progress.epoch + 1, 0

    def reads(self, progress):
        batches = self.batches(progress.epoch)
        rounds = self.rounds(batches, progress.samples)
        samples = progress.samples
        for number, batch_round in enumerate(rounds, 1):
            samples += sum(real for _, real in batch_round)
            if number <= self.skipped:
                continue
            batch, real = batch_round[self.index]
            yield batch, len(rounds) - number, self.rows(len(batch), real), samples

    def batches(self, epoch):
        if not self.shuffled:
            return list(self.sampler)
        order = self.order(epoch)
        return list(BatchSampler(order, self.sampler.batch_size, self.sampler.drop_last))

    def order(self, epoch):
        generator = torch.Generator().manual_seed(self.key(epoch))
        return torch.randperm(self.size, generator=generator).tolist()

    def key(self, epoch):
        return derive_seed(self.seed, epoch)

    def rounds(self, batches, behind):
        """Global batches, each a list with an index batch and its real rows for every shard."""
        while behind > 0:
            behind -= len(batches[0])
            batches = batches[1:] if behind >= 0 else [batches[0][behind:], *batches[1:]]
        parts = [batches[start : start + self.count] for start in range(0, len(batches), self.count)]
        return [self.filled(part, batches) for part in parts if len(part) == self.count or not self.drops()]

    def filled(self, part, batches):
        rows = getattr(self.sampler, "batch_size", None) or max(map(len, part))
        wanted = 0 if self.drops() else rows if self.count > 1 else 0
        spare = [sample for batch in batches for sample in batch] * rows * self.count
        padded = []
        for batch in [*part, *[[]] * (self.count - len(part))]:
            padding = spare[: max(0, wanted - len(batch))]
            padded.append((batch + padding, len(batch)))
        return padded

    def drops(self):
        return getattr(self.sampler, "drop_last", False)

    def rows(self, rows, real):
        return Rows(rows, real)

    def position(self):
        if self.current.finished:
            return {"epoch": self.epoch, "samples": self.behind}
        return {"epoch": self.current.epoch, "samples": self.current.samples}

    def __len__(self):
        return len(self.rounds(self.batches(self.epoch), 0)) - self.skipped


class Prepared(PreparedLoader):
    """A loader that knows its position."""

    def set_epoch(self, epoch):
        self.reading.epoch = epoch

    def state_dict(self):
        return {**self.reading.position(), "length": len(self.dataset)}

    def load_state_dict(self, state):
        if state["length"] != len(self.dataset):
            raise ValueError(f"a state over {state['length']} samples does not fit {len(self.dataset)}; load another")
        self.reading.epoch, self.reading.behind = state["epoch"], state["samples"]


class Right:
    """Each `count`-th batch for each shard."""

    overrides = Prepared
    source = Reading

    @hookimpl
    def prepare_loader(self, loader, shard, feed, device, seed, number):
        if isinstance(loader.dataset, IterableDataset):
            return self.of_stream(loader, shard, feed, device)
        source = self.source(loader, shard, loader_seed(seed, number))
        return self.copy(loader, source, Outlet(feed, device))

    def of_stream(self, loader, shard, feed, device):
        raise ValueError("samples without an index cannot be divided by arithmetic; give them one")

    def copy(self, loader, source, outlet):
        return prepare_copy(
            loader, self.overrides, source, outlet, strict=True, reading=source, generator=source.workers
        )


def with_source(**methods):
    """The attributes of a loader whose reading differs in these methods."""
    return type("Reading", (Reading,), methods)


class DropsTheTail(Right):
    source = with_source(drops=lambda self: True)


class CountsPadding(Right):
    source = with_source(rows=lambda self, rows, real: Rows(rows, rows))


class ForgetsTheEpoch(Right):
    source = with_source(key=lambda self, epoch: self.seed)


class IgnoresTheNumber(Right):
    """All loaders of a run have one order."""

    @hookimpl
    def prepare_loader(self, loader, shard, feed, device, seed):
        return super().prepare_loader(loader, shard, feed, device, seed, 0)


class IgnoresTheSeed(Right):
    source = with_source(key=lambda self, epoch: derive_seed(epoch))


class DrawsGlobally(Right):
    source = with_source(key=lambda self, epoch: int(torch.randint(2**31, ()).item()))


class OrderDependsOnTheShard(Right):
    source = with_source(key=lambda self, epoch: derive_seed(self.seed, epoch, self.index))


class OrderDependsOnTheCount(Right):
    source = with_source(key=lambda self, epoch: derive_seed(self.seed, epoch, self.count))


class ReadsEverything(Right):
    class source(Reading):
        def __init__(self, loader, shard, seed):
            super().__init__(loader, shard, seed)
            self.index, self.count = 0, 1


class ReadsByRank(Right):
    """Divides among the ranks of the world, whatever the shard."""

    class source(Reading):
        def __init__(self, loader, shard, seed):
            super().__init__(loader, shard, seed)
            if torch.distributed.is_initialized():
                self.index, self.count = torch.distributed.get_rank(), torch.distributed.get_world_size()


class Reverses(Right):
    """The last shard has the first batch of each round."""

    class source(Reading):
        def __init__(self, loader, shard, seed):
            super().__init__(loader, shard, seed)
            self.index = shard.count - 1 - shard.index


class ReadsUnevenly(Right):
    """Fills nothing up: the last round may have no batch for some ranks."""

    class source(Reading):
        def rounds(self, batches, behind):
            return [part for part in super().rounds(batches, behind) if part[self.index][1]]


class SaysTheWrongLength(Right):
    class overrides(Prepared):
        def __len__(self):
            return len(self.reading.sampler)


class DoesNotReportTheEnd(Right):
    class source(Reading):
        def reads(self, progress):
            for batch, remaining, rows, samples in super().reads(progress):
                yield batch, remaining + 1000 if remaining else 3, rows, samples


class RepeatsAcrossWorkers(Right):
    """Each worker's batches come once for each worker."""

    class overrides(Prepared):
        def __iter__(self):
            for batch in super().__iter__():
                yield from [batch] * max(1, self.num_workers)


class LosesPersistentEpochs(Right):
    """Workers that live on read the first epoch again."""

    class overrides(Prepared):
        def __iter__(self):
            if self.persistent_workers:
                self.set_epoch(0)
            return super().__iter__()


class ChangesDtypes(Right):
    """What is narrow comes in single precision."""

    class overrides(Prepared):
        def __iter__(self):
            for batch in super().__iter__():
                yield {**batch, "half": batch["half"].float()} if isinstance(batch, dict) else batch


class ChangesTheUsersLoader(Right):
    def copy(self, loader, source, outlet):
        prepared = super().copy(loader, source, outlet)
        loader.__dict__["batch_sampler"] = prepared.batch_sampler
        return prepared


class LosesTheClass(Right):
    def copy(self, loader, source, outlet):
        plain = torch.utils.data.DataLoader.__new__(torch.utils.data.DataLoader)
        plain.__dict__.update({**loader.__dict__, "label": None})
        return super().copy(loader if isinstance(loader, PreparedLoader) else plain, source, outlet)


class SeedsTheUsersStream(Right):
    def copy(self, loader, source, outlet):
        torch.manual_seed(0)
        return super().copy(loader, source, outlet)


class SetsTheEnvironment(Right):
    def copy(self, loader, source, outlet):
        os.environ["WRONG_LOADERS"] = str(random.random())
        return super().copy(loader, source, outlet)


class CountsWhatWasFetched(Right):
    class source(Reading):
        def reads(self, progress):
            for read in super().reads(progress):
                self.fetched = {"epoch": progress.epoch, "samples": read[3]}
                yield read

        def position(self):
            return super().position() if self.current.finished else self.fetched


class CountsOwnSamples(Right):
    """The position counts the samples of one shard."""

    class source(Reading):
        def position(self):
            state = super().position()
            return {**state, "samples": state["samples"] // self.count}


class IgnoresTheState(Right):
    class overrides(Prepared):
        def load_state_dict(self, state):
            if state["length"] != len(self.dataset):
                raise ValueError("of another dataset")


class TakesEveryState(Right):
    class overrides(Prepared):
        def load_state_dict(self, state):
            super().load_state_dict({**state, "length": len(self.dataset)})


class RepeatsTheRest(Right):
    """After a resumed epoch, the next one is short as well."""

    class source(Reading):
        def begin(self, progress):
            behind = self.behind
            super().begin(progress)
            self.behind = behind


class PreparesTwice(Right):
    def copy(self, loader, source, outlet):
        if isinstance(loader, PreparedLoader):
            return loader
        return super().copy(loader, source, outlet)


class CopiesStartElsewhere(Right):
    class source(Reading):
        def __getstate__(self):
            return {**self.__dict__, "epoch": self.epoch + 1}


class KeepsLoadersAlive(Right):
    kept = []

    def copy(self, loader, source, outlet):
        self.kept.append(super().copy(loader, source, outlet))
        return self.kept[-1]


class SwallowsErrors(Right):
    class overrides(Prepared):
        def __iter__(self):
            try:
                yield from super().__iter__()
            except ValueError:
                return


class LosesGrowingBatches(Right):
    """Takes the size of the first batch for that of all."""

    class source(Reading):
        def batches(self, epoch):
            batches = super().batches(epoch)
            if hasattr(self.sampler, "batch_size"):
                return batches
            return [batch[: len(batches[0])] for batch in batches]


class IgnoresSetEpoch(Right):
    class overrides(Prepared):
        def set_epoch(self, epoch):
            pass


class DrawsAlikeOnAllRanks(Right):
    source = with_source(key_of_workers=lambda self, epoch: derive_seed(self.seed, epoch))


class DrawsAlikeInAllEpochs(Right):
    source = with_source(key_of_workers=lambda self, epoch: derive_seed(self.seed, self.index))


class DrawsByRank(Right):
    """Ranks of one shard train on the same samples, augmented differently."""

    source = with_source(key_of_workers=lambda self, epoch: derive_seed(self.seed, epoch, rank()))


def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class FollowsNoSampler(Right):
    class source(Reading):
        def batches(self, epoch):
            if not self.shuffled and isinstance(self.sampler, BatchSampler):
                return list(BatchSampler(range(self.size), self.sampler.batch_size, self.sampler.drop_last))
            return super().batches(epoch)


class ShufflesEverything(Right):
    """Takes a sampler that draws some of the samples for one that draws all."""

    class source(Reading):
        def __init__(self, loader, shard, seed):
            super().__init__(loader, shard, seed)
            self.shuffled = isinstance(getattr(self.sampler, "sampler", None), RandomSampler)


class SkipsNothing(Right):
    class overrides(Prepared):
        def behind(self, batches):
            return super().behind(0)


class SkipsFromTheState(Right):
    """Leaves out batches behind a state that was loaded, and so leaves out twice."""

    source = with_source(first=lambda self: self.origin.behind)


class SkipsBesideTheEpochs(Right):
    """The loader itself reads the epoch again of which a copy has left out batches."""

    class source(Reading):
        def open(self, feed):
            self.origin = self
            return super().open(feed)


class KeepsTheFirstState(Right):
    """Knows one position for each epoch."""

    class source(Reading):
        noted = None

        def position(self):
            position = super().position()
            if self.noted is None or self.noted["epoch"] != position["epoch"]:
                self.noted = position
            return self.noted


class CountsFromTheResumption(Right):
    """The position forgets what was read before the state that was loaded."""

    class source(Reading):
        def reads(self, progress):
            before = progress.samples
            for batch, remaining, rows, samples in super().reads(progress):
                yield batch, remaining, rows, samples - before


class LoadsOnlyIntoNewLoaders(Right):
    class overrides(Prepared):
        def load_state_dict(self, state):
            if self.reading.epoch == 0 or state["length"] != len(self.dataset):
                super().load_state_dict(state)


class RaisesOnOneRank(Right):
    class source(Reading):
        def batches(self, epoch):
            if getattr(self.sampler, "batch_size", None) == 1 and self.index == 1:
                raise ValueError("batches of one sample cannot be divided here")
            return super().batches(epoch)

"""The jobs of the loader suite on the ranks: each reads a little and returns what came.

Jobs judge nothing; the suite compares their facts with what one process reads. A job is a function
of a `LoaderSubject`, at the level of this module because it travels to the ranks by name, and uses
the public loop only.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from accel_core import World, set_seed
from accel_core.api.component import gather_objects
from accel_testing import loader_data as data
from accel_testing.shared_launch import Raised, Subject, left_alive, tried

if TYPE_CHECKING:
    from accel_core import Accelerator, Strategy

SEED = 11
STEPS = 10
WINDOW = 4
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
"""Options of a loader with workers. Forked, because on a rank they would else import torch anew, each for seconds."""

STOPS = ("before anything", "after 1 batch", "after 2 batches", "after the last batch", "after the end")
"""Where a state is taken in epoch 1; "before anything" is before epoch 0."""


@dataclass(frozen=True)
class LoaderSubject(Subject):
    """The loader component: a name, or what makes one without arguments, pickled by its name."""

    loader: str | Callable[[], object] = ""

    def reading(self, strategy: Strategy | None = None, seed: int = SEED, **options: Any) -> Accelerator:
        """An Accelerator of a new run with this seed, and with a loader component of its own."""
        set_seed(seed)
        loader = self.loader if isinstance(self.loader, str) else self.loader()
        if strategy is None:
            return self.accelerator(loader=loader, **options)
        return Subject(lambda: strategy, self.cpu, self.patience).accelerator(loader=loader, **options)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return World.current(cpu=self.cpu).size


class Reading(NamedTuple):
    """One epoch of one loader on one rank.

    `shards`: into how many parts the data are divided; `batches`: the numbers in each batch,
    padding included; `length`: what `len()` said before; `counted`: what `gather_for_metrics` gave
    over the epoch, None where ranks have unequally many batches.
    """

    shards: int
    batches: list[list[int]]
    length: int
    counted: list[int] | None


class Shuffled:
    """A shuffled loader in a run of its own; without a strategy, the ranks divide the data."""

    def __init__(
        self,
        subject: LoaderSubject,
        strategy: Strategy | None = None,
        seed: int = SEED,
        samples: int = 0,
        **options: Any,
    ) -> None:
        self.accelerator = subject.reading(strategy, seed)
        size = samples or 12 * subject.ranks
        self.loader: Any = self.accelerator.prepare(
            DataLoader(data.Numbers(size), batch_size=4, shuffle=True, **options)
        )

    def epoch(self) -> list[int]:
        """The next iteration, from its beginning to its end: what metrics count of it."""
        return counted_epoch(self.accelerator, self.loader)

    def epochs(self, count: int = 2) -> list[list[int]]:
        """The next iterations."""
        return [self.epoch() for _ in range(count)]

    def resumed(self, state: dict[str, Any]) -> list[list[int]]:
        """The next two iterations after a state is loaded."""
        self.loader.load_state_dict(state)
        return self.epochs()

    def steps(self) -> list[list[int]]:
        """The next iteration, step by step."""
        return [counted(self.accelerator, batch) for batch in self.loader]

    def left_after(self, batches: int) -> tuple[list[int], dict[str, Any]]:
        """What was counted in an iteration left after so many batches, and the position."""
        found: list[int] = []
        if not batches:
            return found, self.loader.state_dict()
        for done, batch in enumerate(self.loader, 1):
            found += counted(self.accelerator, batch)
            if done == batches:
                break
        return found, self.loader.state_dict()


def counted(accelerator: Accelerator, batch: Any) -> list[int]:
    """The samples that metrics count of a batch of numbers, over all ranks."""
    found: list[int] = accelerator.gather_for_metrics(batch).tolist()
    return found


def counted_epoch(accelerator: Accelerator, loader: Any) -> list[int]:
    """The samples that metrics count in the next iteration of a loader."""
    return [sample for batch in loader for sample in counted(accelerator, batch)]


def local(loader: Any) -> list[list[int]]:
    """The next iteration on this rank: the numbers in each batch."""
    return [batch.tolist() for batch in loader]


def _shards(accelerator: Accelerator) -> int:
    return accelerator._layout.shard.count


def _agree(accelerator: Accelerator, fact: object) -> bool:
    """Whether all ranks say the same."""
    told = gather_objects([fact], accelerator._world)
    return all(other == told[0] for other in told)


def sequences(subject: LoaderSubject) -> list[Reading]:
    """Every case of `CASES`, in the order of the dataset."""
    return [_read(subject.reading(), case) for case in data.CASES]


def singles(subject: LoaderSubject) -> Reading:
    """Batches of one sample."""
    return _read(subject.reading(), data.Case(5, 1))


def sequences_in_teams(subject: LoaderSubject) -> list[Reading]:
    """Every case of `CASES`, in the order of the dataset, where several ranks read one part."""
    return [_read(subject.reading(data.Teams()), case) for case in data.CASES]


def _read(accelerator: Accelerator, case: data.Case) -> Reading:
    user_loader = DataLoader(data.Numbers(case.samples), batch_size=case.batch, drop_last=case.drop_last)
    loader = accelerator.prepare(user_loader)
    length = len(loader)
    batches = local(loader)
    found = counted_epoch(accelerator, loader) if _agree(accelerator, len(batches)) else None
    return Reading(_shards(accelerator), batches, length, found)


def streams(subject: LoaderSubject) -> list[list[int]]:
    """An iterable dataset in two epochs, and one with fewer samples than a batch has rows."""
    accelerator = subject.reading()
    many, few = accelerator.prepare(*(DataLoader(data.Counting(samples), batch_size=4) for samples in (22, 3)))
    return [counted_epoch(accelerator, loader) for loader in (many, many, few)]


def growing(subject: LoaderSubject) -> list[list[int]]:
    """The samples counted over two epochs of a user's own batch sampler."""
    accelerator = subject.reading()
    loader = accelerator.prepare(DataLoader(data.Numbers(23), batch_sampler=data.GrowingBatches(23)))
    return [counted_epoch(accelerator, loader) for _ in range(2)]


def orders(subject: LoaderSubject) -> dict[str, list[int]]:
    """Samples of shuffled loaders, in runs that should read alike and runs that should not."""
    run = Shuffled(subject)
    found = {"epoch 0": run.epoch(), "epoch 1": run.epoch(), "epoch 2": run.epoch()}
    run.loader.set_epoch(1)
    found |= {"set_epoch(1)": run.epoch(), "the epoch after set_epoch(1)": run.epoch()}
    second: Any = run.accelerator.prepare(DataLoader(data.Numbers(12 * subject.ranks), batch_size=4, shuffle=True))
    found["epoch 0 of a second loader"] = counted_epoch(run.accelerator, second)
    found["epoch 0 of another seed"] = Shuffled(subject, seed=SEED + 1).epoch()
    noisy = Shuffled(subject)
    for name in ("epoch 0 beside random draws", "epoch 1 beside random draws"):
        torch.rand(1 + noisy.accelerator.process_index)
        found[name] = noisy.epoch()
    return found


def orders_in_teams(subject: LoaderSubject) -> list[list[int]]:
    """Two epochs of a shuffled loader, where the data are divided into fewer parts."""
    return Shuffled(subject, data.Teams()).epochs()


def workers(subject: LoaderSubject) -> dict[str, list[list[int]]]:
    """Two epochs of a shuffled loader, by how its samples are fetched."""
    ways: dict[str, dict[str, Any]] = {
        "no workers": {},
        "2 workers": WORKERS,
        "2 persistent workers": {**WORKERS, "persistent_workers": True},
    }
    return {way: Shuffled(subject, **options).epochs() for way, options in ways.items()}


def draws(subject: LoaderSubject) -> dict[str, list[list[int]]]:
    """What workers draw in two epochs: with a part for each rank, and where several read one."""
    found = {}
    for way, strategy in (("apart", None), ("in teams", data.Teams())):
        accelerator = subject.reading(strategy)
        loader = accelerator.prepare(DataLoader(data.Draws(8 * subject.ranks), batch_size=2, **WORKERS))
        found[way] = [[draw for batch in local(loader) for draw in batch] for _ in range(2)]
    return found


def samplers(subject: LoaderSubject) -> dict[str, list[list[int]] | Raised]:
    """What metrics count of two epochs by samplers of the user's, or how these were refused."""
    numbers = data.Numbers(12 * subject.ranks)
    made: dict[str, Any] = {
        "from the end": data.Backwards(len(numbers)),
        "a half at random": RandomSampler(numbers, num_samples=len(numbers) // 2),
    }

    def read(sampler: Any) -> list[list[int]]:
        accelerator = subject.reading()
        loader = accelerator.prepare(DataLoader(numbers, batch_size=3, sampler=sampler))
        return [counted_epoch(accelerator, loader) for _ in range(2)]

    return {name: tried(partial(read, sampler)) for name, sampler in made.items()}


class Skipped(NamedTuple):
    """An epoch of which batches were left out, and the one after it.

    `whole`: the steps of both in an uninterrupted run; `length`: what `len()` said of the rest.
    """

    whole: list[list[list[int]]]
    rest: list[list[int]]
    length: int
    following: list[list[int]]


SKIPPED = 2
"""Batches that are left out, of four."""


def skipped(subject: LoaderSubject) -> dict[str, Skipped]:
    """`skip_first_batches` in a new run, and in one that has loaded a state inside the epoch."""
    samples, found = 16 * subject.ranks, {}
    uninterrupted = Shuffled(subject, samples=samples)
    whole = [uninterrupted.steps(), uninterrupted.steps()]
    _, state = Shuffled(subject, samples=samples).left_after(1)
    for name in ("in a new run", "after a state was loaded"):
        run = Shuffled(subject, samples=samples)
        if name.startswith("after"):
            run.loader.load_state_dict(state)
        rest = run.accelerator.skip_first_batches(run.loader, SKIPPED)
        steps = [counted(run.accelerator, batch) for batch in rest]
        found[name] = Skipped(whole, steps, len(rest), run.steps())
    return found


def structures(subject: LoaderSubject) -> list[tuple[Any, Any]]:
    """Batches of records, each with what plain torch collates of the same samples."""
    accelerator = subject.reading()
    loader = accelerator.prepare(DataLoader(data.Records(8 * subject.ranks), batch_size=4))
    device = accelerator.device
    return [(data.described(batch, device), data.records_as_collated(batch["id"].tolist(), device)) for batch in loader]


def belongings(subject: LoaderSubject) -> dict[str, bool]:
    """Whether each property of the user's loader is kept, in the prepared one and in itself."""
    accelerator = subject.reading()
    samples = 8 * subject.ranks
    options: dict[str, Any] = {"batch_size": 4, "prefetch_factor": 3, "collate_fn": torch.tensor, **WORKERS}
    user_loader = data.LabelledLoader(data.Numbers(samples), "mine", **options)
    before = {name: (id(value), repr(value)) for name, value in vars(user_loader).items()}
    loader: Any = accelerator.prepare(user_loader)
    labelled = isinstance(loader, data.LabelledLoader)
    expected = [list(range(start, start + 4)) for start in range(0, samples, 4)]
    facts = {
        "the prepared loader is one of the user's class": labelled,
        "attributes of the user's own": getattr(loader, "label", None) == "mine",
        "methods of the user's own": labelled and loader.shout() == "MINE",
        "the dataset": loader.dataset is user_loader.dataset,
        "the collate function": loader.collate_fn is torch.tensor,
        "num_workers": loader.num_workers == 2,
        "prefetch_factor": loader.prefetch_factor == 3,
        "the prepared loader is another object": loader is not user_loader,
    }
    local(loader)
    after = {name: (id(value), repr(value)) for name, value in vars(user_loader).items()}
    facts["the user's own loader has the attributes that it had"] = before == after
    facts["the user's own loader reads everything, as before"] = local(user_loader) == expected
    return facts


def surroundings(subject: LoaderSubject) -> dict[str, bool]:
    """Whether preparing left the random stream and the environment as they were."""
    accelerator = subject.reading()
    accelerator.prepare(DataLoader(data.Numbers(8), batch_size=4))  # the first one learns the seed of the run
    torch.rand(1)  # so that a stream that was seeded before is no longer at its beginning
    environment, stream = dict(os.environ), torch.get_rng_state()
    accelerator.prepare(DataLoader(data.Numbers(8), batch_size=4, shuffle=True))
    return {
        "the environment": dict(os.environ) == environment,
        "torch's random stream": torch.equal(torch.get_rng_state(), stream),
    }


def windows(subject: LoaderSubject) -> dict[str, tuple[int, list[int]]]:
    """Of epochs with accumulation: their steps, and after how many of them windows closed."""
    found = {}
    for name, inside in (("alone", _nothing), ("an evaluation inside", local), ("one left by break", _peek)):
        accelerator = subject.reading(gradient_accumulation_steps=WINDOW)
        samples = 2 * STEPS * _shards(accelerator)
        loader = accelerator.prepare(DataLoader(data.Numbers(samples), batch_size=2))
        evaluation = accelerator.prepare(DataLoader(data.Numbers(6 * subject.ranks), batch_size=2))
        for epoch in range(2):
            steps, closed = 0, []
            for steps, _ in enumerate(loader, 1):
                with accelerator.accumulate():
                    inside(evaluation)
                    if accelerator.sync_gradients:
                        closed.append(steps)
            found[f"{name}, epoch {epoch}"] = (steps, closed)
    return found


def _nothing(evaluation: Any) -> None:
    pass


def _peek(evaluation: Any) -> None:
    for _ in evaluation:
        break


class Resumption(NamedTuple):
    """A run that was left and goes on.

    `epochs`: what the uninterrupted run counts; `before`: what was counted of epoch `epoch` when
    the state was taken; `after`: the iterations after it was loaded; `over`: whether the loop over
    that epoch had ended by itself.
    """

    epochs: list[list[int]]
    epoch: int
    before: list[int]
    after: list[list[int]]
    over: bool


def resumptions(subject: LoaderSubject) -> dict[str, Resumption]:
    """States taken at `STOPS`, each loaded in a run of its own."""
    samples = 12 * subject.ranks - 3  # the last global batch is not complete
    uninterrupted = Shuffled(subject, samples=samples)
    epochs = [uninterrupted.steps() for _ in range(4)]
    last = len(epochs[1])
    limits = dict(zip(STOPS, (None, 1, 2, last, last + 1), strict=True))
    flat = [[sample for step in epoch for sample in step] for epoch in epochs]
    return {stop: _resumed(subject, limit, flat, samples, limit == last + 1) for stop, limit in limits.items()}


def _resumed(
    subject: LoaderSubject, limit: int | None, epochs: list[list[int]], samples: int, over: bool
) -> Resumption:
    first = Shuffled(subject, samples=samples)
    if limit is not None:
        first.epoch()
    before, state = first.left_after(limit or 0)
    after = Shuffled(subject, samples=samples).resumed(state)
    return Resumption(epochs, 0 if limit is None else 1, before, after, over)


def resumptions_again(subject: LoaderSubject) -> dict[str, Resumption]:
    """Several states taken of one epoch, the last of them after it was resumed inside."""
    samples = 16 * subject.ranks - 3
    epochs = Shuffled(subject, samples=samples).epochs(4)
    first, counts, states = Shuffled(subject, samples=samples), [], []
    for batch in first.loader:
        counts.append(counted(first.accelerator, batch))
        states.append(first.loader.state_dict())
        if len(states) == 2:
            break
    second = Shuffled(subject, samples=samples)
    second.loader.load_state_dict(states[1])
    more, state = second.left_after(1)
    taken = {
        "for the second time in an epoch": ([*counts[0], *counts[1]], states[1]),
        "in an epoch that was resumed": ([*counts[0], *counts[1], *more], state),
    }
    found = {}
    for when, (before, state) in taken.items():
        after = Shuffled(subject, samples=samples).resumed(state)
        found[when] = Resumption(epochs, 0, before, after, over=False)
    after = first.resumed(states[0])
    found["before others, and loaded where it was taken"] = Resumption(epochs, 0, counts[0], after, over=False)
    return found


def resumption_with_workers(subject: LoaderSubject) -> Resumption:
    """A state that is taken while workers have fetched more than was yielded."""
    samples = 16 * subject.ranks
    epochs = Shuffled(subject, samples=samples).epochs(4)
    first = Shuffled(subject, samples=samples, **WORKERS)
    before, state = first.left_after(1)
    return Resumption(epochs, 0, before, Shuffled(subject, samples=samples).resumed(state), over=False)


def carried_states(subject: LoaderSubject) -> dict[str, Resumption]:
    """States that travel between runs whose data are divided into different numbers of parts."""
    found = {}
    for way, giver, taker in (("to more", data.Teams(), None), ("to fewer", None, data.Teams())):
        epochs = Shuffled(subject, taker).epochs(4)
        before, state = Shuffled(subject, giver).left_after(1)
        found[way] = Resumption(epochs, 0, before, Shuffled(subject, taker).resumed(state), over=False)
    return found


def foreign_state(subject: LoaderSubject) -> list[Raised | None]:
    """The error for the state of another dataset's loader, or None, as the only element."""
    _, state = Shuffled(subject, samples=24 * subject.ranks).left_after(1)
    other = Shuffled(subject)
    return [tried(partial(other.loader.load_state_dict, state))]


def prepared_again(subject: LoaderSubject) -> tuple[bool, Raised | None]:
    """Whether the Accelerator that prepared a loader gives it back, and what another one raises."""
    accelerator = subject.reading()
    loader = accelerator.prepare(DataLoader(data.Numbers(8), batch_size=2))
    same = accelerator.prepare(loader) is loader
    other = subject.reading()
    other.prepare(DataLoader(data.Numbers(8), batch_size=4))  # the first one learns the seed of the run
    raised = tried(partial(other.prepare, loader))
    return same, raised if isinstance(raised, Raised) else None


def copies(subject: LoaderSubject) -> dict[str, tuple[Any, list[list[int]]]]:
    """Of copies made before a loader is read: what they read or raise, and what it reads."""
    made: dict[str, Callable[[Any], Any]] = {
        "copy.deepcopy": copy.deepcopy,
        "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    }
    found: dict[str, tuple[Any, list[list[int]]]] = {}
    for way, make in made.items():
        loader = Shuffled(subject).loader
        twin = tried(partial(make, loader))
        found[way] = (twin if isinstance(twin, Raised) else local(twin), local(loader))
    return found


def released(subject: LoaderSubject) -> list[str]:
    """The names of objects that outlive a run of two loaders, one of them left by break."""
    return left_alive(partial(_read_and_left, subject))


def _read_and_left(subject: LoaderSubject) -> dict[str, object]:
    accelerator = subject.reading()
    loader: Any = accelerator.prepare(DataLoader(data.Numbers(24), batch_size=2, shuffle=True))
    left: Any = accelerator.prepare(DataLoader(data.Numbers(24), batch_size=2, shuffle=True))
    local(loader)
    _peek(left)
    return {"the prepared loader": loader, "a loader left by break": left, "its dataset": loader.dataset}


def broken(subject: LoaderSubject) -> tuple[list[list[int]], Raised | None]:
    """The batches that a rank reads of a dataset that raises, and the error in its loop."""
    dataset: Dataset[Any] = data.Breaking(8 * subject.ranks)
    loader = subject.reading().prepare(DataLoader(dataset, batch_size=2))
    found: list[list[int]] = []
    raised = tried(lambda: found.extend(batch.tolist() for batch in loader))  # keeps what came before the error
    return found, raised


LoaderJob = Callable[[LoaderSubject], Any]

JOBS: Sequence[LoaderJob] = (
    sequences, singles, sequences_in_teams, orders, orders_in_teams, structures, belongings, surroundings, windows,
    growing, samplers, workers, draws, resumptions, resumptions_again, resumption_with_workers, carried_states,
    foreign_state, skipped, prepared_again, copies, released, streams, broken,
)  # fmt: skip

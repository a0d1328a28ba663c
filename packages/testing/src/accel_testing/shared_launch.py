"""Several jobs in one launch of ranks, because fresh ranks are what a test costs.

A job is a function of a `Subject` that returns what it saw. The facts travel through a store that
the test hosts, so that those of the jobs before are there when one breaks the launch: then it alone
has failed, and the jobs after it get another.
"""

from __future__ import annotations

import gc
import pickle
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from accel_core import Accelerator, World
from accel_testing.ranks import RanksFailed, run_ranks

if TYPE_CHECKING:
    from accel_core import Precision, Strategy

Factory = Callable[[], "Strategy"]

FAREWELL = 10.0
"""Seconds that what a run has held has to go away."""


@dataclass(frozen=True)
class Subject:
    """The component under test: a strategy (its name, or what makes one); a subclass has more."""

    strategy: str | Factory
    cpu: bool = True  # trains there although there is an accelerator
    patience: timedelta = timedelta(seconds=15)  # for a collective, and for each other after a job

    def accelerator(self, mixed_precision: str | Precision = "no", **options: Any) -> Accelerator:
        """An Accelerator with a strategy of its own."""
        strategy = self.strategy if isinstance(self.strategy, str) else self.strategy()
        return Accelerator(mixed_precision=mixed_precision, strategy=strategy, cpu=self.cpu, **options)


@dataclass(frozen=True)
class Raised:
    """A job, or one case of it, ended with an exception."""

    kind: str  # name of its class
    message: str
    text: str  # the whole traceback

    @classmethod
    def by(cls, error: Exception) -> Raised:
        """Takes note of an exception."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


S = TypeVar("S", bound=Subject)
T = TypeVar("T")


def tried(work: Callable[[], T]) -> T | Raised:
    """The result of a call, or how it raised: whatever it raises is the fact."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        return Raised.by(error)


def left_alive(run: Callable[[], Mapping[str, object]]) -> list[str]:
    """The names of those objects of a run that outlive it and its last reference.

    On an accelerator, `backward` runs in a thread of torch, which lets go of them a moment after the call has returned.
    """
    watched = {name: weakref.ref(value) for name, value in run().items()}
    deadline = time.monotonic() + FAREWELL
    while True:
        gc.collect()
        alive = [name for name, reference in watched.items() if reference() is not None]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


Job = Callable[[Subject], Any]


def observe(
    subject: S, jobs: Sequence[Callable[[S], Any]], world: int, timeout: float
) -> dict[str, list[Any] | RanksFailed]:
    """Runs jobs on `world` ranks, with as few launches as they allow.

    Returns for the name of each job, a function at the level of a module, what it returned, or
    `Raised`, in rank order; or how it broke its launch, which is killed after `timeout` seconds.
    """
    found: dict[str, list[Any] | RanksFailed] = {}
    waiting = list(jobs)
    while waiting:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=subject.patience)
        failure, asked = None, len(waiting)
        try:
            ranks = (_observe_on_rank, world, subject, waiting, store.port)
            run_ranks(*ranks, timeout=timeout, devices=not subject.cpu)
        except RanksFailed as error:
            failure = error
        while waiting and store.check(keys := [_key(waiting[0], rank) for rank in range(world)]):
            found[waiting.pop(0).__name__] = [pickle.loads(store.get(key)) for key in keys]
        # A failure after the last job is one of exiting, which has a test of its own.
        if failure is not None and waiting:
            if store.check([_begun(waiting[0])]):
                found[waiting.pop(0).__name__] = failure
            elif len(waiting) == asked:  # not even the first has begun
                return {job.__name__: failure for job in waiting} | found
    return found


def _observe_on_rank(subject: S, jobs: Sequence[Callable[[S], Any]], port: int) -> None:
    """Runs jobs one after the other on this rank; puts facts, or `Raised`, into the test's store.

    Through it the ranks agree after each job that all have come to its end. One that raises on some
    ranks only, or hangs, leaves the others in the middle of a collective, and what came next would
    tell nothing: then this raises, and the facts of the jobs before are in the store.
    """
    world = World.current(cpu=subject.cpu, timeout=subject.patience)
    stay = _Stay()
    world.enter(stay)  # the jobs' Accelerators end their training, but not the process group
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=subject.patience)
    for job in jobs:
        store.set(_begun(job), "")
        fact = tried(partial(job, subject))
        gc.collect()
        store.set(_key(job, world.rank), pickle.dumps(fact))  # type: ignore[arg-type]  # torch's stub knows str only
        _agree(store, job, world, fact, subject.patience)


def _begun(job: Callable[[S], Any]) -> str:
    """The key that is in the store once a rank has begun a job."""
    return f"{job.__name__}/begun"


def _key(job: Callable[[S], Any], rank: int) -> str:
    """The key in the store for the facts that a rank saw in a job."""
    return f"{job.__name__}/{rank}"


def _agree(store: dist.Store, job: Callable[[S], Any], world: World, fact: object, patience: timedelta) -> None:
    story = f"\nThis rank raised:\n{fact.text}" if isinstance(fact, Raised) else ""
    name, keys = job.__name__, [_key(job, rank) for rank in range(world.size)]
    try:
        store.wait(keys, patience)
    except dist.DistError as error:
        raise RuntimeError(f"{name}: {patience.total_seconds():g} s later, not all ranks were done.{story}") from error
    raised = {isinstance(pickle.loads(store.get(one)), Raised) for one in keys}
    if len(raised) > 1:
        raise RuntimeError(f"{name} raised on some ranks only.{story}")
    if raised == {True}:
        # These fail where a collective was left unfinished: one of ours, or one of torch, which has a group of its own.
        world.barrier()
        if world.size > 1:
            dist.barrier(group=world.group)


class _Stay:
    """Somebody who needs the world."""

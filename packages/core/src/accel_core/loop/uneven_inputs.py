"""Training loops of unequal length on the ranks, under a strategy whose models can join.

torch's `Join` does the work, and every rank takes parameters and buffers of the one that went on
longest. Here optimizers and schedulers come from that rank too, else the ranks would drift apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from accel_core.collectives import objects, reduce_gather
from accel_core.options.resolution import flag
from accel_core.processes.watch.collective_scope import collective

if TYPE_CHECKING:
    from accel_core.contract.loader_progress import Feed
    from accel_core.loop.accumulation import Accumulation
    from accel_core.loop.preparation import Prepared
    from accel_core.processes.world import World


@contextmanager
def evenness(feed: Feed, even_batches: bool | None, joining: bool) -> Iterator[None]:
    """Sets, in a block, what loaders are asked for: see `Feed`'s attributes. No collective."""
    flag("even_batches", even_batches, "", None)  # which raises for a text, say
    before = feed.even_batches, feed.joining
    feed.even_batches, feed.joining = even_batches, joining
    try:
        yield
    finally:
        feed.even_batches, feed.joining = before


def as_joinables(given: Sequence[Any]) -> list[Joinable]:
    """The objects to join, without what `torch.compile` put around them, or a `TypeError`."""
    found = [getattr(each, "_orig_mod", each) for each in given]
    for each in found:
        if not isinstance(each, Joinable):
            raise TypeError(
                f"join_uneven_inputs() was given a {type(each).__name__}, which cannot join, as models do that "
                f"prepare() returns under the strategy 'ddp'. Pass those; or give all ranks equally many, by "
                f"even_batches=True."
            )
    return found


@contextmanager
def joined(
    joinables: Sequence[Joinable],
    world: World,
    prepared: Prepared,
    accumulation: Accumulation,
    others: Sequence[Any] = (),
) -> Iterator[None]:
    """A block in which ranks may differ in steps; they agree at its end, which is a collective."""
    before = [each._join_config for each in joinables]
    try:
        join = Join([*joinables, _Followers(joinables[0], world, prepared, others)])
        # One collective as a whole: a rank that has ended takes part in the backwards of the others from its end.
        with collective("join_uneven_inputs()", whole=True):
            yield
            with warnings.catch_warnings():  # torch sets a filter, and leaves it
                join.__exit__(None, None, None)
        if accumulation.open:
            warnings.warn(
                f"join_uneven_inputs() ended inside a window of accumulation on this rank: {accumulation.position} of "
                f"{accumulation.size} micro-batches had run, and are dropped. Use gradient_accumulation_steps=1.",
                RuntimeWarning,
                stacklevel=4,
            )
            prepared.gradients.drop(prepared.learned())
            accumulation.reset()
    finally:
        for each, config in zip(joinables, before, strict=True):
            each._join_config = config


class _Followers(Joinable):
    """Optimizers and schedulers that take states of the rank that went on longest."""

    def __init__(self, leader: Joinable, world: World, prepared: Prepared, others: Sequence[Any]) -> None:
        super().__init__()
        self._leader, self._world, self._prepared, self._others = leader, world, prepared, others

    def join_hook(self, **_: Any) -> JoinHook:
        hook = JoinHook()
        hook.post_hook = self._follow  # type: ignore[method-assign]
        return hook

    @property
    def join_device(self) -> torch.device:
        return self._leader.join_device

    @property
    def join_process_group(self) -> Any:
        return self._leader.join_process_group

    def _follow(self, is_last_joiner: bool) -> None:
        """Takes the states of the highest rank of those that went on longest, as DDP does."""
        world, group = self._world, self.join_process_group
        last: list[bool] = reduce_gather.gather(torch.tensor([is_last_joiner]), world, group).tolist()
        if all(last):
            return
        source = max(rank for rank, went_on in enumerate(last) if went_on)
        followers = [*self._prepared.optimizers, *self._prepared.schedulers, *self._others]
        states = objects.broadcast_object([each.state_dict() for each in followers], world, source, group)
        for each, state in zip(followers, states, strict=True) if not is_last_joiner else ():
            each.load_state_dict(state)

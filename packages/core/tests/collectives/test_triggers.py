"""A flag that any rank can raise and all ranks see."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from together import Together

from accel_core.collectives.reduce_gather import gather
from accel_core.collectives.stop_signals import Trigger
from accel_core.processes.world import World
from accel_testing import run_ranks

ON_TWO = Together(2)


def answers(setters):
    """What each check says, and whether a second trigger of the same world stays out of it."""
    world = World.current()
    trigger, other = Trigger(world), Trigger(world)
    said = []
    for ranks in setters:
        for _ in range(ranks.count(world.rank)):
            trigger.set()
        said.append(trigger.check())
    return said, other.check()


def test_a_trigger_set_anywhere_is_seen_everywhere_and_once():
    """True resets it on all ranks, wherever and however often it was set."""
    setters = [[], [0], [], [1, 1], [2], [], [0, 1, 2], [], []]
    for said, other in run_ranks(answers, 3, setters):
        assert said == [False, True, False, True, True, False, True, False, False]
        assert other is False


def test_alone_a_trigger_is_a_flag():
    trigger = Trigger(World.current(cpu=True))
    assert trigger.check() is False
    trigger.set()
    assert trigger.check() is True
    assert trigger.check() is False


@ON_TWO
def setting_is_local():
    world = World.current()
    trigger = Trigger(world)
    if world.rank == 1:
        previous = signal.signal(signal.SIGUSR2, lambda *_: trigger.set())
        os.kill(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, previous)
    gather(torch.tensor(world.rank), world)  # `set` has sent nothing that would stand in the way
    return trigger.check()


def test_a_signal_handler_may_set_it():
    assert ON_TWO.run(setting_is_local) == [True, True]


def set_while_it_travels(earlier):
    """On rank 0 `set` comes after the flag has left, and before the answer is there; rank `earlier` has set it before."""
    world = World.current()
    trigger = Trigger(world)
    trigger.check()
    if world.rank == earlier:
        trigger.set()
    channel = world.channel()
    exchange = channel.exchange

    def late(*arguments):
        received = exchange(*arguments)
        trigger.set()
        return received

    if world.rank == 0:
        channel.exchange = late
    said = [trigger.check()]
    channel.exchange = exchange
    return [*said, trigger.check(), trigger.check()]


for earlier in (None, 0, 1):
    ON_TWO.add(set_while_it_travels, earlier)


def test_a_trigger_set_during_a_check_is_not_lost():
    assert ON_TWO.run(set_while_it_travels, None) == [[False, True, False]] * 2


@pytest.mark.parametrize("earlier", [0, 1])
def test_nor_is_one_that_meets_an_earlier_one(earlier):
    assert ON_TWO.run(set_while_it_travels, earlier) == [[True, True, False]] * 2


@ON_TWO
def check_on_one_rank():
    world = World.current()
    try:
        Trigger(world).check() if world.rank == 0 else gather(torch.tensor(1), world)
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_a_check_on_one_rank_only_names_itself():
    first, second = ON_TWO.run(check_on_one_rank)
    assert first == second
    assert "rank 0: check_trigger" in first
    assert "a call that stands under a condition" in first


@pytest.mark.parametrize("setter", [0, 1])
def test_one_collective_tells_all(setter):
    assert ON_TWO.run(exchanges, setter) == [[1, 1, 1]] * 2


def exchanges(setter):
    world = World.current()
    trigger, channel = Trigger(world), world.channel()
    exchange, calls = channel.exchange, []
    channel.exchange = lambda *arguments: calls.append(1) or exchange(*arguments)
    counts = []
    for _ in range(3):
        if world.rank == setter:
            trigger.set()
        calls.clear()
        trigger.check()
        counts.append(len(calls))
    channel.exchange = exchange
    return counts


for setter in (0, 1):
    ON_TWO.add(exchanges, setter)

"""Gradients travel when a forward outside of no_sync says so; until then they are held, and are still part of the run."""

import math

import pytest
import torch
from torch.nn import functional as F

from accel_core import Accelerator, Precision, PrecisionPolicy
from accel_fsdp import FSDP
from accel_fsdp.gradient_sync import synchronisation_of
from accel_testing import run_ranks
from accel_testing.models import FEATURES, Net, built, part, reference_gradients, sgd
from accel_testing.training import fed


class Loop:
    def __init__(self, strategy=None, net=Net, **options):
        self.accelerator = Accelerator(strategy=strategy or FSDP(), cpu=True, **options)
        self.shard = self.accelerator._layout.shard
        model = built(net)
        self.model, self.optimizer = self.accelerator.prepare(model, sgd(model.parameters()))

    def loss(self, micro):
        x, y = part(micro, self.shard)
        return F.mse_loss(self.model(x), y)

    def backward(self, micro):
        self.accelerator.backward(self.loss(micro))

    def gradients(self):
        named = self.model.named_parameters()
        return {name: value.grad.full_tensor() for name, value in named if value.grad is not None}

    def held(self):
        return {name: value.clone() for name, value in synchronisation_of(self.model).held(self.model).items()}


class Counted:
    """Counts how often the units of a model are told whether to synchronise."""

    def __init__(self, model):
        self.calls = []
        for unit in synchronisation_of(model).units:
            unit.set_requires_gradient_sync = lambda travels, recurse: self.calls.append(travels)


class Reduced(Precision):
    """Gradients travel as bfloat16."""

    policy = PrecisionPolicy(reduce=torch.bfloat16)


def held_and_sent(strategy=None):
    """Held after two backwards inside and one outside of a forward inside; sent by the next."""
    loop = Loop(strategy)
    with loop.accelerator.no_sync(loop.model):
        loop.backward(0)
        inside = loop.held(), loop.gradients()
        loss = loop.loss(1)
    loop.accelerator.backward(loss)
    both = loop.held(), loop.gradients()
    loop.backward(2)
    return inside, both, (loop.held(), loop.gradients())


def nested():
    """An inner no_sync does not end the outer one; a forward without gradients changes nothing."""
    loop = Loop()
    with loop.accelerator.no_sync(loop.model):
        with loop.accelerator.no_sync(loop.model):
            pass
        loss = loop.loss(0)
    with torch.no_grad():
        loop.loss(1)
    loop.accelerator.backward(loss)
    return loop.held(), loop.gradients()


def triggered():
    loop = Loop()
    with loop.accelerator.no_sync(loop.model):
        loop.backward(0)
        loss = loop.loss(1)
    with loop.accelerator.trigger_sync_in_backward(loop.model):
        loop.accelerator.backward(loss)
    sent = loop.gradients()
    with loop.accelerator.no_sync(loop.model):
        loop.backward(2)
    return sent, loop.gradients(), loop.held()


def cleared():
    """zero_grad drops what is held; what comes afterwards is alone."""
    loop = Loop()
    with loop.accelerator.no_sync(loop.model):
        loop.backward(0)
    loop.optimizer.zero_grad()
    zeros = loop.held()
    loop.backward(1)
    return zeros, loop.gradients()


def norm_of_open_window():
    loop = Loop(gradient_accumulation_steps=2)
    with loop.accelerator.accumulate(loop.model):
        loop.backward(0)
        return loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e-3), loop.held()


def shortened():
    """Batches of a loader that does not know its length: the window turns out shorter than it looked."""
    loop = Loop(gradient_accumulation_steps=4)
    found = None
    for micro in fed(loop.accelerator, 2):
        with loop.accelerator.accumulate(loop.model):
            loop.backward(micro)
            if loop.accelerator.sync_gradients:
                found = loop.gradients()
            loop.optimizer.step()
    return found


def told():
    """What the units hear in windows of three, and in steps without accumulation."""
    loop = Loop(gradient_accumulation_steps=3)
    counted = Counted(loop.model)
    for micro in fed(loop.accelerator, 6):
        with loop.accelerator.accumulate(loop.model):
            loop.backward(micro)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    windows = list(counted.calls)
    plain = Loop()
    counted = Counted(plain.model)
    plain.backward(0)
    plain.backward(1)
    return windows, counted.calls, len(synchronisation_of(plain.model).units)


def narrow():
    """Gradients that travel as bfloat16 are held as such, and named as any others."""
    loop = Loop(mixed_precision=Reduced())
    with loop.accelerator.no_sync(loop.model):
        loop.backward(0)
    held = loop.held()
    loop.backward(1)
    return held, loop.gradients()


def loaded(folder):
    """Loading drops what is held."""
    loop = Loop()
    loop.accelerator.save_state(folder)
    with loop.accelerator.no_sync(loop.model):
        loop.backward(0)
    loop.accelerator.load_state(folder)
    held = loop.held()
    loop.backward(1)
    return held, loop.gradients()


def on_two_ranks(folder):
    return {
        "held": held_and_sent(),
        "nested": nested(),
        "triggered": triggered(),
        "cleared": cleared(),
        "norm": norm_of_open_window(),
        "shortened": shortened(),
        "told": told(),
        "narrow": narrow(),
        "loaded": loaded(folder),
        "alone": Accelerator(cpu=True)._layout.shard.index,
    }


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return run_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("states") / "state"))


def local(rank, micro, count=2):
    """The gradient of one rank's part alone."""
    return reference_gradients([micro * count + rank], 1)


def total(*gradients):
    return {name: sum(each[name] for each in gradients) for name in gradients[0]}


def assert_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **(tolerance or {"rtol": 1e-5, "atol": 1e-7}))


def test_gradients_held_back_are_whole_and_local(facts):
    for rank, (inside, both, _) in enumerate(each["held"] for each in facts):
        assert_close(inside[0], local(rank, 0))
        assert_close(both[0], total(local(rank, 0), local(rank, 1)))
        assert inside[1] == both[1] == {}


def test_the_next_backward_outside_sends_all_of_them(facts):
    expected = total(*(reference_gradients([micro], 2) for micro in range(3)))
    for _, _, (held, sent) in (each["held"] for each in facts):
        assert held == {}
        assert_close(sent, expected)


def test_what_counts_is_where_the_last_forward_with_gradients_ran(facts):
    for rank, (held, sent) in enumerate(each["nested"] for each in facts):
        assert_close(held, local(rank, 0))
        assert sent == {}


def test_a_triggered_backward_sends_and_the_one_after_does_not(facts):
    expected = total(*(reference_gradients([micro], 2) for micro in range(2)))
    for rank, (sent, after, held) in enumerate(each["triggered"] for each in facts):
        assert_close(sent, expected)
        assert_close(after, expected)
        assert_close(held, local(rank, 2))


def test_clearing_gradients_clears_those_that_are_held(facts):
    expected = reference_gradients([1], 2)
    for zeros, sent in (each["cleared"] for each in facts):
        assert not any(value.any() for value in zeros.values())
        assert_close(sent, expected)


def test_the_norm_in_an_open_window_is_that_of_what_is_held(facts):
    for norm, held in (each["norm"] for each in facts):
        assert math.isclose(
            float(norm), float(torch.stack([value.norm() for value in held.values()]).norm()), rel_tol=1e-6
        )
        assert float(norm) > 1e-3


def test_a_window_that_is_shorter_than_it_looked_is_the_mean_of_what_is_in_it(facts):
    for rank in facts:
        assert_close(rank["shortened"], reference_gradients(range(2), 2))


def test_units_hear_of_a_change_and_of_nothing_else(facts):
    for windows, plain, units in (each["told"] for each in facts):
        assert windows == [*[False] * units, *[True] * units] * 2
        assert plain == []


def test_gradients_that_travel_in_a_narrow_dtype_are_held_in_it(facts):
    expected = total(*(reference_gradients([micro], 2) for micro in range(2)))
    for rank, (held, sent) in enumerate(each["narrow"] for each in facts):
        assert {value.dtype for value in held.values()} == {torch.bfloat16}
        assert_close({name: value.float() for name, value in held.items()}, local(rank, 0), rtol=2e-2, atol=1e-3)
        assert_close(sent, expected, rtol=2e-2, atol=4e-3)


def test_loading_drops_what_was_held(facts):
    for held, sent in (each["loaded"] for each in facts):
        assert held == {}
        assert_close(sent, reference_gradients([1], 2))


def test_a_model_that_is_not_sharded_has_nothing_to_hold():
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    model = accelerator.prepare(built(Net).requires_grad_(False))
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
        model(torch.ones(2, FEATURES))
    assert synchronisation_of(model) is None
    accelerator.end_training()

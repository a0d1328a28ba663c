"""Precisions hold under FSDP as they do elsewhere: the same suite, on ranks that hold parts of the parameters."""

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_fsdp import FSDP
from accel_precision import FP16
from accel_testing import PrecisionSuite, run_ranks

PICKLED = {
    "test_a_model_without_the_casts_can_be_pickled": "a sharded model refuses to be copied, and says what to copy instead"
}
NEEDS_AUTOCAST = "without autocast, a float32 input does not fit parameters that were gathered in bfloat16"


def gathered_in_bfloat16():
    return FSDP(gather_dtype=torch.bfloat16)


def hybrid():
    return FSDP(replicate=2)


class TestBF16(PrecisionSuite):
    precision = "bf16"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 2e-2, 5e-2


@pytest.mark.full
class TestBF16OfOtherForms(PrecisionSuite):
    precision = "bf16"
    strategies = ((gathered_in_bfloat16, 2), (hybrid, 4))
    lacks = PICKLED | {
        "test_two_precisions_live_side_by_side[gathered_in_bfloat16-2]": NEEDS_AUTOCAST,
        "test_weights_load_into_full_precision[gathered_in_bfloat16-2]": NEEDS_AUTOCAST,
    }
    tolerance, gradient_tolerance = 2e-2, 5e-2


class TestFP16(PrecisionSuite):
    precision = "fp16"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 1e-2, 2e-2


@pytest.mark.full
class TestBF16True(PrecisionSuite):
    precision = "bf16-true"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 5e-2, 5e-2


@pytest.mark.full
class TestFP8(PrecisionSuite):
    precision = "fp8"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 5e-2, 0.2


OVERFLOW = 1e38
"""A factor of the loss that makes its gradients overflow once it is scaled too."""


def scaled(**options):
    """Loss scaling and nothing else: no product in float16, so that results are those without scaling, bit by bit."""
    precision = FP16(output_dtype=None, **options)
    object.__setattr__(precision.policy, "compute", None)
    return precision


def held_while_another_steps(strategy, precision, factor):
    """The gradients of a model that waits, held back by `no_sync`, while another one steps twice, the first time as told."""
    accelerator = Accelerator(strategy=strategy, mixed_precision=precision, cpu=True)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    stepping, waiting, optimizer, _ = accelerator.prepare(*models, *optimizers)
    x = torch.arange(24.0).view(6, 4).sin()[accelerator.process_index :: 2]
    with accelerator.no_sync(waiting):
        accelerator.backward(waiting(x).square().mean())
    for each in (factor, 1.0):
        accelerator.backward(stepping(x).square().mean() * each)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.backward(waiting(x.cos()).square().mean())
    accelerator.unscale_gradients()
    gradients = [parameter.grad for parameter in waiting.parameters()]
    return [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]


def all_that_wait():
    return {
        (strategy, how): held_while_another_steps(strategy, precision, factor)
        for strategy in ("ddp", "fsdp")
        for how, precision, factor in (
            ("as it is", "no", 1.0),
            ("grows", scaled(init_scale=4.0, growth_interval=1), 1.0),
            ("overflows", scaled(init_scale=1024.0), OVERFLOW),
        )
    }


@pytest.fixture(scope="module")
def waited():
    return run_ranks(all_that_wait, 2)


@pytest.mark.parametrize("how", ["grows", "overflows"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_that_are_held_back_follow_the_scale(waited, strategy, how):
    """Wherever a strategy keeps them: those under DDP are in `.grad`, and those under FSDP are not."""
    for rank in waited:
        for found, expected in zip(rank[strategy, how], rank[strategy, "as it is"], strict=True):
            assert torch.equal(found, expected)


def test_gradients_that_are_held_back_are_those_of_ddp(waited):
    for rank in waited:
        for found, expected in zip(rank["fsdp", "as it is"], rank["ddp", "as it is"], strict=True):
            torch.testing.assert_close(found, expected)


class Turns:
    """Two models, each with an optimizer, which step by turns and unscale first."""

    def __init__(self, strategy, precision, options):
        self.accelerator = Accelerator(strategy=strategy, mixed_precision=precision, cpu=True)
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, **options) for model in models]
        prepared = self.accelerator.prepare(*models, *optimizers)
        self.models, self.optimizers = prepared[:2], prepared[2:]
        self.x = torch.arange(24.0).view(6, 4).sin()[self.accelerator.process_index :: 2]

    def backward(self, number):
        self.accelerator.backward(self.models[number](self.x).square().mean())

    def window(self, number):
        self.accelerator.forward_backward(
            self.models[number], self.x.chunk(3), lambda output, _: (output.square().sum(), len(output))
        )

    def clip(self, number):
        self.accelerator.clip_grad_norm_(self.models[number].parameters(), 0.05)

    def step(self, number):
        self.optimizers[number].step()
        self.optimizers[number].zero_grad()

    def weights(self):
        whole = [each.detach() for model in self.models for each in model.parameters()]
        return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in whole]


def skipped_by_hand(turns, learn):
    for _ in range(2):
        learn(0)
        turns.clip(0)
        turns.models[0].zero_grad()
        learn(0)
        turns.step(0)


def all_unscaled(turns, learn):
    for _ in range(2):
        for number in range(2):
            learn(number)
            turns.accelerator.unscale_gradients()
            turns.step(number)


def one_waits(turns, learn):
    for _ in range(2):
        learn(0)
        turns.clip(0)
        for _ in range(2):
            learn(1)
            turns.clip(1)
            turns.step(1)
        turns.step(0)


def one_waits_as_it_is(turns, learn):
    for _ in range(2):
        learn(0)
        for _ in range(2):
            learn(1)
            turns.step(1)
        turns.step(0)


PATTERNS = {each.__name__: each for each in (skipped_by_hand, all_unscaled, one_waits, one_waits_as_it_is)}
WAYS = {"ddp": ("ddp", {}), "ddp, fused": ("ddp", {"fused": True}), "fsdp": ("fsdp", {})}


def all_patterns():
    found = {}
    for way, (strategy, options) in WAYS.items():
        for unit in ("backward", "window"):
            for name, pattern in PATTERNS.items():
                for scales, precision in ((False, "no"), (True, scaled(init_scale=4.0, growth_interval=1))):
                    turns = Turns(strategy, precision, options)
                    pattern(turns, getattr(turns, unit))
                    found[way, unit, name, scales] = turns.weights()
                    turns.accelerator.free_memory()
            turns = Turns(strategy, scaled(), options)
            learn = getattr(turns, unit)
            learn(0)
            turns.clip(0)
            learn(0)
            for end in (turns.clip, turns.step):
                with pytest.raises(RuntimeError, match="were unscaled, .* and then a backward added others"):
                    end(0)
            turns.models[0].zero_grad()
            learn(0)
            turns.step(0)
            turns.accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def patterns():
    """Also where gradients are added to unscaled ones, which is refused on every rank."""
    return run_ranks(all_patterns, 2)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("unit", ["backward", "window"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_sees_nothing_of_the_scale_whatever_was_unscaled_before(patterns, way, unit, name):
    for rank in patterns:
        for found, expected in zip(rank[way, unit, name, True], rank[way, unit, name, False], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)

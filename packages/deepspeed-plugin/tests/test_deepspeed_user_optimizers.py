"""What loops do with models and optimizers of their own means under ZeRO what it means in one process."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed, optimizer_double
from accel_testing import run_ranks

STAGES = (0, 1, 2, 3)
SCHEDULE_FREE = find_spec("schedulefree") is not None


def adversaries(strategy):
    """The weights of D in a loop that drops gradients by the models, as that of torch's DCGAN: G's backward leaves some in D."""
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy, cpu=True)
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
    g, d, of_g, of_d = accelerator.prepare(g, d, *optimizers)
    for _ in range(3):
        real, noise = torch.randn(8, 4) + 1, torch.randn(8, 4)
        d.zero_grad()
        fake = g(noise)
        accelerator.backward(d(fake.detach()).mean() - d(real).mean())
        of_d.step()
        g.zero_grad()
        accelerator.backward(-d(fake).mean())
        of_g.step()
    weights = accelerator.get_state_dict(d)["weight"].clone()
    accelerator.free_memory()
    return weights


class Counting(torch.optim.Optimizer):
    """Keeps its count in its groups, as schedule-free optimizers do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"] / group["k"])


def steps_of_one_that_counts(strategy, folder):
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = nn.Linear(4, 4, bias=False)
    model, optimizer = accelerator.prepare(model, Counting(model.parameters(), lr=1.0))

    def step():
        before = accelerator.get_state_dict(model)["weight"].clone()
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        return (accelerator.get_state_dict(model)["weight"] - before).abs().max().item()

    found = [step() for _ in range(2)]
    accelerator.save_state(folder)
    found.append(step())
    accelerator.load_state(folder)
    found.append(step())
    accelerator.free_memory()
    return found, optimizer.param_groups[0]["k"]


def schedule_free(strategy):
    """The weights in which a schedule-free AdamW has its gradients taken, after some steps with a warm-up."""
    from schedulefree import AdamWScheduleFree

    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = nn.Linear(4, 4)
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.1, warmup_steps=3)
    optimizer.train()  # a copy of it steps in prepare()
    model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(5):
        accelerator.backward(model(torch.full((2, 4), float(number))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)["weight"].clone()
    accelerator.free_memory()
    return weights


def clipped(forgets):
    """How far two models move that the loop has clipped to 2, where the configuration clips to 0.1."""
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=2, gradient_clipping=0.1), cpu=True)
    pair = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in pair]
    a, b, *optimizers = accelerator.prepare(*pair, *optimizers)
    before = [each.weight.detach().clone() for each in pair]
    for number in range(2 if forgets else 1):
        accelerator.backward(sum(each(torch.full((8, 4), 3.0)).square().mean() for each in (a, b)))
        if number == 0:
            for each in (a, b):
                accelerator.clip_grad_norm_(each.parameters(), 2.0)
        if forgets and number == 0:
            for each in optimizers:
                each.zero_grad()
    for each in optimizers:
        each.step()
    found = [(each.weight - weight).norm().item() for each, weight in zip(pair, before, strict=True)]
    accelerator.free_memory()
    return found


def everything(folder):
    return {
        "adversaries": {stage: adversaries(DeepSpeed(zero_stage=stage)) for stage in STAGES},
        "counted": {
            stage: steps_of_one_that_counts(DeepSpeed(zero_stage=stage), f"{folder}/{stage}") for stage in STAGES
        },
        "schedule-free": {stage: schedule_free(DeepSpeed(zero_stage=stage)) for stage in STAGES}
        if SCHEDULE_FREE
        else {},
        "clipped": {forgets: clipped(forgets) for forgets in (False, True)},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(everything, 1, str(tmp_path_factory.mktemp("counted")), timeout=110)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_forgets_its_gradients(found, stage):
    expected = adversaries("single")
    assert torch.allclose(found["adversaries"][stage], expected, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_what_an_optimizer_counts_in_its_groups_goes_on_and_is_saved(found, stage):
    steps, count = found["counted"][stage]
    assert steps == pytest.approx([1, 1 / 2, 1 / 3, 1 / 3], abs=1e-5)
    assert count == 3


@pytest.mark.skipif(not SCHEDULE_FREE, reason="schedulefree is not installed")
@pytest.mark.parametrize("stage", STAGES)
def test_schedule_free_training_is_that_of_one_process(found, stage):
    torch.testing.assert_close(found["schedule-free"][stage], schedule_free("single"), rtol=1e-5, atol=1e-6)


def test_what_the_loop_has_clipped_is_left_and_nothing_else_is(found):
    assert found["clipped"][False] == pytest.approx([2.0, 2.0], rel=1e-4)
    assert found["clipped"][True] == pytest.approx([0.1, 0.1], rel=1e-4), "the gradients that were clipped are gone"


class OfTheTotal(torch.optim.Optimizer):
    """Divides by a sum over all parameters, of which under ZeRO each rank has a part."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            total = sum(each.grad.abs().sum() for each in group["params"])
            for each in group["params"]:
                each.add_(each.grad / total, alpha=-group["lr"])


def test_an_optimizer_that_sums_over_parameters_is_refused():
    with pytest.raises(ValueError, match="it looks at more than one element at a time"):
        optimizer_double.check(OfTheTotal(nn.Linear(2, 2).parameters(), lr=0.1))


class OfTheHost(torch.optim.SGD):
    """As DeepSpeed's optimizers in C++, which step what lies on the host alone."""

    def step(self, closure=None):
        assert all(each.is_cpu for group in self.param_groups for each in group["params"]), "it must be 'cpu'"
        return super().step(closure)


def test_an_optimizer_is_tried_where_the_masters_will_be():
    optimizer = OfTheHost(nn.Linear(2, 2, device="meta").parameters(), lr=0.1)
    with pytest.raises(ValueError, match="failed at a flat part of a parameter: AssertionError: it must be 'cpu'"):
        optimizer_double.check(optimizer)
    optimizer_double.check(optimizer, offloads=True)

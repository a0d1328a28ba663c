"""Parameters that take no part in a backward: ranks may use different ones, as conditional models do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_core import Accelerator
from accel_fsdp import FSDP
from accel_testing import run_ranks


class Branches(nn.Module):
    """One unit with two heads of one shape, of which each rank uses its own, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"even": nn.Linear(4, 2), "odd": nn.Linear(4, 2), "none": nn.Linear(4, 2)})
        self.chosen = "even"

    def forward(self, x):
        return self.heads[self.chosen](x)


def built():
    torch.manual_seed(0)
    return Branches()


def batch(rank):
    return torch.linspace(-1, 1, 12).view(3, 4) + rank


def gradients():
    accelerator = Accelerator(strategy=FSDP(wrap="none"), cpu=True)
    model = accelerator.prepare(built())
    model.chosen = ("even", "odd")[accelerator.process_index]
    accelerator.backward(model(batch(accelerator.process_index)).pow(2).sum())
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


class Gated(nn.Module):
    """A number that is not cut, and that takes part where it is asked to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.gate = nn.Parameter(torch.tensor(1.5))
        self.gated = False

    def forward(self, x):
        return self.linear(x) * (self.gate if self.gated else 1.0)


GATED = {(0, 0)}  # (micro-batch, rank)


def window():
    """The gradients of a window of two micro-batches, of which one rank uses the gate in the first."""
    accelerator = Accelerator(strategy=FSDP(), gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(Gated())
    for micro_batch in range(2):
        model.gated = (micro_batch, accelerator.process_index) in GATED
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(accelerator.process_index + micro_batch)).pow(2).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
    return norm, {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def left_out():
    """The names of parameters without a gradient, where all ranks use the same, and what is unused does not travel."""
    accelerator = Accelerator(strategy=FSDP(wrap="none", reduce_unused_parameters=False), cpu=True)
    model = accelerator.prepare(built())
    accelerator.backward(model(batch(accelerator.process_index)).pow(2).sum())
    told = {detail.about: detail.text for detail in accelerator.explain().details}
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}, told


def both():
    return gradients(), window(), left_out()


def whole(gradient):
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).tolist()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(both, 2, timeout=60)


def test_each_head_has_the_gradient_of_the_rank_that_used_it(ranks):
    model = built()
    for rank, chosen in enumerate(("even", "odd")):
        model.chosen = chosen
        (model(batch(rank)).pow(2).sum() / 2).backward()
    for found, *_ in ranks:
        for name, parameter in model.named_parameters():
            if "none" not in name:
                torch.testing.assert_close(torch.tensor(found[name]), parameter.grad)


def test_what_nobody_used_has_a_gradient_of_zero(ranks):
    for found, *_ in ranks:
        assert not torch.tensor(found["heads.none.weight"]).any()


def test_a_number_that_the_closing_micro_batch_does_not_use_is_averaged(ranks):
    torch.manual_seed(0)
    model = Gated()
    for micro_batch in range(2):
        for rank in range(2):
            model.gated = (micro_batch, rank) in GATED
            (model(batch(rank + micro_batch)).pow(2).sum() / 4).backward()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    for _, (norm, found), _ in ranks:
        assert norm == pytest.approx(expected.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(found[name]), parameter.grad)


def test_what_is_unused_may_be_left_out_of_what_travels(ranks):
    for *_, (without, told) in ranks:
        assert without == {f"heads.{head}.{name}" for head in ("odd", "none") for name in ("weight", "bias")}
        assert told["unused parameters"] == "left out of what travels"

"""No step under FSDP uses gradients that have not travelled, or lacks some: they travel, or the step or the backward is refused."""

import copy

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_fsdp import FSDP
from accel_testing import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


def rows(seed=1):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


class Loop:
    def __init__(self, net=None, accumulation=1, **options):
        net = Net() if net is None else net
        self.reference = copy.deepcopy(net)
        self.accelerator = Accelerator(strategy=FSDP(**options), cpu=True, gradient_accumulation_steps=accumulation)
        self.model, self.optimizer = self.accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        self.plain = torch.optim.SGD(self.reference.parameters(), lr=0.1)

    def own(self, seed=1):
        return rows(seed).chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    def loss(self, seed=1):
        return self.model(self.own(seed)).pow(2).mean()

    def whole(self, seed=1):
        return self.reference(rows(seed)).pow(2).mean()

    def agrees(self, *losses):
        """Steps, and compares with one process that steps on the sum of its losses."""
        sum(losses, torch.zeros(())).backward()
        for optimizer in (self.plain, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        ours = self.accelerator.get_state_dict(self.model)
        return not ours or all(
            torch.allclose(ours[name], value, rtol=1e-5, atol=1e-7)
            for name, value in self.reference.state_dict().items()
        )


def right():
    found = {}
    for options in ({}, {"reshard_after_forward": False}, {"activation_checkpointing": True}):
        loop = Loop(**options)
        loss = loop.loss()
        loop.accelerator.backward(loss, retain_graph=True)
        loop.accelerator.backward(loss)
        found[f"a second backward through one graph {options}"] = loop.agrees(2 * loop.whole())

        net = Net()
        net.blocks.requires_grad_(False)
        loop = Loop(net, **options)
        steps = []
        for seed in range(4):
            if seed == 2:
                loop.model.blocks.requires_grad_(True)
                loop.reference.blocks.requires_grad_(True)
            loop.accelerator.backward(loop.loss(seed))
            steps.append(loop.agrees(loop.whole(seed)))
        found[f"unfrozen layers {options}"] = all(steps)

    loop = Loop(ignored_modules=["head"], accumulation=2)
    for seed in range(4):
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.loss(seed))
            if seed % 2:
                found[f"ignored modules, step {seed}"] = loop.agrees(loop.whole(seed - 1) / 2, loop.whole(seed) / 2)
    return found


def refused():
    found = {}
    loop = Loop(ignored_modules=["head"])
    with loop.accelerator.no_sync(loop.model):
        loop.accelerator.backward(loop.loss())
    found["no_sync"] = refusal(loop)
    loop.accelerator.backward(loop.model.head(loop.own()).mean())
    found["a part that is not cut"] = refusal(loop)
    loop.accelerator.backward(loop.loss())
    assert loop.agrees(loop.whole())
    return found


def refusal(loop):
    with pytest.raises(RuntimeError) as raised:
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    return str(raised.value)


def penalised():
    found = {}
    for options in ({}, {"reshard_after_forward": False}, {"wrap": "none"}):
        loop = Loop(**options)
        x = loop.own().requires_grad_(True)
        with pytest.raises(RuntimeError) as raised:
            torch.autograd.grad(loop.model(x).sum(), x, create_graph=True)
        found[f"a penalty {options}"] = str(raised.value)
        with pytest.raises(RuntimeError) as raised:
            loop.accelerator.backward(loop.loss(), create_graph=True)
        found[f"backward(create_graph=True) {options}"] = str(raised.value)
        assert all(each.grad is None for each in loop.model.parameters())
        for seed in range(2):
            loop.accelerator.backward(loop.loss(seed))
            assert loop.agrees(loop.whole(seed)), "training goes on"
    return found


def on_ranks():
    return {"right": right(), "refused": refused(), "penalised": penalised()}


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def facts(request):
    return run_ranks(on_ranks if request.param == 2 else penalised, request.param)


def test_a_backward_that_is_to_be_differentiated_is_refused_before_it_begins(facts):
    for found in facts:
        for name, message in found.get("penalised", found).items():
            assert "gradients of second derivatives would be missing in it" in message, name
            assert "Train this model with strategy='ddp'" in message


def test_what_can_be_averaged_is(facts):
    for found in facts:
        assert [name for name, holds in found.get("right", {}).items() if not holds] == []


def test_a_step_with_gradients_that_have_not_travelled_is_refused(facts):
    for found in facts:
        for name, message in found.get("refused", {}).items():
            assert "which no backward has sent to the other ranks" in message, name
            assert "'head.weight'" in message or name == "no_sync"

"""An optimizer goes on with its parameters when they are cut, or is refused with the reason."""

from __future__ import annotations

import inspect
import random
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_core import Accelerator
from accel_fsdp import FSDP
from accel_fsdp.optimizers import carry, carrying, check
from accel_testing import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.second(self.norm(torch.tanh(self.first(x))))


class Declared(torch.optim.Optimizer):
    """Nobody knows it. It keeps what it has seen of each element, and a number."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("seen", torch.zeros_like(parameter)).add_(parameter.grad)
                state["count"] = state.get("count", 0) + 1
                parameter.sub_(group["lr"] * state["seen"] / state["count"])


class ByNorm(Declared):
    """Looks inside its parameters, and takes the norm of a part for that of the whole."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                own, gradient = (getattr(each, "_local_tensor", each) for each in (parameter, parameter.grad))
                own.sub_(group["lr"] * gradient / gradient.norm())


class WithClosure(Declared):
    """Its step takes a closure, and what it refers to is a part of it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.mine = self.param_groups[0]["params"]

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter in self.mine:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)
        return loss


class SharpnessAware(Declared):
    """Climbs along the gradient, asks for the gradient there, and steps with it from where it was."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "it needs a closure"
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(0.05 * parameter.grad / norm)
        with torch.enable_grad():
            loss = closure()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value - 0.1 * parameter.grad)
        return loss


class SharpnessAwareOfParts(SharpnessAware):
    def step(self, closure=None):
        if closure is not None:
            raise RuntimeError("it cannot")
        super().step()


class InBackward(Declared):
    def fused_backward(self, loss, lr):
        raise AssertionError("is never reached")


def matrices(parameters):
    return [parameter for parameter in parameters if parameter.dim() == 2]


def third_party(module, name, **options):
    def make(parameters):
        found = __import__(module, fromlist=["optim"])
        for part in name.split("."):
            found = getattr(found, part)
        return found(parameters, lr=0.1, **options)

    return make


# That of torch 2.9 has the state that its constructor made and makes no other, so that a trial copy of it cannot step.
ADAGRAD = ["Adagrad"] if "full_like" in inspect.getsource(torch.optim.Adagrad._init_group) else []
# Before torch 2.15, its entries of a cut tensor cannot be set by a mask.
RPROP = {"Rprop": torch.optim.Rprop} if torch.__version__ >= "2.15" else {}
OF_TORCH = ("SGD", "Adam", "AdamW", *ADAGRAD, "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
TAKEN = {
    **{name: partial(getattr(torch.optim, name), lr=0.1) for name in OF_TORCH},
    **{f"{name} foreach": partial(getattr(torch.optim, name), lr=0.1, foreach=True) for name in OF_TORCH},
    **RPROP,
    "Adam fused": partial(torch.optim.Adam, lr=0.1, fused=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD warming up": partial(torch.optim.SGD, lr=0.0),
    "Adam capturable": partial(torch.optim.Adam, lr=torch.tensor(0.1)),
    "Muon": lambda parameters: torch.optim.Muon(matrices(parameters), lr=0.1),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
    "declared": Declared,
    "with closure": WithClosure,
    "sharpness aware": SharpnessAware,
}
REFUSED = {
    **({} if ADAGRAD else {"Adagrad": (torch.optim.Adagrad, "it raised KeyError: 'sum'")}),
    **({} if RPROP else {"Rprop": (torch.optim.Rprop, r"it raised RuntimeError: .*aten\.index_put_")}),
    "Rprop foreach": (
        partial(torch.optim.Rprop, foreach=True),
        r"it raised .* aten\._foreach",
    ),
    "SGD fused": (partial(torch.optim.SGD, lr=0.1, fused=True), r"it raised .* aten\._fused_sgd_"),
    "Adafactor": (
        partial(torch.optim.Adafactor, lr=0.1),
        r"it raised RuntimeError: aten.pow_|it changed whole parameters",
    ),
    "by norm": (
        ByNorm,
        r"it changed whole parameters by up to 0\.\d+, and those that were cut to values 0\.\d+ beside",
    ),
    "with and without closure": (
        SharpnessAwareOfParts,
        "it raised AssertionError: it needs a closure; and with a closure, RuntimeError: it cannot",
    ),
    "LBFGS uneven": (
        torch.optim.LBFGS,
        r"it raised RuntimeError: (Cannot flatten unevenly sharded tensor|.*aten\.view\.default)",
    ),
    "in backward": (InBackward, "it steps each parameter during the backward, before gradients have travelled"),
}
THIRD_PARTY = {
    "schedulefree": {"AdamWScheduleFree": third_party("schedulefree", "AdamWScheduleFree")},
    "torchao": {"AdamW8bit": third_party("torchao.optim", "AdamW8bit")},
    "bitsandbytes": {
        "AdamW8bit": third_party("bitsandbytes", "optim.AdamW8bit", min_8bit_size=1),
        "AdamW": third_party("bitsandbytes", "optim.AdamW"),
    },
}


def sharded(strategy=None, model=Net):
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy or FSDP(), cpu=True)
    return accelerator, accelerator.prepare(model())


def outcome(make, model):
    try:
        check(make(list(model.parameters())))
    except ValueError as error:
        return str(error)
    return None


def tried(modules):
    _, model = sharded()
    _, uneven = sharded(model=partial(nn.Linear, 4, 7))
    makers = {**TAKEN, **{name: make for name, (make, _) in REFUSED.items()}}
    for module in modules:
        makers.update({f"{module}.{name}": make for name, make in THIRD_PARTY[module].items()})
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        return {name: outcome(make, uneven if "uneven" in name else model) for name, make in makers.items()}


@pytest.fixture(scope="module")
def trials():
    installed = [name for name in THIRD_PARTY if find_spec(name)]
    first, second = run_ranks(tried, 2, installed)
    assert first == second
    return first


def test_optimizers_that_compute_with_dtensors_are_taken(trials):
    assert {name: trials[name] for name in TAKEN} == dict.fromkeys(TAKEN)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_are_refused_with_what_happened(trials, name):
    found = trials[name]
    assert found is not None
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        raise ValueError(found)
    assert "Take one that computes with DTensors, such as torch.optim.AdamW" in found


@pytest.mark.parametrize("name", ["schedulefree.AdamWScheduleFree", "torchao.AdamW8bit"])
def test_those_of_others_that_know_dtensors_are_taken(trials, name):
    if not find_spec(name.partition(".")[0]):
        pytest.skip("is not installed")
    assert trials[name] is None


@pytest.mark.parametrize("name", ["bitsandbytes.AdamW8bit", "bitsandbytes.AdamW"])
def test_kernels_that_take_memory_are_refused(trials, name):
    if not find_spec("bitsandbytes"):
        pytest.skip("is not installed")
    assert "it raised" in trials[name]
    assert "for 8-bit states torchao.optim.AdamW8bit" in trials[name]


def streams():
    return torch.get_rng_state().tolist(), random.getstate()


def untouched():
    accelerator, model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    everywhere = [
        register(lambda *_: calls.append("any step"))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    groups = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    before, weights = streams(), [parameter.full_tensor().clone() for parameter in model.parameters()]
    check(optimizer)
    assert streams() == before
    assert calls == []
    torch.optim.SGD([torch.zeros(1)]).step()
    assert calls == ["any step", "any step"]
    for handle in everywhere:
        handle.remove()
    assert not optimizer.state
    assert [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups] == groups
    assert all(torch.equal(p.full_tensor(), w) for p, w in zip(model.parameters(), weights, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    prepared, _ = accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    train(accelerator, model, prepared, range(1))
    check(prepared)  # gated, with a scheduler and with state
    assert all(state["step"] == 1 for state in prepared.state.values())


def batch(step):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def train(accelerator, model, optimizer, steps):
    for step in steps:
        x = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()


CARRIED = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "fused": partial(torch.optim.AdamW, lr=0.05, fused=True),
    "declared": partial(Declared, lr=0.05),
}


def carried(name):
    """Two steps in one piece, and two after it was cut."""
    torch.manual_seed(1)
    model = Net()
    optimizer = CARRIED[name](model.parameters())
    train(None, model, optimizer, range(2))
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values() if getattr(value, "ndim", 0) > 0]
    assert moments
    assert all(isinstance(value, DTensor) for value in moments)
    train(accelerator, model, optimizer, range(2, 4))
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def expected(name):
    torch.manual_seed(1)
    model = Net()
    optimizer = CARRIED[name](model.parameters())
    train(None, model, optimizer, range(4))
    return list(model.parameters())


def orphaned():
    """What an optimizer of another model is told, and one of the model before it was cut."""
    accelerator, model = sharded()
    other = Net()
    optimizer = accelerator.prepare(torch.optim.SGD(other.named_parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as error:
        accelerator.backward(model(batch(0)).sum())
        optimizer.step()
    return str(error.value)


def jobs():
    untouched()
    return {name: carried(name) for name in CARRIED}, orphaned()


@pytest.fixture(scope="module")
def ran():
    return run_ranks(jobs, 2)


@pytest.mark.parametrize("name", CARRIED)
def test_what_an_optimizer_learnt_before_prepare_is_cut_with_its_parameters(ran, name):
    for states, _ in ran:
        for found, wanted in zip(states[name], expected(name), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_a_trial_changes_nothing(ran):
    """Neither the optimizer nor its parameters, hooks, gradients and random streams: asserted on the ranks."""
    assert len(ran) == 2


def test_an_optimizer_of_another_model_is_named_with_its_parameters(ran):
    for _, message in ran:
        assert "SGD holds parameters that belong to no prepared model: first.weight (6, 4), first.bias (6,)" in message
        assert "Pass their model to prepare()" in message


def stepped(optimizer, model):
    train(None, model, optimizer, range(1))
    return optimizer


FIXED = {
    partial(
        torch.optim.Adafactor, lr=0.1
    ): r"Adafactor has stepped before prepare\(\).* 'row_var' of 'first.weight', a Tensor of "
    r"float32\[6, 1\], cannot be\. Prepare the optimizer before its first step",
    partial(torch.optim.LBFGS, lr=0.1): "'d' of 'first.weight', a Tensor of float32",
}


@pytest.mark.parametrize("make, message", FIXED.items())
def test_state_that_cannot_be_cut_is_named_before_anything_is_changed(make, message):
    model = Net()
    optimizer = make(model.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):
        loss = model(batch(0)).square().sum()
        loss.backward()
        optimizer.step(lambda: loss)
    else:
        stepped(optimizer, model)
    with pytest.raises(ValueError, match=message):
        carrying(model, [optimizer])
    carrying(model, [optimizer], whole=list(model.parameters()))


def test_state_of_a_shape_that_was_declared_otherwise_is_refused():
    model = Net()
    optimizer = stepped(Declared(model.parameters()), model)
    carrying(model, [optimizer])
    for state in optimizer.state.values():
        state["codes"] = torch.zeros_like(state["seen"], dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"'codes' of 'first.weight', a Tensor of uint8\[6, 4\], cannot be.*accel_layouts = \{'codes'"
    ):
        carrying(model, [optimizer])
    optimizer.accel_layouts = {"codes": "elementwise"}
    carrying(model, [optimizer])


def test_state_stays_where_a_parameter_is_replaced_by_a_whole_one():
    model = Net()
    optimizer = stepped(torch.optim.Adafactor(model.parameters()), model)
    old = model.first.weight
    assert carry(old, nn.Parameter(old.detach().clone()), optimizer.state[old], optimizer) is optimizer.state[old]

"""No step under DDP uses gradients that were not averaged since their last backward: they are averaged, or the step is refused."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from together import Together
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_core import DDP, Accelerator, DistributedDataParallelKwargs, LocalSGD
from accel_testing import RanksFailed, run_ranks

ON_TWO = Together(2)

REFUSED = r"gradients of (\d+) of its parameters have not been averaged over the ranks"


class Net(nn.Module):
    """A backbone and a head, which can be run apart, recomputed, or left out."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor, headless: bool = False) -> torch.Tensor:
        if self.recomputes:
            middle: torch.Tensor = checkpoint(self.backbone, x, use_reentrant=False)
        else:
            middle = self.backbone(x)
        return middle if headless else self.head(middle)


class Shared(nn.Module):
    """A layer that is recomputed in two places, by backwards of their own: its gradient changes twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = x.requires_grad_()
        for _ in range(2):
            middle = torch.tanh(checkpoint(self.layer, middle, use_reentrant=True))
        output: torch.Tensor = self.head(middle)
        return output


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))


class Loop:
    """Two ranks that train a model on halves of a batch, and the same on one."""

    def __init__(self, accumulation: int = 1, net: nn.Module | None = None, **options: Any) -> None:
        handlers = [DistributedDataParallelKwargs(**options)] if options else None
        self.accelerator = Accelerator(gradient_accumulation_steps=accumulation, kwargs_handlers=handlers)
        self.inner = Net() if net is None else net
        self.model: Any = self.accelerator.prepare(self.inner)
        self.optimizer = self.accelerator.prepare(torch.optim.SGD(self.inner.parameters(), lr=0.1))
        self.reference = copy.deepcopy(self.inner)
        self.reference_optimizer = torch.optim.SGD(self.reference.parameters(), lr=0.1)

    def own(self, seed: int = 1) -> torch.Tensor:
        return rows(seed).chunk(2)[self.accelerator.process_index]

    def loss(self, model: Any = None, seed: int = 1, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = (self.model if model is None else model)(self.own(seed), **options).pow(2).mean()
        return loss

    def whole(self, seed: int = 1, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = self.reference(rows(seed), **options).pow(2).mean()
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def refusal(self) -> str:
        before = [each.detach().clone() for each in self.inner.parameters()]
        try:
            self.optimizer.step()
        except RuntimeError as error:
            assert all(map(torch.equal, before, self.inner.parameters())), "nothing was changed"
            self.optimizer.zero_grad()
            return str(error)
        return "stepped"

    def agrees(self, *losses: torch.Tensor) -> bool:
        """Steps, and compares with one process that steps on the sum of its losses."""
        sum(losses, torch.zeros(())).backward()
        self.reference_optimizer.step()
        self.reference_optimizer.zero_grad()
        self.step()
        pairs = zip(self.inner.parameters(), self.reference.parameters(), strict=True)
        return all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7) for ours, theirs in pairs)


@ON_TWO
def refused() -> dict[str, str]:
    loop, found = Loop(), {}
    loop.accelerator.backward(loop.loss(loop.inner))
    found["the model inside the wrapper"] = loop.refusal()
    loop.loss(loop.inner).backward()
    found["the model inside the wrapper, plain backward"] = loop.refusal()
    assert_trains(loop)
    loop.accelerator.backward(loop.loss(loop.inner))
    found["the model inside the wrapper, later"] = loop.refusal()
    loop.accelerator.backward(loop.inner.head(torch.ones(2, 4) + loop.accelerator.process_index).mean())
    found["a part of the model"] = loop.refusal()
    with loop.accelerator.no_sync():
        loop.accelerator.backward(loop.loss())
    found["no_sync"] = loop.refusal()
    with loop.accelerator.no_sync():
        loop.accelerator.backward(loop.loss())
        found["a step inside no_sync"] = loop.refusal()
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    found["a second plain backward"] = loop.refusal()
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        other = Loop(**options)
        for step in range(2):
            loss = other.loss()
            loss.backward(retain_graph=True)
            loss.backward()
            found[f"a second plain backward, {options}, step {step}"] = other.refusal()
            assert_trains(other)
    loop.accelerator.forward_backward(loop.inner, [loop.own()], lambda output, batch: (output.sum(), len(batch)))
    found["forward_backward of the model inside"] = loop.refusal()

    def closure() -> torch.Tensor:
        loss = loop.loss(loop.inner)
        loop.accelerator.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match=REFUSED):
        loop.optimizer.step(closure)
    loop.optimizer.zero_grad()
    assert_trains(loop)

    windows = Loop(accumulation=2)
    for seed in (1, 2):
        with windows.accelerator.accumulate(windows.model):
            windows.accelerator.backward(windows.loss(windows.inner, seed=seed))
    found["a window of the model inside"] = windows.refusal()

    partial = Loop()
    partial.accelerator.backward(partial.loss(headless=True))
    found["a parameter that took no part"] = partial.refusal()
    return found


@ON_TWO
def searched() -> list[bool]:
    """A line search decides by the loss: that of all ranks, or else each rank takes steps of its own."""
    agree = []
    for by_name in (False, True):
        loop = Loop()
        loop.optimizer, loop.reference_optimizer = (
            torch.optim.LBFGS(each.parameters(), max_iter=4, line_search_fn="strong_wolfe")
            for each in (loop.inner, loop.reference)
        )
        loop.accelerator.prepare(loop.optimizer)

        def closure(loop: Loop = loop) -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss()
            loop.accelerator.backward(loss)
            return loss

        def whole(loop: Loop = loop) -> torch.Tensor:
            loop.reference_optimizer.zero_grad()
            loss = loop.whole()
            loss.backward()
            return loss

        for _ in range(3):
            found = loop.optimizer.step(closure=closure) if by_name else loop.optimizer.step(closure)
            agree.append(torch.allclose(found, loop.reference_optimizer.step(whole)))
        pairs = zip(loop.inner.parameters(), loop.reference.parameters(), strict=True)
        agree.append(all(torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5) for ours, theirs in pairs))
    return agree


def test_an_optimizer_that_decides_by_the_loss_decides_by_that_of_all_ranks() -> None:
    assert all(all(agree) for agree in ON_TWO.run(searched))


@ON_TWO
def stepped_by_themselves() -> list[float]:
    loop, losses = Loop(), []

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loop.accelerator.backward(loss)
        return loss

    with loop.accelerator.join_uneven_inputs([loop.model]):
        steps = range(1 + loop.accelerator.process_index)
        losses += [float(loop.optimizer.step(closure)) for _ in steps]
    with LocalSGD(accelerator=loop.accelerator, model=loop.model, local_sgd_steps=2) as local:
        for _ in range(2):
            losses.append(float(loop.optimizer.step(closure)))
            local.step()
    assert loop.optimizer.step(lambda: (closure(), "noted"))[1] == "noted"  # no loss, but what is returned as it is
    return losses


def test_where_ranks_step_by_themselves_closures_return_what_they_did() -> None:
    first, second = ON_TWO.run(stepped_by_themselves)
    assert [len(first), len(second)] == [3, 4]
    assert first[0] != second[0]
    assert first[-1] != second[-1]


def assert_trains(loop: Loop) -> None:
    loop.accelerator.backward(loop.loss())
    loop.step()


def test_a_step_with_gradients_that_no_backward_has_averaged_is_refused_on_every_rank() -> None:
    for found in ON_TWO.run(refused):
        unused = found.pop("a parameter that took no part")
        assert "2 parameters took no part in the loss of this window" in unused
        assert "head.weight, head.bias" in unused
        part = found.pop("a part of the model")
        assert "gradients of 2 of its parameters" in part
        assert "head.weight, head.bias" in part
        for name, message in found.items():
            assert "gradients of 4 of its parameters have not been averaged" in message, name
            assert "backbone.0.weight, backbone.0.bias, head.weight, head.bias" in message, name
            assert "call that, and neither the model inside it (accelerator.unwrap_model) nor a part of it" in message


@ON_TWO
def made_right() -> dict[str, bool]:
    found = {}
    loop = Loop()
    loss, whole = loop.loss(), loop.whole()
    loop.accelerator.backward(loss, retain_graph=True)
    loop.accelerator.backward(loss * 2)
    found["a second backward through one graph"] = loop.agrees(whole, 2 * whole)

    loop = Loop()
    first, second = loop.loss(), loop.loss(seed=2)
    loop.accelerator.backward(first)
    loop.accelerator.backward(second)
    found["two forwards, then two backwards"] = loop.agrees(loop.whole(), loop.whole(seed=2))

    loop = Loop()
    loop.accelerator.backward(loop.loss())
    loop.accelerator.backward(loop.loss(loop.inner.backbone, seed=2))
    found["a further loss of a part"] = loop.agrees(loop.whole(), loop.whole(seed=2, headless=True))

    loop = Loop(find_unused_parameters=True)
    loss = loop.loss(headless=True)
    loop.accelerator.backward(loss, retain_graph=True)
    loop.accelerator.backward(loss)
    found["unused parameters stay without gradient"] = loop.inner.head.weight.grad is None
    found["a second backward beside unused parameters"] = loop.agrees(2 * loop.whole(headless=True))

    loop = Loop(accumulation=2)
    for seed in (1, 2):
        with loop.accelerator.accumulate(loop.model):
            loss = loop.loss(seed=seed)
            loop.accelerator.backward(loss, retain_graph=True)
            loop.accelerator.backward(loss)
    found["two backwards in each micro-batch"] = loop.agrees(loop.whole(), loop.whole(seed=2))

    loop = Loop()
    mean = loop.accelerator.forward_backward(loop.model, [loop.own()], lambda output, batch: (output.sum(), len(batch)))
    found["forward_backward"] = bool(mean.isfinite()) and loop.agrees(loop.reference(rows()).mean())

    loop = Loop()
    extra = loop.loss(seed=2)  # whose backward comes when the window has been averaged
    loop.accelerator.forward_backward(
        loop.model, [loop.own(seed=1)], lambda output, batch: (output.sum() + 4 * extra, len(batch))
    )
    found["forward_backward with a further loss"] = loop.agrees(loop.reference(rows()).mean(), loop.whole(seed=2))

    for options in ({}, {"static_graph": True}, {"comm_hook": "bf16"}, {"gradient_as_bucket_view": False}):
        net = Net()
        net.backbone.requires_grad_(False)
        loop = Loop(net=net, **options)
        for _ in range(3):
            loop.accelerator.backward(loop.loss())
            loop.agrees(loop.whole())
        loop.inner.backbone.requires_grad_(True)
        loop.reference.backbone.requires_grad_(True)
        again = []
        for seed in (2, 3, 4):
            loop.accelerator.backward(loop.loss(seed=seed))
            again.append(loop.agrees(loop.whole(seed=seed)) or options == {"comm_hook": "bf16"})
        found[f"unfrozen layers {options}"] = all(again) and alike(loop)
    return found


def alike(loop: Loop) -> bool:
    """Whether both ranks have the same parameters."""
    mine = torch.cat([each.detach().reshape(-1) for each in loop.inner.parameters()])
    return bool(loop.accelerator.gather(mine[None]).diff(dim=0).eq(0).all())


def test_what_can_be_averaged_is() -> None:
    for found in ON_TWO.run(made_right):
        assert [name for name, holds in found.items() if not holds] == []


@ON_TWO
def unfreezing() -> dict[str, Any]:
    found: dict[str, Any] = {}
    net = Net()
    net.backbone.requires_grad_(False)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(net)
    optimizer = accelerator.prepare(torch.optim.SGD(net.head.parameters(), lr=0.1))

    def window() -> None:
        for seed in (1, 2):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows(seed).chunk(2)[accelerator.process_index]).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()

    window()
    net.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.backbone.parameters()), "lr": 0.01})
    window()
    found["add_param_group"] = accelerator.gather(net.backbone[0].weight.detach()[None]).diff(dim=0).eq(0).all().item()

    net.backbone.requires_grad_(False)
    again = accelerator.prepare(copy.deepcopy(net))
    for each in (again.module.backbone, net.backbone):
        each.requires_grad_(True)
    late = accelerator.prepare(torch.optim.SGD(again.parameters(), lr=0.1))
    accelerator.backward(again.module.backbone(rows()[: accelerator.process_index + 1]).mean())
    with pytest.raises(RuntimeError) as raised:
        late.step()
    found["never called since"] = str(raised.value)

    compressed = DDP(comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 1})
    accelerator = Accelerator(strategy=compressed)
    net = Net()
    net.backbone.requires_grad_(False)
    model = accelerator.prepare(net)
    net.backbone.requires_grad_(True)
    with pytest.raises(RuntimeError) as raised:
        model(rows())
    found["power_sgd"] = str(raised.value)

    added = nn.Linear(1, 1)
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    model.module.added = added
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as raised:
        accelerator.backward(model(rows()).mean())
    found["added"] = str(raised.value)
    return found


def test_parameters_that_are_trained_later_are_averaged_or_refused() -> None:
    for found in ON_TWO.run(unfreezing):
        assert found["add_param_group"]
        assert "backbone.0.weight, backbone.0.bias" in found["never called since"]
        assert "2 parameters were unfrozen after prepare(), and comm_hook='power_sgd'" in found["power_sgd"]
        assert "prepare the model and its optimizer again" in found["power_sgd"]
        assert "got after it was prepared" in found["added"]


@ON_TWO
def legitimate() -> dict[str, bool]:
    found = {}
    for name, loop in {
        "plain": Loop(),
        "recomputed": Loop(net=Net(recomputes=True)),
        "unused parameters": Loop(find_unused_parameters=True),
        "static graph": Loop(static_graph=True),
        "static graph, recomputed": Loop(net=Net(recomputes=True), static_graph=True),
        "bucket copies": Loop(gradient_as_bucket_view=False),
    }.items():
        steps = []
        for seed in range(3):
            loop.accelerator.backward(loop.loss(seed=seed))
            nn.utils.clip_grad_norm_(loop.inner.parameters(), 1e6)
            steps.append(loop.agrees(loop.whole(seed=seed)))
            loop.loss(seed=seed).backward()
            steps.append(loop.agrees(loop.whole(seed=seed)))
        with loop.accelerator.no_sync():
            loop.accelerator.backward(loop.loss(seed=4))
        loop.accelerator.backward(loop.loss(seed=5))
        loop.model(rows())  # with gradients, before the step
        steps.append(loop.agrees(loop.whole(seed=4), loop.whole(seed=5)))
        found[name] = all(steps)

    shared = Loop(net=Shared(), static_graph=True)
    found["static graph, one layer recomputed in two places"] = True
    for seed in range(3):
        shared.loss(seed=seed).backward()
        found["static graph, one layer recomputed in two places"] &= shared.agrees(shared.whole(seed=seed))

    loop = Loop(find_unused_parameters=True)
    loop.accelerator.backward(loop.loss(headless=True))
    found["a part of the parameters"] = loop.agrees(loop.whole(headless=True))

    loop = Loop()
    loop.loss(loop.inner).backward()  # of a map of importances, say
    loop.optimizer.zero_grad()
    loop.accelerator.backward(loop.loss())
    found["a probe that is dropped"] = loop.agrees(loop.whole())

    loop = Loop()
    for each in loop.inner.parameters():
        each.grad = torch.ones_like(each)
    found["gradients made by hand"] = loop.refusal() == "stepped"

    loop = Loop()
    loss = loop.loss()
    loop.accelerator.backward(loss)
    penalty = torch.autograd.grad(loop.loss(), list(loop.inner.parameters()), create_graph=True)
    found["gradients that are not accumulated"] = len(penalty) == 4 and loop.agrees(loop.whole())

    loop = Loop()
    with LocalSGD(loop.accelerator, loop.model, local_sgd_steps=2) as local_sgd:
        for seed in range(4):
            loop.accelerator.backward(loop.loss(seed=seed))
            loop.step()
            local_sgd.step()
    found["local SGD"] = alike(loop)

    loop = Loop()
    by_hand = torch.optim.SGD(loop.inner.parameters(), lr=0.1)
    loop.loss(loop.inner).backward()
    by_hand.step()
    by_hand.zero_grad()
    found["an optimizer that was not prepared"] = not alike(loop)

    loop = Loop()
    with loop.accelerator.join_uneven_inputs([loop.model]):
        for seed in range(1 + loop.accelerator.process_index):
            loop.accelerator.backward(loop.loss(seed=seed))
            loop.step()
    found["uneven inputs"] = alike(loop)

    copied = pickle.loads(pickle.dumps(copy.deepcopy(loop.model)))
    copied(rows()).mean().backward()
    found["copies"] = copied.module.head.weight.grad is not None
    loop.accelerator.free_memory()
    found["nothing is left on parameters"] = not any(
        each._post_accumulate_grad_hooks for each in loop.inner.parameters()
    )
    again: Any = loop.accelerator.prepare(loop.model)
    optimizer = loop.accelerator.prepare(torch.optim.SGD(again.parameters(), lr=0.1))
    loop.loss(loop.inner).backward()
    try:
        optimizer.step()
    except RuntimeError:
        found["a wrapper that is prepared again"] = True
    return found


def test_loops_that_are_right_are_left_alone() -> None:
    for found in ON_TWO.run(legitimate):
        assert [name for name, holds in found.items() if not holds] == []
        assert "a wrapper that is prepared again" in found


def apart(kind: str) -> None:
    """One rank alone runs a second backward, or calls the model inside the wrapper."""
    loop = Loop()
    for seed in range(3):
        odd = seed == 1 and loop.accelerator.is_main_process
        loss = loop.loss(loop.inner if odd and kind == "raw" else None, seed=seed)
        loop.accelerator.backward(loss, retain_graph=odd)
        if odd and kind == "second":
            loop.accelerator.backward(loss)
        loop.step()


@pytest.mark.parametrize("kind", ["raw", "second"])
def test_ranks_that_do_not_do_the_same_all_end(kind: str) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as raised:
        run_ranks(apart, 2, kind, timeout=100)
    assert time.monotonic() - began < 60
    if kind == "raw":
        assert "gradients of 4 of its parameters have not been averaged" in str(raised.value)


@ON_TWO
def gan() -> dict[str, Any]:
    """Two models, two optimizers, two losses; with a gradient penalty, and with the critic beside the wrapper."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    inner = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    references = copy.deepcopy(inner)
    generator, critic = accelerator.prepare(*inner)
    optimizers = [accelerator.prepare(torch.optim.SGD(each.parameters(), lr=0.1)) for each in inner]
    plain = [torch.optim.SGD(each.parameters(), lr=0.1) for each in references]
    share = lambda x: x.chunk(2)[accelerator.process_index]

    def losses(makes: Any, judges: Any, x: torch.Tensor, noise: torch.Tensor) -> Any:
        fake = makes(noise)
        mixed = (0.5 * x + 0.5 * fake.detach()).requires_grad_(True)
        slope = torch.autograd.grad(judges(mixed).sum(), mixed, create_graph=True)[0]
        yield judges(fake.detach()).mean() - judges(x).mean() + (slope.norm(dim=1) - 1).pow(2).mean()
        yield -judges(fake).mean()

    for seed in range(3):
        x, noise = rows(seed), rows(seed + 10)
        ours = losses(generator, critic, share(x), share(noise))
        theirs = losses(*references, x, noise)
        for number in (1, 0):
            accelerator.backward(next(ours))
            next(theirs).backward()
            for each in (optimizers[number], plain[number]):
                each.step()
                each.zero_grad()
        critic.zero_grad()
        references[1].zero_grad()
    parameters = zip(*(nn.ModuleList(each).parameters() for each in (inner, references)), strict=True)
    found: dict[str, Any] = {"trained": all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in parameters)}
    accelerator.backward(-inner[1](generator(share(noise))).mean())
    optimizers[0].step()
    found["a critic that does not step may be called beside its wrapper"] = True
    with pytest.raises(RuntimeError, match=REFUSED) as raised:
        optimizers[1].step()
    found["one that does may not"] = str(raised.value)
    return found


def test_the_models_of_a_gan_are_looked_at_apart() -> None:
    for found in ON_TWO.run(gan):
        assert found["trained"]
        assert found["a critic that does not step may be called beside its wrapper"]
        assert "0.weight, 0.bias, 2.weight, 2.bias" in found["one that does may not"]

"""What a training loop may do to a model under ZeRO: it trains as under one process, or all ranks are told why not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_precision import FP16
from accel_testing import run_ranks
from accel_testing.training import gradients_of

STAGES = (1, 2, 3)
WORLD = 2


class Branches(nn.Module):
    """A front, and heads of which one is chosen."""

    def __init__(self, widths=(4, 4, 3)):
        super().__init__()
        self.front = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)) for width in widths)
        self.chosen = 0

    def forward(self, x):
        return self.heads[self.chosen](self.front(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("raised by the test")


class Holder:
    """An output that nothing looks into."""

    def __init__(self, value):
        self.value = value


def batch(number):
    return torch.linspace(-1, 1, 12).view(3, 4) + number


def loss_of(model, number):
    return model(batch(number)).square().sum()


def built(net=Branches):
    torch.manual_seed(0)
    return net()


def prepared(stage, net=Branches, kind=torch.optim.SGD, **options):
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True, **options)
    model = built(net)
    return accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.1))


def message(function, *arguments):
    try:
        function(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def step(accelerator, model, optimizer, number=0):
    accelerator.backward(loss_of(model, accelerator.process_index + number))
    optimizer.step()
    optimizer.zero_grad()


def weight_of(accelerator, model):
    """A copy of a weight, on rank 0; on the others nothing."""
    state = accelerator.get_state_dict(model)
    return state["front.weight"].clone() if state else torch.zeros(1)


# Parameters that ranks do not use alike


def unlike(stage, chosen):
    """The gradients of a window in which `chosen(rank, micro_batch)` says which head is used; the first of two is held back."""
    accelerator, model, _ = prepared(stage)
    rank = accelerator.process_index
    with accelerator.no_sync(model):
        model.module.chosen = chosen(rank, 0)
        accelerator.backward(loss_of(model, rank))
    model.module.chosen = chosen(rank, 1)
    accelerator.backward(loss_of(model, rank + 2))
    return gradients_of(accelerator, model)


def head_by_rank(rank, micro_batch):
    return (rank + micro_batch) % 3  # 0, 1 and 1, 2: one is used by nobody at some time, and one is wider than another


def head_by_batch(rank, micro_batch):
    return micro_batch


def expected_gradients(chosen):
    model = built()
    for rank in range(WORLD):
        for micro_batch in range(2):
            model.chosen = chosen(rank, micro_batch)
            (loss_of(model, rank + 2 * micro_batch) / WORLD).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def unlike_under_3(clips):
    accelerator, model, optimizer = prepared(3, lambda: Branches((4, 4)))
    model.module.chosen = accelerator.process_index
    accelerator.backward(loss_of(model, 0))
    if clips:
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
    return message(optimizer.step)


# What is changed on the way


def changed(stage):
    """What a step says behind each change, by name."""
    said = {}
    for change in ("added", "unfrozen", "frozen"):
        accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True)
        net = built()
        if change != "frozen":
            net.front.requires_grad_(False)
        held = net.heads if change == "added" else net
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(held.parameters(), lr=0.1))
        net.front.requires_grad_(change == "unfrozen")
        if change == "added":
            optimizer.add_param_group({"params": [*net.front.parameters()]})
        accelerator.backward(loss_of(model, 0))
        said[change] = message(optimizer.step)
        accelerator.free_memory()
    return said


def interrupted(stage):
    """The gradients behind a backward that raised."""
    accelerator, model, optimizer = prepared(stage)
    handle = model.module.front.register_forward_hook(lambda *found: Raising.apply(found[2]))
    loss = loss_of(model, accelerator.process_index)
    with pytest.raises(ArithmeticError):
        accelerator.backward(loss)
    handle.remove()
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, accelerator.process_index))
    return gradients_of(accelerator, model)


def not_finite(stage, scaled=False, clips=False):
    """Whether a step was left out, whether parameters are as before it; and the same of the next step."""
    accelerator, model, optimizer = prepared(stage, mixed_precision=FP16(init_scale=8.0) if scaled else "no")
    found = []
    for bad in (True, False):
        before = weight_of(accelerator, model)
        loss = loss_of(model, accelerator.process_index)
        accelerator.backward(loss * float("inf") if bad and accelerator.is_main_process else loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        same = torch.equal(before, weight_of(accelerator, model))
        found.append((accelerator.optimizer_step_was_skipped, same))
    return found


def low(stage):
    """The dtypes of a bf16 model and of what is saved of it; and whether steps that bf16 cannot hold add up."""
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True, mixed_precision="bf16-true")
    net = built()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-5))
    dtype = next(model.parameters()).dtype
    before = weight_of(accelerator, model)
    for _ in range(2):
        step(accelerator, model, optimizer)
    after = weight_of(accelerator, model)
    return dtype, after.dtype, bool((before != after).all())


def again(stage):
    """Weights after a step, `free_memory`, and a step of another engine."""
    accelerator, model, optimizer = prepared(stage)
    step(accelerator, model, optimizer)
    net = accelerator.unwrap_model(model)
    accelerator.free_memory()
    said = message(model, batch(0))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    return said, accelerator.get_state_dict(model)


def two_models(stage):
    """Two models that one optimizer steps, which has stepped before."""
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True)
    first, second, optimizer = couple()
    second(first(batch(9))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    for _ in range(2):
        accelerator.backward(second(first(batch(accelerator.process_index))).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return [accelerator.get_state_dict(each) for each in (first, second)]


def couple():
    first, second = built(lambda: nn.Linear(4, 4)), built(lambda: nn.Linear(4, 2))
    return first, second, torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)


def stepped_apart(stage):
    """What `prepare` says of an optimizer that has stepped some parameters more often than others."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    for model.chosen in (0, 1):
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return message(Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True).prepare, model, optimizer)


def refusals(stage):
    """What `prepare` says of optimizers that ZeRO cannot step, and of two for one model."""
    said = {}
    for name in ("Muon", "Adafactor", "LBFGS", "SparseAdam"):
        model = nn.Linear(4, 4, bias=False)
        optimizer = getattr(torch.optim, name)(model.parameters())
        said[name] = message(Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True).prepare, model, optimizer)
    model = built()
    two = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.front, model.heads))
    said["two"] = message(Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True).prepare, model, *two)
    _, model, _ = prepared(stage)
    said["copied"], said["pickled"] = message(copy.deepcopy, model), message(pickle.dumps, model)
    return said


def small_print(stage):
    """Which hooks of the optimizer ran, with a schedule; modes; and gradients of unusual outputs."""
    accelerator, model, optimizer = prepared(stage)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = accelerator.prepare(StepLR(optimizer, 1, 0.5))
    step(accelerator, model, optimizer)
    scheduler.step()
    modes = [model.eval().module.training, model.train().module.training]
    accelerator.free_memory()
    return (
        calls,
        optimizer.param_groups[0]["lr"],
        modes,
        {str(each): checked(stage, each) for each in (True, False)},
        hidden(stage),
    )


def checked(stage, reentrant):
    accelerator, model, _ = prepared(stage, lambda: Checkpointed(reentrant))
    accelerator.backward(loss_of(model, accelerator.process_index))
    return gradients_of(accelerator, model)


def hidden(stage):
    """The gradients where the output is inside an object, and the model was evaluated before the backward."""
    accelerator, model, _ = prepared(stage)
    model.module.register_forward_hook(lambda *found: Holder(found[2]))
    output = model(batch(accelerator.process_index)).value
    with torch.no_grad():
        model(batch(0))
    accelerator.backward(output.square().sum())
    return gradients_of(accelerator, model)


def everything():
    found = {}
    for stage in STAGES:
        found[stage] = {
            "unlike": unlike(stage, head_by_rank if stage < 3 else head_by_batch),
            "changed": changed(stage),
            "interrupted": interrupted(stage),
            "not finite": not_finite(stage),
            "not finite and clipped": not_finite(stage, clips=True),
            "scaled": not_finite(stage, scaled=True),
            "low": low(stage),
            "again": again(stage),
            "two models": two_models(stage),
            "stepped apart": stepped_apart(stage),
            "refusals": refusals(stage),
            "small print": small_print(stage),
        }
    found[0] = {"unlike": [unlike_under_3(clips) for clips in (False, True)]}
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, WORLD, timeout=120)


@pytest.fixture(params=STAGES)
def facts(request, ranks):
    """What each rank has found in one stage."""
    return [rank[request.param] for rank in ranks]


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def gradients_of_one_process(model):
    for rank in range(WORLD):
        (loss_of(model, rank) / WORLD).backward()
    return {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_not_all_ranks_or_backwards_use_are_averaged(ranks, stage):
    expected = expected_gradients(head_by_rank if stage < 3 else head_by_batch)
    for rank in ranks:
        found = rank[stage]["unlike"]
        for name, value in expected.items():
            if value is None:
                assert name not in found or not found[name].any()
            else:
                torch.testing.assert_close(found[name], value)


def test_ranks_that_use_different_parameters_under_stage_3_are_told(ranks):
    told = "RuntimeError: SGD.step() was called for Branches, but the ranks have used different parameters"
    for rank in ranks:
        assert [said.startswith(told) for said in rank[0]["unlike"]] == [True, True]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("added", "2 of its parameters were added to the optimizer"),
        ("unfrozen", "2 of its parameters were unfrozen"),
        ("frozen", "2 of its parameters were frozen"),
    ],
)
def test_other_parameters_than_at_the_start_are_refused(facts, change, what):
    for rank in facts:
        assert what in rank["changed"][change]
        assert "after prepare()" in rank["changed"][change]


def test_a_loop_goes_on_behind_a_backward_that_raised(facts):
    expected = gradients_of_one_process(built())
    for rank in facts:
        for name, value in rank["interrupted"].items():
            torch.testing.assert_close(value, expected[name])


def test_a_step_by_gradients_that_overflowed_is_left_out_and_told(facts):
    assert facts[0]["scaled"] == [(True, True), (False, False)]
    assert [skipped for skipped, _ in facts[1]["scaled"]] == [True, False]


def test_a_step_by_gradients_that_are_not_finite_is_taken_or_told(facts):
    """Stage 3 leaves it out by itself; stages 1 and 2 take it, as torch does."""
    for found in ("not finite", "not finite and clipped"):
        (skipped, same), _ = facts[0][found]
        assert skipped is same, found


def test_masters_of_low_precision_parameters_are_whole(facts):
    assert facts[0]["low"] == (torch.bfloat16, torch.float32, True)


def test_a_model_is_prepared_again_behind_free_memory(facts):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        gradients_of_one_process(model)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(facts[0]["again"][1], model.state_dict())
    for said, _ in (rank["again"] for rank in facts):
        assert "called after its engine had ended" in said


def test_one_optimizer_steps_two_models_and_keeps_what_it_has_learnt(facts):
    first, second, optimizer = couple()
    for numbers in ((9,), (0, 1), (0, 1)):
        for number in numbers:
            (second(first(batch(number))).square().sum() / len(numbers)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, model in zip(facts[0]["two models"], (first, second), strict=True):
        assert_close(found, model.state_dict())


def test_an_optimizer_that_has_stepped_parameters_apart_is_refused(facts):
    for rank in facts:
        assert "has step=2.0 for one parameter of Branches, and 1.0 for another one" in rank["stepped apart"]


def test_optimizers_that_cannot_step_flat_parts_are_refused(facts):
    for rank in facts:
        for name in ("Muon", "Adafactor", "LBFGS", "SparseAdam"):
            assert rank["refusals"][name].startswith(f"ValueError: {name} was prepared under DeepSpeed, but ")


def test_two_optimizers_for_one_model_and_copies_are_refused(facts):
    for rank in facts:
        assert "SGD holds a part of the trained parameters of Branches" in rank["refusals"]["two"]
        assert "was to be copied or pickled" in rank["refusals"]["copied"]
        assert "was to be copied or pickled" in rank["refusals"]["pickled"]


def test_hooks_schedules_modes_checkpoints_and_hidden_outputs_work(facts):
    for rank in facts:
        calls, rate, modes, checkpointed, hidden_gradients = rank["small print"]
        assert (calls, rate, modes) == (["before", "after"], 0.05, [False, True])
        for reentrant in (True, False):
            assert_close(checkpointed[str(reentrant)], gradients_of_one_process(built(lambda: Checkpointed(False))))
        expected = gradients_of_one_process(built())
        for name, value in hidden_gradients.items():
            torch.testing.assert_close(value, expected[name])

"""What does not fit is an error that says what to write, on every rank; the loop that pipelines have not is refused by name."""

from __future__ import annotations

import functools
import re

import megatron_cpu
import pytest
import torch
from megatron_jobs import Run, batches, gpt, inputs, loss_fn
from torch import nn

from accel_core import Accelerator
from accel_megatron import Megatron
from accel_testing import run_ranks


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0): expected how many"),
        ({"pipeline_parallel": True}, "pipeline_parallel=True): expected how many"),
        ({"virtual_pipeline": 2}, "interleaved stages are at least two on each of at least two processes"),
        ({"sequence_parallel": True}, "and tensor_parallel is 1"),
        ({"context_parallel": 0}, "context_parallel=0): expected how many"),
        ({"overlap_param_gather": True}, "needs distributed_optimizer=True and overlap_grad_reduce=True"),
    ],
)
def test_options_that_contradict_each_other_are_refused_at_once(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        Megatron(**options)


def caught(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def enter(context, model):
    context(model).__enter__()


def accelerate(**sizes):
    return Accelerator(strategy=Megatron(**sizes), cpu=True)


class Mixed(nn.Module):
    """Parts of a parameter that do not lie one after another in it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


def say_of_one():
    """What is said in a world of one, by what it is about."""
    from accel_core.api.layouts import Box
    from accel_megatron import layouts

    said = {"world": caught(accelerate, tensor_parallel=2), "experts": caught(accelerate, expert_parallel=3)}
    said["sequences"] = caught(accelerate, context_parallel=3)
    run = Run()
    said["sizes"] = caught(accelerate, tensor_parallel=1, distributed_optimizer=True)
    model, accelerator = run.model, run.accelerator
    window = accelerator.forward_backward
    said["no batch"] = caught(window, model, [], loss_fn, inputs)
    said["no pair"] = caught(window, model, batches(0), lambda losses, _: losses.sum(), inputs)
    said["no scalar"] = caught(window, model, batches(0), lambda losses, _: (losses, 1), inputs)
    said["stranger"] = caught(window, nn.Linear(2, 2), batches(0), loss_fn, inputs)
    args, kwargs = inputs(batches(0)[0])
    with accelerator.no_sync(model):
        accelerator.backward(model(*args, **kwargs).mean())
    said["held window"] = caught(window, model, batches(0), loss_fn, inputs)
    said["held step"] = caught(run.optimizer.step)
    run.optimizer.zero_grad()
    accelerator.backward(model(*args, **kwargs).mean())
    said["norm"] = caught(accelerator.clip_grad_norm_, model.parameters(), 1.0, norm_type=-1)
    said["closure"] = caught(run.optimizer.step, lambda: None)
    user = accelerator.unwrap_model(model)
    frozen = next(user.parameters()).requires_grad_(False)
    said["frozen"] = caught(run.optimizer.step)
    frozen.requires_grad_(True)
    said["part"] = caught(accelerator.prepare, Mixed2(), torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    said["copy"] = caught(__import__("copy").deepcopy, model)
    for name, options in {"tokens": {"calculate_per_token_loss": True}, "fp8": {"fp8": "hybrid"}}.items():
        said[name] = caught(accelerator.build_model, lambda parallel, options=options: gpt(parallel, **options))
    said["other sizes"] = caught(
        accelerator.build_model,
        lambda parallel: gpt({**parallel, "tensor_model_parallel_size": 2}),
    )
    narrow = nn.Linear(2, 2).bfloat16()
    said["narrow"] = caught(accelerator.prepare, narrow)
    weight = nn.Parameter(torch.ones(4, 4))
    boxes = (Box((0, 0), (4, 1)), Box((0, 2), (4, 3)))
    said["boxes"] = caught(layouts._check, "weight", weight, boxes)
    two = nn.Linear(2, 2)
    said["two"] = caught(accelerator.prepare, two, torch.optim.SGD([two.weight], lr=0.1))
    accelerator.end_training()
    said["ended"] = caught(model, *args, **kwargs)
    return said


class Mixed2(Mixed):
    def __init__(self):
        super().__init__()
        self.weight.requires_grad_(False)


SAYS_OF_ONE = {
    "world": "ValueError: Megatron: tensor_parallel=2 * pipeline_parallel=1 = 2 processes hold one model, but",
    "experts": "ValueError: Megatron: expert_parallel=3 shares experts among the 1 processes",
    "sequences": "tensor_parallel=1 * pipeline_parallel=1 * context_parallel=3 = 3 processes hold one model, but",
    "sizes": "nothing was raised",
    "no batch": "forward_backward() was given no micro-batch",
    "no pair": "returned Tensor, expected a tuple: the sum",
    "no scalar": "expected a scalar tensor. Sum the loss",
    "stranger": "forward_backward() was given a Linear that is not trained under Megatron",
    "held window": "gradients of backwards inside no_sync() wait to travel",
    "held step": "while its model holds back gradients, which no backward has sent",
    "norm": "expected a positive number, or math.inf",
    "closure": "AdamW.step(closure) was called",
    "frozen": "0 parameters were added to it, and 1 of the model were frozen",
    "copy": "TypeError: This model was to be copied or pickled",
    "tokens": "calculate_per_token_loss=True) was given",
    "fp8": "whose scaling history no checkpoint here would keep",
    "other sizes": "says tensor_model_parallel_size=2, and the strategy tensor_model_parallel_size=1",
    "narrow": "needs masters in float32 for them",
    "boxes": "which do not lie one after another in it",
    "two": "SGD holds a part of the trained parameters of Linear",
    "ended": "had ended its engine",
}


def test_a_world_of_one_is_told_what_does_not_fit():
    [said] = run_ranks(say_of_one, 1, timeout=100)
    assert {name: text for name, text in said.items() if SAYS_OF_ONE.get(name, "") not in text} == {}


def say_of_two():
    megatron_cpu.use_cpu()
    said = {}
    accelerator = accelerate(tensor_parallel=2)
    said["other sizes at once"] = caught(accelerate, pipeline_parallel=2)
    said["plain"] = caught(accelerator.prepare, nn.Linear(2, 2))
    said["heads"] = caught(accelerator.build_model, lambda parallel: gpt(parallel, num_attention_heads=1))
    del accelerator
    pipeline = accelerate(pipeline_parallel=2)
    model = pipeline.build_model(functools.partial(gpt, tied=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("output_layer" in name)
    said["idle stage"] = caught(pipeline.prepare, model)
    del pipeline, model
    run = Run({"pipeline_parallel": 2, "virtual_pipeline": 2, "distributed_optimizer": True})
    args, kwargs = inputs(batches(0)[0])
    said["call"] = caught(run.model, *args, **kwargs)
    said["backward"] = caught(run.accelerator.backward, torch.ones(1, requires_grad=True).sum())
    said["no_sync"] = caught(enter, run.accelerator.no_sync, run.model)
    said["three"] = caught(run.accelerator.forward_backward, run.model, batches(0)[:3], loss_fn, inputs)
    said["layers"] = caught(
        run.accelerator.build_model, lambda **place: gpt(place.pop("parallel"), **place, num_layers=3)
    )
    parameter = nn.Linear(2, 2)
    said["plain pipeline"] = caught(run.accelerator.prepare, parameter)
    run.accelerator.gradient_accumulation_steps = 2
    said["accumulate"] = caught(enter, run.accelerator.accumulate, run.model)
    del run
    accelerator = accelerate(distributed_optimizer=True)
    model = nn.Linear(2, 2)
    said["sgd"] = caught(accelerator.prepare, model, torch.optim.SGD(model.parameters(), lr=0.1))
    stepped, model = None, nn.Linear(2, 2)
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    said["stepped"] = caught(accelerator.prepare, model, stepped)
    said["half"] = caught(accelerator.prepare, nn.Linear(2, 2).half())
    return said


SAYS_OF_TWO = {
    "other sizes at once": "Megatron-core keeps one arrangement of processes at a time",
    "plain": "but it is none of Megatron-core's models",
    "plain pipeline": "but it is none of Megatron-core's models",
    "heads": "num_attention_heads (1) must be a multiple of tensor_model_parallel_size (2)",
    "layers": "divisible by",
    "idle stage": "of which the stages on ranks [0] have no parameter that is trained",
    "call": "this rank has a stage of a pipeline, which takes activations and no batches",
    "backward": "accelerator.backward(loss) was called, but pipeline_parallel=2",
    "accumulate": "no_sync() or accumulate() was entered, but pipeline_parallel=2",
    "no_sync": "no_sync() or accumulate() was entered, but pipeline_parallel=2",
    "three": "was given 3 micro-batches, but interleaved stages (virtual_pipeline) take them in rounds of pipeline_parallel=2",
    "sgd": "which steps Adam and AdamW alone",
    "stepped": "AdamW has stepped before its model was prepared",
    "half": "Megatron trains float32 and bfloat16 here",
}


def test_two_ranks_are_told_what_does_not_fit_each_of_them():
    for said in run_ranks(say_of_two, 2, timeout=100):
        assert {name: text for name, text in said.items() if SAYS_OF_TWO[name] not in text} == {}


def share_sequences():
    run = Run({"context_parallel": 2})
    args, kwargs = inputs(batches(0)[0])
    whole = [
        caught(run.accelerator.forward_backward, run.model, batches(0), loss_fn, inputs),
        caught(run.model, *args, **kwargs),
    ]
    plain = [caught(run.accelerator.prepare, nn.Linear(2, 2))]
    del run
    plain.append(caught(accelerate(expert_parallel=2).prepare, nn.Linear(2, 2)))
    return whole, plain


def test_processes_that_share_a_sequence_or_experts_are_told_what_does_not_fit():
    for whole, plain in run_ranks(share_sequences, 2):
        assert all("given the same inputs on all 2 processes that share a sequence" in text for text in whole)
        assert all("but it is none of Megatron-core's models" in text for text in plain)


def evaluate(mesh):
    run = Run(mesh)
    rows = []

    def counted(losses, batch):
        rows.append(len(losses))
        return loss_fn(losses, batch)

    with torch.no_grad():
        before = run.accelerator.forward_backward(
            run.model, batches(0, run.shard.index, run.shard.count), counted, inputs
        ).item()
    untouched = not run.gradients()
    return before, run.window(0).item(), untouched, sum(rows)


@pytest.mark.parametrize("mesh", [{"pipeline_parallel": 2}, {"tensor_parallel": 2}])
def test_a_window_without_gradients_is_an_evaluation(mesh):
    found = run_ranks(evaluate, 2, mesh)
    for before, trained, untouched, _ in found:
        assert before == pytest.approx(trained, rel=1e-6)
        assert untouched
    assert [rows for *_, rows in found] == ([0, 8] if "pipeline_parallel" in mesh else [8, 8])


def read(mesh):
    run = Run(mesh)
    loader = torch.utils.data.DataLoader(list(range(16)), batch_size=2, shuffle=True)
    return [batch.tolist() for batch in run.accelerator.prepare(loader)]


@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_ranks_of_one_model_read_the_same_and_models_read_different_parts(name):
    found = run_ranks(read, 4, {name: 2})
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(x for batches in (found[0], found[2]) for batch in batches for x in batch) == [*range(16)]

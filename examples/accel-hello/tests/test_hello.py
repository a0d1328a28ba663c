"""`hello` is a strategy, and `hello-rounding` a precision, as accel-core understands them; what else they promise follows below."""

from __future__ import annotations

import pytest
import torch

from accel_core import Accelerator
from accel_hello import Hello, HelloRounding
from accel_hello.greeting import main as greet
from accel_testing import CheckpointSuite, StrategySuite, run_ranks
from accel_testing.precision_suite import PrecisionSuite


def dividing_first():
    return Hello(divide_first=True)


class TestHello(StrategySuite):
    strategy = "hello"


class TestCheckpointsOfHello(CheckpointSuite):
    strategy = "hello"


class TestHelloDividingFirst(StrategySuite):
    strategy = dividing_first
    worlds = (2,)


class TestRounding(PrecisionSuite):
    precision = "hello-rounding"
    strategies = (("single", 1), ("hello", 2))
    tolerance = 1e-2
    gradient_tolerance = 3e-2


def gradients_of_a_model_that_one_rank_uses_in_part():
    accelerator = Accelerator(strategy="hello", cpu=True)
    user_model = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)])
    user_model.forward = lambda x: user_model[accelerator.process_index](x)
    model = accelerator.prepare(user_model)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    return [parameter.grad.tolist() for parameter in model.parameters()]


def test_a_parameter_that_one_rank_does_not_use_counts_as_zero_there():
    first, second = run_ranks(gradients_of_a_model_that_one_rank_uses_in_part, 2)
    assert first == second == [[[0.5, 0.5]], [[0.5, 0.5]]]


def sparse_gradients_are_refused():
    accelerator = Accelerator(strategy="hello", cpu=True)
    model = accelerator.prepare(torch.nn.Embedding(4, 2, sparse=True))
    try:
        accelerator.backward(model(torch.tensor([1])).sum())
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error)
    return None


def test_sparse_gradients_are_refused():
    assert all("sparse" in message.lower() for message in run_ranks(sparse_gradients_are_refused, 2))


def test_weights_are_rounded_to_as_many_levels_as_the_bits_give():
    layer = torch.nn.Linear(16, 8, bias=False)
    model = Accelerator(cpu=True, mixed_precision=HelloRounding(bits=2)).prepare(torch.nn.Sequential(layer))
    used = model(torch.eye(16))
    assert len(used.unique()) == 3
    used.sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(8, 16))


@pytest.mark.parametrize("prepare", ["prepare", "prepare_evaluation"])
def test_a_model_that_was_freed_computes_with_its_own_weights(prepare):
    layer, x = torch.nn.Linear(16, 8), torch.randn(4, 16)
    model = torch.nn.Sequential(layer)
    expected = model(x)
    accelerator = Accelerator(cpu=True, mixed_precision=HelloRounding(bits=2))
    accelerator.prepare_model(model, evaluation_mode=prepare == "prepare_evaluation")
    accelerator.free_memory()
    assert torch.equal(model(x), expected)
    assert type(model[0]) is torch.nn.Linear
    assert model[0].weight is layer.weight


def test_bits_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"HelloRounding\(bits=1\): expected 2 to 16"):
        HelloRounding(bits=1)


def test_the_command_greets_and_succeeds(capsys):
    assert [greet([]), greet(["Ada"])] == [0, 0]
    assert capsys.readouterr().out == "Hello, world!\nHello, Ada!\n"

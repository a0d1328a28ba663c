"""`hello` is a strategy, as accel-core understands it; what else it promises follows below."""

from __future__ import annotations

import torch

from accel_core import Accelerator
from accel_core.testing import CheckpointSuite, StrategySuite, run_ranks
from accel_hello import Hello


def dividing_first():
    return Hello(divide_first=True)


class TestHello(StrategySuite):
    strategy = "hello"


class TestCheckpointsOfHello(CheckpointSuite):
    strategy = "hello"


class TestHelloDividingFirst(StrategySuite):
    strategy = dividing_first
    worlds = (2,)


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

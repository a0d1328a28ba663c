"""Models are built without memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from accel_big_model import init_empty_weights, init_on_device


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_parameters_are_on_meta_and_buffers_have_their_values():
    with init_empty_weights():
        model = Tied()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.norm.running_var.tolist() == [1.0] * 4
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_weights_that_are_tied_stay_tied():
    with init_empty_weights():
        model = Tied()
    assert model.head.weight is model.embedding.weight


def test_buffers_are_on_meta_where_asked_for():
    with init_empty_weights(include_buffers=True):
        model = Tied()
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_a_parameter_keeps_its_class_attributes_and_whether_it_is_trained():
    class Marked(nn.Parameter):
        pass

    with init_empty_weights():
        module = nn.Module()
        given = Marked(torch.ones(3), requires_grad=False)
        given.scale = 2
        module.weight = given
    assert (type(module.weight), module.weight.requires_grad, module.weight.scale) == (Marked, False, 2)


def test_a_model_far_beyond_memory_is_built():
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(1 << 14, 1 << 14) for _ in range(100)))  # 107 GB
    assert sum(parameter.numel() for parameter in model.parameters()) > 26e9


def test_other_threads_build_as_ever():
    built = []
    with init_on_device("meta"):
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert built[0].weight.device.type == "cpu"


def test_an_error_inside_ends_the_block():
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_a_parameter_that_two_modules_take_is_tied():
    with init_empty_weights():
        shared = nn.Parameter(torch.ones(2, 2))
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first.weight = shared
        second.weight = shared
    assert first.weight is second.weight
    assert first.weight.device.type == "meta"

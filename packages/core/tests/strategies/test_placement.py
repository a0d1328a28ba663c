"""Placing a model keeps it the user's: its parameters stay the objects that optimizers hold and ties are made of."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from accel_core import Accelerator, Precision, PrecisionPolicy, PrepareRequest, place_model

FOREIGN = torch.device("meta")
"""Torch cannot put data that lives there into a CPU tensor; so it is with the devices of some vendors."""


def request(device: torch.device) -> PrepareRequest:
    return PrepareRequest(policy=PrecisionPolicy(), device=device, device_type=device.type)


def tied() -> nn.ModuleList:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    return model


def test_torch_alone_replaces_parameters_on_a_foreign_device() -> None:
    model = tied()
    before = model[0].weight
    model.to(FOREIGN)
    assert model[0].weight is not before
    assert model[0].weight is not model[1].weight


@pytest.mark.parametrize("device", [torch.device("cpu"), FOREIGN])
def test_parameters_and_ties_survive_on_any_device(device: torch.device) -> None:
    model = tied()
    before = list(model.parameters())
    model[0].bias.grad = torch.ones(2)
    place_model(model, request(device))
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert model[0].weight is model[1].weight
    assert {parameter.device for parameter in before} == {device}
    assert model[0].bias.grad.device == device


def test_what_is_there_already_is_left_alone() -> None:
    model = tied().to(FOREIGN)
    watched = weakref.ref(model[0].weight)  # with which torch could not swap it
    place_model(model, request(FOREIGN))
    assert watched() is model[0].weight


def test_a_weak_reference_refuses_the_move_and_leaves_torch_as_it_was() -> None:
    model = nn.Linear(2, 2)
    watched = weakref.ref(model.weight)
    with pytest.raises(RuntimeError, match="Couldn't swap Linear.weight"):
        place_model(model, request(FOREIGN))
    assert watched() is model.weight
    assert not torch.__future__.get_swap_module_params_on_conversion()


def offloaded(device_map: dict[str, str]) -> nn.Sequential:
    """A model whose second layer has its weights elsewhere, and fetches them when it is called."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(FOREIGN))
    elsewhere = {name: torch.ones(each.shape) for name, each in model[1].named_parameters()}

    def fetching(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(nn.Linear(2, 2), elsewhere, args)

    model[1].forward = lambda x: fetching(model[1], (x,))
    model.hf_device_map = device_map
    return model


@pytest.mark.parametrize("device_map", [{"0": "cpu", "1": "disk"}, {"": "disk"}])
def test_a_model_that_a_device_map_has_placed_stays_there(device_map: dict[str, str]) -> None:
    model = offloaded(device_map)
    before = list(model.parameters())
    prepared = Accelerator(cpu=True).prepare(model)
    assert [each.device.type for each in prepared.parameters()] == ["cpu", "cpu", "meta", "meta"]
    assert all(new is old for new, old in zip(prepared.parameters(), before, strict=True))
    assert prepared(torch.ones(1, 2)).shape == (1, 2)


class Narrow(Precision):
    policy = PrecisionPolicy(param=torch.bfloat16)


def test_parameters_that_nobody_can_cast_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"2 of Sequential, '1.weight' for one, are offloaded .* Load the model in that dtype"
    ):
        Accelerator(cpu=True, mixed_precision=Narrow()).prepare(offloaded({"0": "cpu", "1": "disk"}))

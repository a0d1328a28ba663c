"""Weights go into models that no rank has whole, and into prepared ones, and come out whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, load_checkpoint_in_model
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks

WORLD = 2


class Net(nn.Module):
    """Tied weights, a buffer, and a method by which a library would write it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.block = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.head(self.block(self.tokens(x)))

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), f"{folder}/pytorch_model.bin")


def built(seed):
    torch.manual_seed(seed)
    return Net()


def weights_of(accelerator, model):
    return {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}


def train(accelerator, model, optimizer):
    accelerator.backward(model(torch.arange(7)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def prepared(stage, model):
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True)
    model = accelerator.build_model(model) if callable(model) and not isinstance(model, nn.Module) else model
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def weights(folder):
    found = {}
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=3), cpu=True)
    if accelerator.is_main_process:
        torch.save(built(1).state_dict(), f"{folder}/pytorch_model.bin")
        (folder / "saved").mkdir()
    accelerator.wait_for_everyone()
    model = accelerator.build_model(lambda: built(2), folder)
    found["parts"] = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found["read while built"] = weights_of(accelerator, model)
    train(accelerator, model, optimizer)
    found["trained"] = weights_of(accelerator, model)
    accelerator.unwrap_model(model).save_pretrained(folder / "saved")
    accelerator.free_memory()
    accelerator, model, _ = prepared(3, lambda: built(3 + accelerator.process_index))
    found["of the factory of rank 0"] = weights_of(accelerator, model)
    accelerator.free_memory()
    for stage in (1, 2, 3):
        accelerator, model, optimizer = prepared(stage, built(4))
        load_checkpoint_in_model(model, folder)
        with torch.no_grad():
            found[f"called {stage}"] = accelerator.unwrap_model(model)(torch.arange(7))
        found[f"read {stage}"] = weights_of(accelerator, model)
        train(accelerator, model, optimizer)
        found[f"trained {stage}"] = weights_of(accelerator, model)
        accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def found(folder):
    return run_ranks(weights, WORLD, folder, timeout=100)


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=lambda text, name=name: f"{name}: {text}")


def expected_after_a_step():
    model = built(1)
    model(torch.arange(7)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


def test_a_model_that_is_built_in_parts_has_the_weights_of_a_file(found):
    assert_equal(found[0]["read while built"], built(1).state_dict())
    size = sum(parameter.numel() for parameter in built(1).parameters())
    assert all(rank["parts"] <= size / WORLD + WORLD * 8 for rank in found)


def test_without_a_file_it_has_those_of_rank_0(found):
    assert_equal(found[0]["of the factory of rank 0"], built(3).state_dict())


def test_it_trains_and_is_saved_whole_by_a_method_of_its_own(found, folder):
    assert_equal(found[0]["trained"], expected_after_a_step())
    saved = torch.load(folder / "saved" / "pytorch_model.bin", weights_only=True)
    assert_equal(saved, expected_after_a_step())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_read_into_a_prepared_model_stay_after_a_step(found, stage):
    assert_equal(found[0][f"read {stage}"], built(1).state_dict())
    assert_equal(found[0][f"trained {stage}"], expected_after_a_step())
    for rank in found:
        torch.testing.assert_close(rank[f"called {stage}"], built(1)(torch.arange(7)))


def test_a_number_as_a_parameter_is_refused():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    accelerator = Accelerator(strategy=DeepSpeed(), cpu=True)
    with pytest.raises(ValueError, match=r"parameters without dims: scale\. Give each of them one"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.end_training()

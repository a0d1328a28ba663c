"""Attributes and methods of a prepared model: what passes through, and what runs as a forward does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from together import Together
from torch import nn

from accel_core import Accelerator, Precision, PrecisionPolicy

ON_TWO = Together(2)


class Agent(nn.Module):
    """Computes under two names, and has what libraries look for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.config = {"layers": 2}
        self.temperature = 1.0
        self._note = "private"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) / self.temperature

    def act(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"action": scale * self(x)}

    def describe(self) -> str:
        return f"{self.config['layers']} layers"


def rows() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def reference() -> torch.Tensor:
    model = Agent()
    model.act(rows(), scale=2.0)["action"].pow(2).mean().backward()
    return model.body.weight.grad


class Half(Precision):
    policy = PrecisionPolicy(compute=torch.bfloat16)


@ON_TWO
def in_a_world() -> dict[str, Any]:
    accelerator = Accelerator()
    model = accelerator.prepare(Agent())
    x = rows().chunk(2)[accelerator.process_index]
    found: dict[str, Any] = {"config": model.config, "described": model.describe(), "private": hasattr(model, "_note")}
    model.temperature = 0.5
    found["assigned"] = accelerator.unwrap_model(model).temperature
    model.temperature = 1.0
    with torch.no_grad():
        found["evaluates"] = model.act(x)["action"].shape
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model.act(x)["action"].pow(2).mean())
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    found["refused"] = str(caught.value)
    optimizer.zero_grad()
    with pytest.raises(AttributeError) as caught:
        model.konfig
    found["absent"] = str(caught.value)

    accelerator.mark_forward_method(model, "act")
    accelerator.backward(model.act(x, scale=2.0)["action"].pow(2).mean())
    found["gradient"] = model.module.body.weight.grad.clone()
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (copied, pickled):
        each.zero_grad()
        with torch.no_grad():
            each.module.head.weight.zero_()
            each.module.head.bias.fill_(3.0)
        accelerator.backward(each.act(x)["action"].sum())
    found["copies"] = [each.act(x)["action"].sum().item() for each in (copied, pickled)]
    found["of copies"] = float(copied.module.head.bias.grad), float(pickled.module.head.bias.grad)
    accelerator.free_memory()
    return found


def test_what_the_model_has_is_reached_through_the_wrapper() -> None:
    for facts in ON_TWO.run(in_a_world):
        assert (facts["config"], facts["described"], facts["private"]) == ({"layers": 2}, "2 layers", False)
        assert facts["assigned"] == 0.5
        assert facts["evaluates"] == (2, 1)
        assert "'Agent' object has no attribute 'konfig'" in facts["absent"]


def test_a_method_that_would_train_unsynchronised_is_refused_and_one_that_is_marked_averages_gradients() -> None:
    for facts in ON_TWO.run(in_a_world):
        assert "accelerator.mark_forward_method(model, name)" in facts["refused"]
        torch.testing.assert_close(facts["gradient"], reference())
        assert facts["copies"] == [6.0, 6.0]
        assert facts["of copies"] == (2.0, 2.0)


def test_a_marked_method_computes_in_the_precision_of_calls_until_it_is_freed() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=Half())
    model = accelerator.prepare(Agent())
    direct = model.body
    seen: list[torch.dtype] = []
    direct.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    model.describe()
    accelerator.mark_forward_method(model, "act")
    accelerator.mark_forward_method(model, "act")
    accelerator.mark_forward_method(model, "forward")
    model.act(rows())
    assert seen == [torch.bfloat16]
    assert "forward" not in vars(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.head.weight.zero_()
        copied.head.bias.fill_(3.0)
    assert copied.act(rows())["action"].sum().item() == 12.0
    accelerator.free_memory()
    assert "act" not in vars(model)


def test_a_forward_that_is_set_on_the_model_stays_and_is_back_after_an_error() -> None:
    accelerator = Accelerator(cpu=True)
    model = Agent()
    model.forward = lambda x: x.sum()  # type: ignore[method-assign]
    model = accelerator.prepare(model)
    accelerator.mark_forward_method(model, "act")
    assert model.act(torch.ones(3))["action"] == 3.0
    with pytest.raises(AttributeError):
        model.act("a text")
    assert float(model(torch.ones(2))) == 2.0


def test_only_methods_of_prepared_models_are_marked() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"was given a Agent that is not prepared: use prepare\(\)"):
        accelerator.mark_forward_method(Agent(), "act")
    model = accelerator.prepare(Agent())
    with pytest.raises(ValueError, match=r"Agent has no method of that name"):
        accelerator.mark_forward_method(model, "config")

"""Copies and pickles of what was prepared are plain and usable, and the original does not notice."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import DDP, Accelerator
from accel_testing import run_ranks

X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [2.0, 2.0]])


def line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False)


def reference_step(batches: list[torch.Tensor], lr: float = 0.1) -> torch.Tensor:
    model = line()
    (sum(model(x).pow(2).mean() for x in batches) / len(batches)).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        return model.weight - lr * model.weight.grad  # type: ignore[operator]


def test_a_prepared_optimizer_pickles_and_copies_as_an_ordinary_one() -> None:
    """Copies have the state, and belong to no Accelerator."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), lr=0.1))
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(twin) is torch.optim.Adam
        assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        assert "_accel_gate" not in vars(twin)


class Talkative(torch.optim.SGD):
    """Gives everything away that it has, as optimizers of other libraries do."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda objects: pickle.loads(pickle.dumps(objects)),
}


@pytest.mark.parametrize("kind", [torch.optim.SGD, Talkative])
@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_of_model_and_optimizer_trains_itself_alone(kind: type[torch.optim.SGD], duplicate: str) -> None:
    """Also in the middle of a window of the original, which does not notice."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = line()
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(model(X[0]).pow(2).mean())
        optimizer.step()
    twin_model, twin = COPIES[duplicate]((model, optimizer))
    twin.zero_grad()
    twin_model(X[2]).pow(2).mean().backward()
    twin.step()
    twin.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    torch.testing.assert_close(twin_model.weight, reference_step([X[2]]))
    assert not any(name.startswith("_accel_") for name in vars(twin))
    with accelerator.accumulate(model):
        accelerator.backward(model(X[1]).pow(2).mean())
        optimizer.step()
    torch.testing.assert_close(model.weight, reference_step([X[0], X[1]]))
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_of_a_scheduler_drives_the_copy_of_its_optimizer(duplicate: str) -> None:
    """It is held back by nothing."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(line().parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(
        2
    ):  # else torch remarks that the copied optimizer does not tell of its steps, as copies of bare ones do
        optimizer.step()
        scheduler.step()
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    twin_optimizer, twin = COPIES[duplicate]((optimizer, scheduler))
    assert twin.optimizer is twin_optimizer
    twin.step()
    assert (twin.last_epoch, twin_optimizer.param_groups[0]["lr"]) == (3, 0.125)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.25)


def read_plain(pickled: bytes) -> list[Any]:
    model, optimizer, scheduler = pickle.loads(pickled)
    model(X[2]).pow(2).mean().backward()
    optimizer.step()
    scheduler.step()
    prepared = Accelerator().prepare(optimizer)
    return [type(optimizer).__name__, model.weight.tolist(), scheduler.last_epoch, prepared is optimizer]


def test_what_was_pickled_is_plain_in_another_process() -> None:
    """It may be prepared there."""
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pickled = pickle.dumps(Accelerator().prepare(model, optimizer, StepLR(optimizer, step_size=1)))
    [result] = run_ranks(read_plain, 1, pickled)
    assert result == ["SGD", reference_step([X[2]]).tolist(), 1, True]


def rounded(weight: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in weight.flatten().tolist()]


def said_by(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:  # what this is about
        return f"{type(error).__name__}: {error}"
    return ""


def copy_wrapped() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = {}
    for name, duplicate in COPIES.items():
        twin_model, twin = duplicate((model, optimizer))
        twin_model(X[accelerator.process_index]).pow(2).mean().backward()
        twin.step()
        found[name] = rounded(accelerator.unwrap_model(twin_model).weight)
    inner = copy.deepcopy(accelerator.unwrap_model(model))
    found["inner"] = [type(inner).__name__, type(pickle.loads(pickle.dumps(inner))).__name__]
    found["original"] = accelerator.unwrap_model(model).weight.tolist()
    found["pickled"] = pickle.dumps(model)
    accelerator.end_training()
    found["called too late"] = said_by(lambda: twin_model(X[0]))
    found["copied too late"] = [said_by(partial(duplicate, model)) for duplicate in COPIES.values()]
    return found


def test_a_copy_of_a_wrapped_model_averages_its_own_gradients_and_ends_with_the_group() -> None:
    """In a world of two."""
    averaged = rounded(reference_step([X[0], X[1]]))
    for found in run_ranks(copy_wrapped, 2):
        assert found["deepcopy"] == found["pickle"] == averaged
        assert found["inner"] == ["Linear", "Linear"]
        assert found["original"] == line().weight.tolist()
        assert "This DDP model was called after its process group had ended" in found["called too late"]
        for said in found["copied too late"]:
            assert re.search(
                r"RuntimeError: .*copied or pickled after its .*accelerator\.unwrap_model\(model\)\.$", said
            )
        with pytest.raises(ValueError, match="process group has not been initialized"):
            pickle.loads(found["pickled"])


def copy_with_a_hook(comm_hook: str) -> list[str]:
    accelerator = Accelerator(cpu=True, strategy=DDP(comm_hook=comm_hook))  # type: ignore[arg-type]
    model = accelerator.prepare(line())
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    assert isinstance(accelerator.prepare(twin), nn.parallel.DistributedDataParallel)
    return [said_by(partial(duplicate, model)) for duplicate in COPIES.values()]


def test_a_wrapped_model_with_a_communication_hook_says_what_to_copy() -> None:
    """Torch would leave the hook out of the copy, or fail at pickling it."""
    for found in run_ranks(copy_with_a_hook, 2, "bf16"):
        for said in found:
            assert re.match(
                r"TypeError: .*copied or pickled.*communication hook.*unwrap_model\(model\), and prepare", said
            )


def test_a_state_that_was_saved_loads_into_a_bare_and_into_a_prepared_optimizer() -> None:
    accelerator = Accelerator()
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    accelerator.backward(model(X[0]).pow(2).mean())
    optimizer.step()
    state = optimizer.state_dict()
    bare = torch.optim.Adam(line().parameters(), lr=0.5)
    for receiver in (bare, Accelerator().prepare(torch.optim.Adam(line().parameters(), lr=0.5))):
        receiver.load_state_dict(copy.deepcopy(state))
        assert receiver.state_dict()["param_groups"] == state["param_groups"]
        torch.testing.assert_close(receiver.state_dict()["state"], state["state"])

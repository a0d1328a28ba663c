"""What is kept in files is stepped from there, by the same numbers. DeepSpeed compiles an operator for it, which needs libaio."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_deepspeed.operators import examine
from accel_testing import run_ranks

# Where libaio is not installed, DeepSpeed's look for it leaves pipes open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WORLD, STEPS, WIDTH = 2, 3, 768
OPTIONS = {
    "parameters": {"offload_param": "nvme"},
    "parameters, and the optimizer on the host": {"offload_param": "nvme", "offload_optimizer": "cpu"},
    "parameters, and the optimizer": {"offload_param": "nvme", "offload_optimizer": "nvme"},
}


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def loss_of(model, number):
    return model(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH) + number / 4).square().mean()


def trained(folder):
    found = {}
    for name, options in OPTIONS.items():
        strategy = DeepSpeed(zero_stage=3, offload_folder=folder / name, **options)
        accelerator = Accelerator(strategy=strategy, cpu=True)
        model = built()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(STEPS):
            accelerator.backward(loss_of(model, number + accelerator.process_index))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        files = sum(path.is_file() for path in (folder / name).rglob("*"))
        found[name] = {key: each.clone() for key, each in accelerator.get_state_dict(model).items()}, files
        accelerator.end_training()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    operator = examine("async_io")
    if operator.state == "impossible":
        pytest.skip(f"async_io cannot be compiled: {operator.place}")
    return run_ranks(trained, WORLD, tmp_path_factory.mktemp("nvme"), timeout=800)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_in_files_is_stepped_as_by_one_process(found, name):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        for rank in range(WORLD):
            (loss_of(model, number + rank) / WORLD).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights, files = found[0][name]
    assert files
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value)

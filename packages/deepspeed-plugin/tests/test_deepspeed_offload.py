"""What is kept on the host, in memory or in files, is stepped there, by the same numbers. On a CPU memory moves nothing: the paths run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks

OPTIONS = {
    "stage 1": {"zero_stage": 1, "offload_optimizer": "cpu"},
    "stage 2": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "stage 3": {"zero_stage": 3, "offload_optimizer": "cpu"},
    "parameters too": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "state in files": {"zero_stage": 3, "offload_optimizer": "nvme"},
    "beside parameters": {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "cpu"},
}
STEPS, BACKWARDS = 3, 2


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(5, 4, generator=generator) for _ in range(BACKWARDS)] for _ in range(STEPS)]


def offloaded(folder, rank_of):
    found = {}
    for name, options in OPTIONS.items():
        place = {"offload_folder": f"{folder}/files"} if "nvme" in options.values() else {}
        accelerator = Accelerator(strategy=DeepSpeed(**options, **place), cpu=True)
        model = built()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

        def step(model, optimizer, several, accelerator=accelerator):
            for batch in several:
                accelerator.backward(model(rank_of(accelerator, batch)).square().sum())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return float(norm)

        norms = [step(model, optimizer, several) for several in batches()]
        weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        accelerator.save_state(f"{folder}/{name}")
        step(model, optimizer, batches()[0])
        after = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        accelerator.load_state(f"{folder}/{name}")
        step(model, optimizer, batches()[0])
        again = accelerator.get_state_dict(model)
        found[name] = norms, weights, all(torch.equal(after[key], again[key]) for key in after)
        accelerator.free_memory()
    return found


def same_batch(accelerator, batch):
    return batch


@pytest.fixture(scope="module", params=[1, 2])
def found(request, tmp_path_factory):
    return run_ranks(offloaded, request.param, tmp_path_factory.mktemp("offloaded"), same_batch, timeout=100)


def expected():
    model = built()
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for several in batches():
        for batch in several:
            model(batch).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.parametrize("name", OPTIONS)
def test_offloading_changes_no_number(found, name):
    norms, weights, goes_on = found[0][name]
    expected_norms, expected_weights = expected()
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for key, value in expected_weights.items():
        torch.testing.assert_close(weights[key], value)
    assert goes_on

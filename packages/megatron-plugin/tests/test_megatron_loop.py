"""The plain loop without pipelines: model(batch), backward, accumulate, and two backwards that both travel."""

from __future__ import annotations

import pytest
import torch
from megatron_jobs import MESHES, Run, assemble, batches, gpt, inputs

from accel_testing import run_ranks


def mean_of(model, batch):
    args, kwargs = inputs(batch)
    return model(*args, **kwargs).mean()


def loop(mesh, how):
    """The gradients after the micro-batches of a window, and the parameters' after the step."""
    run = Run(mesh)
    own = run.micro_batches(0)
    accelerator = run.accelerator
    if how == "accumulate":
        accelerator.gradient_accumulation_steps = len(own)
    for batch in own:
        if how == "accumulate":
            with accelerator.accumulate(run.model):
                accelerator.backward(mean_of(run.model, batch))
        else:
            accelerator.backward(mean_of(run.model, batch) / len(own))
    gradients = run.gradients()
    run.step()
    assert not run.gradients()
    weights = accelerator.get_state_dict(run.model)
    return gradients, {name: each for name, each in weights.items() if isinstance(each, torch.Tensor)}


def in_one_process():
    run = Run()
    model = gpt({})
    (sum(mean_of(model, batch) for batch in batches(0)) / len(batches(0))).backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    optimizer = type(run.optimizer)(
        [
            {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    optimizer.step()
    return gradients, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("how", ["accumulate", "each travels"])
@pytest.mark.parametrize("mesh", ["tp2+sp", "dp2+do", "cp2"])
def test_the_plain_loop_has_the_gradients_of_one_process(mesh, how):
    [(gradients, weights)] = run_ranks(in_one_process, 1)
    world, sizes = MESHES[mesh]
    found = run_ranks(loop, world, sizes, how)
    for name, each in assemble([parts for parts, _ in found]).items():
        torch.testing.assert_close(
            each, gradients[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    _, own = found[0]  # the main process has the weights, whole
    for name, each in weights.items():
        known = gradients[name].abs() > 1e-5  # of the rest, AdamW's first step is the sign of a rounding error
        torch.testing.assert_close(
            own[name][known], each[known], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )

"""Gradients, losses and norms under every arrangement, against one process that knows nothing of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from megatron_jobs import MESHES, Run, assemble, inputs, loss_fn, reference, train

from accel_testing import run_ranks

STEPS, CLIP = 20, 0.5
EVERY_RUN = ("tp2", "pp2", "dp2+do", "tp2+sp", "cp2")


@cache
def expected(gated):
    [found] = run_ranks(reference, 1, STEPS, CLIP, gated=gated)
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        mesh if mesh in EVERY_RUN else pytest.param(mesh, marks=pytest.mark.full(group="megatron"))
        for mesh in ("single", *MESHES)
    ],
)
def test_gradients_and_losses_are_those_of_one_process(mesh):
    world, sizes = MESHES.get(mesh, (1, {}))
    losses, gradients, norms = expected(gated=world == 4)
    found = run_ranks(train, world, sizes, STEPS, CLIP, gated=world == 4)
    whole = assemble([parts for _, parts, _ in found])
    assert whole.keys() == gradients.keys()
    for name, each in whole.items():
        torch.testing.assert_close(
            each, gradients[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for own, _, own_norms in found:
        assert own == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-5)
    assert losses[-1] < losses[0]


def losses_with_a_look(looks):
    """The losses behind three steps, where a metric may call the model between a backward and its step."""
    options = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    run = Run(options, lr=0.1)
    batch = run.micro_batches(0)[0]

    def loss():
        positional, named = inputs(batch)
        found, weight = loss_fn(run.model(*positional, **named), batch)
        return found / weight

    found = []
    for _ in range(3):
        run.accelerator.backward(loss())
        if looks:
            with torch.no_grad():
                loss()
        run.step()
        with torch.no_grad():
            found.append(loss().item())
    return found


def test_a_forward_between_backward_and_step_leaves_no_rank_with_weights_from_before():
    assert run_ranks(losses_with_a_look, 2, True) == run_ranks(losses_with_a_look, 2, False)

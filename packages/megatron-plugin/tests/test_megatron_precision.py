"""bf16 and fp16 by autocast, and parameters in bfloat16 whose masters are in float32."""

from __future__ import annotations

from functools import cache

import megatron_cpu
import pytest
import torch
from megatron_jobs import MESHES, Run, batches, gpt, inputs, loss_fn, reference, train

from accel_core import Accelerator
from accel_megatron import Megatron
from accel_megatron.prepared_model import engine_of
from accel_precision import FP16
from accel_testing import run_ranks

STEPS = 6


@cache
def expected():
    [(losses, _, _)] = run_ranks(reference, 1, STEPS)
    return losses


def test_bf16_trains_almost_as_float32():
    world, sizes = MESHES["tp2"]
    for losses, gradients, _ in run_ranks(train, world, sizes, STEPS, mixed_precision="bf16"):
        assert losses == pytest.approx(expected(), rel=0.02)
        assert losses != expected()
        assert losses[-1] < losses[0]
        assert {data.dtype for _, pieces in gradients.values() for _, data in pieces} == {torch.float32}


def scaled_steps(mesh):
    """Losses in fp16, and which steps were left out."""
    run, found = Run(mesh, mixed_precision="fp16"), []
    for step in range(STEPS):
        loss = run.window(step).item()
        run.step()
        found.append((loss, run.accelerator.optimizer_step_was_skipped))
    return tuple(zip(*found, strict=True))


def test_fp16_trains_as_one_process_does_and_leaves_out_the_same_steps():
    [(losses, skipped)] = run_ranks(scaled_steps, 1, "single")
    assert skipped[0], "the first scale is too large for these gradients"
    assert not all(skipped)
    for found, left_out in run_ranks(scaled_steps, 2, MESHES["tp2"][1]):
        assert left_out == skipped
        assert found == pytest.approx(losses, rel=1e-3)


def by_turns(mesh):
    """Losses and left-out steps of two models in fp16 whose windows and steps alternate, while the scale grows."""
    megatron_cpu.use_cpu()
    accelerator = Accelerator(
        strategy=Megatron(**mesh), cpu=True, mixed_precision=FP16(init_scale=2.0**12, growth_interval=2)
    )
    models = [accelerator.build_model(gpt) for _ in range(2)]
    pairs = [accelerator.prepare(each, torch.optim.SGD(each.parameters(), lr=0.05)) for each in models]
    found = []
    for step in range(4):
        for model, optimizer in pairs:
            loss = accelerator.forward_backward(model, batches(step), loss_fn, inputs).item()
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss, accelerator.optimizer_step_was_skipped))
    return tuple(zip(*found, strict=True))


def test_all_stages_change_the_scale_together_where_models_are_trained_by_turns():
    [(losses, skipped)] = run_ranks(by_turns, 1, {})
    for found, left_out in run_ranks(by_turns, 2, MESHES["pp2"][1]):
        assert left_out == skipped
        assert found == pytest.approx(losses, rel=1e-3)


def added_to_unscaled(mesh):
    """What a step says of a window whose gradients were added to unscaled ones, and that the next one is as ever."""
    run = Run(mesh, mixed_precision="fp16")
    run.window(0)
    run.accelerator.unscale_gradients()
    run.window(1)
    with pytest.raises(
        RuntimeError, match=r"were unscaled, by clip_grad_norm_\(\) say, and then a backward added"
    ) as raised:
        run.step()
    run.optimizer.zero_grad()
    run.window(2)
    run.step()
    return str(raised.value)


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_a_window_that_adds_to_unscaled_gradients_is_told_on_every_rank(mesh):
    world, sizes = MESHES[mesh]
    assert len(set(run_ranks(added_to_unscaled, world, sizes))) == 1


def small_steps(mesh, lr):
    """Losses, dtypes of the masters, whether parameters are their masters, and how far either has gone on the average."""
    run = Run(mesh, lr=lr, dtype=torch.bfloat16)
    engine = engine_of(run.model)
    own = [(part.parameter, engine.flat_interval(part.parameter)) for part in engine.parts.values()]
    own = [(parameter, slice(*interval)) for parameter, interval in own if interval[0] < interval[1]]
    before = [parameter.detach().flatten()[place].float() for parameter, place in own]
    losses = []
    for step in range(STEPS):
        losses.append(run.window(step).item())
        run.step()
    masters = [engine.master(parameter).flatten() for parameter, _ in own]
    rounded = [parameter.detach().flatten()[place] for parameter, place in own]
    same = all(torch.equal(master.bfloat16(), each) for master, each in zip(masters, rounded, strict=True))
    moved = [(torch.cat(after).float() - torch.cat(before)).abs().mean().item() for after in (masters, rounded)]
    return losses, {master.dtype for master in masters}, same, moved


def test_parameters_in_bfloat16_have_masters_in_float32():
    for _, dtypes, same, (of_masters, of_parameters) in run_ranks(small_steps, 2, MESHES["dp2+do"][1], 1e-6):
        assert dtypes == {torch.float32}
        assert same
        assert of_masters > 2e-6  # several steps of AdamW, of which a parameter in bfloat16 would have kept few
        assert of_parameters != pytest.approx(of_masters, rel=0.01)


def test_parameters_in_bfloat16_train_almost_as_in_float32():
    for losses, *_ in run_ranks(small_steps, 2, MESHES["dp2+do"][1], 1e-2):
        assert losses == pytest.approx(expected(), rel=0.03)
        assert losses[-1] < losses[0]

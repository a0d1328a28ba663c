"""Experts that processes share have the gradients, losses and norms of one process."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import megatron_cpu
import pytest
import torch
from megatron_jobs import Run, assemble, gpt, groups_of, inputs, loss_fn, reference, resume, save, train

from accel_core import Accelerator
from accel_megatron import Megatron
from accel_megatron.layouts import _name
from accel_testing import run_ranks

EXPERTS, STEPS, CLIP = 4, 6, 0.5


@cache
def expected():
    [found] = run_ranks(reference, 1, STEPS, CLIP, experts=EXPERTS)
    return found


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": True}], ids=["whole", "distributed"])
def test_two_processes_that_share_experts_train_as_one(options):
    losses, gradients, norms = expected()
    found = run_ranks(train, 2, {"expert_parallel": 2, **options}, STEPS, CLIP, experts=EXPERTS)
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


EP2, EP2_DO, PP2 = (
    {"expert_parallel": 2},
    {"expert_parallel": 2, "distributed_optimizer": True},
    {"pipeline_parallel": 2},
)
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
"""Routers with buffers that steps of the optimizer change."""


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [(EP2, EP2_DO, {}), ({}, EP2, {}), (EP2_DO, {}, {}), (EP2, PP2, BIASED), (PP2, EP2, BIASED)],
    ids=["within", "divided", "gathered", "to a pipeline", "from a pipeline"],
)
def test_experts_of_all_processes_are_saved_and_go_on_elsewhere(first, second, options, tmp_path):
    half, folder, options = STEPS // 2, str(tmp_path / "saved"), {"experts": EXPERTS, **options}
    [whole] = run_ranks(save, 1, {}, STEPS, str(tmp_path / "whole"), **options)
    for own in run_ranks(save, 2 if first else 1, first, half, folder, **options):
        assert own == pytest.approx(whole[:half], rel=1e-5)
    for own in run_ranks(resume, 2 if second else 1, second, half, folder, **options):
        assert own == pytest.approx(whole[half:], rel=1e-5)


def prepared_by_hand():
    megatron_cpu.use_cpu()
    accelerator = Accelerator(strategy=Megatron(expert_parallel=2), cpu=True)
    model = gpt({"expert_model_parallel_size": 2}, experts=EXPERTS)
    with pytest.raises(ValueError, match=r"those of one\. Make it by accelerator.build_model\(factory\)"):
        accelerator.prepare(model, torch.optim.AdamW(groups_of(model)))


def test_a_model_with_experts_that_was_not_built_by_the_accelerator_is_refused():
    run_ranks(prepared_by_hand, 2)


def test_grouped_experts_have_their_numbers_in_the_whole_model():
    declared = SimpleNamespace(
        key="decoder.layers.3.mlp.experts.experts.linear_fc1.weight", global_offset=(5, 0, 0), prepend_axis_num=1
    )
    assert (
        _name("decoder.layers.1.mlp.experts.linear_fc1.weight1", declared)
        == "decoder.layers.3.mlp.experts.linear_fc1.weight5"
    )


def gradients_of_routers():
    """Of one micro-batch by the schedule, and in the loop of the script: alone, and twice with accumulation."""
    run = Run({}, experts=4, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1)
    batch = run.micro_batches(1)[0]

    def gradients():
        found = {name: parts[0][1] for name, (_, parts) in run.gradients().items() if "router" in name}
        run.optimizer.zero_grad()
        return found

    def window():
        run.accelerator.forward_backward(run.model, [batch], loss_fn, inputs)
        return gradients()

    def loop(count):
        run.accelerator.gradient_accumulation_steps = count
        for _ in range(count):
            with run.accelerator.accumulate(run.model):
                positional, named = inputs(batch)
                loss, weight = loss_fn(run.model(*positional, **named), batch)
                run.accelerator.backward(loss / weight)
        return gradients()

    return [window(), loop(1), loop(2), loop(1)]


def test_the_loss_of_routers_weighs_the_same_in_the_loop_as_in_a_schedule():
    ((first, *others),) = run_ranks(gradients_of_routers, 1)
    assert first
    for found in others:
        for name, expected in first.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-7)


def routers_in_fp16():
    """Their gradients after a window, over those in float32; and what a backward of the script's own is told."""
    found = []
    for precision in ("no", "fp16"):
        run = Run(
            {}, experts=4, mixed_precision=precision, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0
        )
        batch = run.micro_batches(1)[0]
        run.accelerator.forward_backward(run.model, [batch], loss_fn, inputs)
        run.accelerator.unscale_gradients()
        found.append({name: parts[0][1] for name, (_, parts) in run.gradients().items() if "router" in name})
    positional, named = inputs(batch)
    loss, weight = loss_fn(run.model(*positional, **named), batch)
    with pytest.raises(RuntimeError, match=r"further heads add to it\. Call accelerator\.forward_backward, which"):
        run.accelerator.backward(loss / weight)
    run = Run({}, experts=4, mixed_precision="fp16", moe_router_load_balancing_type="aux_loss")  # of no weight
    positional, named = inputs(batch)
    loss, weight = loss_fn(run.model(*positional, **named), batch)
    run.accelerator.backward(loss / weight)
    assert run.gradients()
    return found


def test_the_loss_of_routers_is_scaled_in_fp16_or_refused():
    ((full, narrow),) = run_ranks(routers_in_fp16, 1)
    assert full
    for name, expected in full.items():
        assert (narrow[name] - expected).norm() < 0.02 * expected.norm(), name

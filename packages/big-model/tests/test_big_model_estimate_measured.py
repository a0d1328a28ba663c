"""What is estimated is what a process takes over a step, within a tenth."""

from __future__ import annotations

import pytest
from estimate_jobs import MODELS, PLANS, batch_of, loss_of, peak_of_steps

from accel_big_model import estimate_memory, init_empty_weights
from accel_testing import preload, run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED

TOLERANCE = 0.1
STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")
NEEDED = {
    "fsdp": "accel_fsdp",
    "tensor": "accel_fsdp",
    "zero1": "accel_deepspeed",
    "zero2": "accel_deepspeed",
    "zero3": "accel_deepspeed",
}

preload("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="the system does not tell the peak of a process")


def check(model, strategy, precision="fp32"):
    estimate, measured, told = compared(model, strategy, precision)
    assert abs(estimate.peak - measured) < TOLERANCE * measured, (told, dict(estimate.moments))


def compared(model, strategy, precision="fp32", plan=PLANS):
    if strategy in NEEDED:
        pytest.importorskip(NEEDED[strategy])
    with init_empty_weights():
        empty = MODELS[model]()
    ranks = {"single": 1, "tensor": 4}.get(strategy, 2)
    estimate = estimate_memory(
        empty,
        batch=batch_of(model),
        dtypes=[precision],
        strategies=[strategy],
        world_size=max(2, ranks),
        parallelize_plan=plan[model] if plan and strategy == "tensor" else None,
        device="cpu",
        loss=loss_of,
    ).row(strategy, precision)
    peaks = run_ranks(peak_of_steps, ranks, model, strategy, "no" if precision == "fp32" else precision, timeout=120.0)
    measured = max(peaks)
    told = f"{model} {strategy} {precision}: estimated {estimate.peak / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB"
    print(f"{told}, {estimate.peak / measured - 1:+.1%}")
    assert estimate.complete
    return estimate, measured, told


@pytest.mark.parametrize(("model", "strategy"), [("mlp_of_many_rows", "single"), ("mlp", "ddp")])
def test_an_mlp_takes_what_is_estimated(model, strategy):
    check(model, strategy)


@pytest.mark.full(group="estimate")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "llama", "convolutions"])
def test_what_is_estimated_is_measured(model, strategy):
    if model == "llama":
        pytest.importorskip("transformers")
    check(model, strategy)


@pytest.mark.full(group="estimate")
@pytest.mark.parametrize("model", ["mlp_without_blocks", "parts_in_dicts"])
def test_what_is_estimated_for_a_model_that_is_gathered_at_once_is_measured(model):
    check(model, "fsdp")


@pytest.mark.full(group="estimate")
@pytest.mark.parametrize("model", ["mlp", "llama", "mlp_of_many_rows"])
def test_what_is_estimated_for_layers_that_a_plan_divides_is_measured(model):
    if model == "llama":
        pytest.importorskip("transformers")
    check(model, "tensor")


@pytest.mark.full(group="estimate")
def test_without_a_plan_the_estimate_for_divided_layers_is_a_bound():
    """Activations count whole, of which ranks have parts."""
    pytest.importorskip("transformers")
    estimate, measured, told = compared("llama", "tensor", plan=None)
    assert measured <= estimate.peak <= 1.2 * measured, (told, dict(estimate.moments))


@pytest.mark.full(group="estimate")
@pytest.mark.parametrize("strategy", ["single", "fsdp", "zero3"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_what_is_estimated_in_low_precision_is_measured(precision, strategy):
    check("mlp", strategy, precision)

"""Parameters, masters, products and losses have the precision that was asked for, in every stage, on one rank and on two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_precision import FP16
from accel_testing import run_ranks

STAGES, STEPS, RATE = (1, 2, 3), 3, 0.05
SETTINGS = {
    "autocast": ("bf16", {}),
    "masters": ("bf16", {"bf16": {"enabled": "auto"}}),
    "pure": ("bf16-true", {}),
    "scaled": (FP16(init_scale=16.0), {"fp16": {"enabled": "auto"}}),
}
PARAMETERS = {"masters": torch.bfloat16, "pure": torch.bfloat16}  # others stay in float32
PRODUCTS = {"scaled": torch.float16}  # others are in bfloat16


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, number):
    batch = torch.linspace(-1, 1, 12).view(3, 4) + number / 4
    return model(batch).float().square().mean()


def prepared(name, stage):
    precision, config = SETTINGS[name]
    strategy = DeepSpeed(config={"zero_optimization": {"stage": stage}, **config})
    accelerator = Accelerator(strategy=strategy, cpu=True, mixed_precision=precision)
    model = built()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))


def weights_of(accelerator, model):
    return {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}


def measured(name, stage, folder):
    """Dtypes, the weights after some steps, whether steps were left out, and whether a checkpoint gives the weights back."""
    accelerator, model, optimizer = prepared(name, stage)
    dtypes, skipped = [], []

    def step(number, factor=1.0):
        accelerator.backward(loss_of(model, number + accelerator.process_index) * factor)
        optimizer.step()
        optimizer.zero_grad()

    layer = accelerator.unwrap_model(model)[0]
    handle = layer.register_forward_hook(lambda layer, _, output: dtypes.append((layer.weight.dtype, output.dtype)))
    if name == "scaled":  # the gradients of the last rank overflow
        step(0, float("inf") if accelerator.is_last_process else 1.0)
        skipped.append(accelerator.optimizer_step_was_skipped)
    for number in range(STEPS):
        step(number)
        skipped.append(accelerator.optimizer_step_was_skipped)
    handle.remove()
    weights = weights_of(accelerator, model)
    accelerator.save_state(folder / f"{name} {stage}")
    step(STEPS)
    after = weights_of(accelerator, model)
    accelerator.load_state(folder / f"{name} {stage}")
    step(STEPS)
    again = weights_of(accelerator, model)
    accelerator.free_memory()
    return set(dtypes), weights, skipped, all(torch.equal(again[key], after[key]) for key in after)


def refusals():
    """What `prepare` says of precisions that would not hold."""
    said = {}
    for what, stage, precision, config in (
        ("pure in stage 0", 0, "bf16-true", {}),
        ("masters in stage 0", 0, "bf16", {"bf16": {"enabled": True}}),
        ("parameters in float16", 2, "fp16-true", {}),
        ("float16 by the section", 3, "fp16", {"fp16": {"enabled": True}}),
        ("another section", 1, "bf16", {"torch_autocast": {"enabled": True, "dtype": "float16"}}),
    ):
        strategy = DeepSpeed(config={"zero_optimization": {"stage": stage}, **config})
        model = built()
        with pytest.raises(ValueError) as raised:
            Accelerator(strategy=strategy, cpu=True, mixed_precision=precision).prepare(
                model, torch.optim.SGD(model.parameters(), lr=RATE)
            )
        said[what] = str(raised.value)
    return said


def everything(folder):
    found = {(name, stage): measured(name, stage, folder) for name in SETTINGS for stage in STAGES}
    return found, refusals()


@pytest.fixture(scope="module", params=[1, 2])
def world(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(world, tmp_path_factory):
    return run_ranks(everything, world, tmp_path_factory.mktemp("precision"), timeout=110)


def expected(name, world):
    """The weights in float32 before and after steps by gradients that a copy of them finds in the precision of the setting."""
    masters = built().to(PARAMETERS.get(name, torch.float32)).float()  # DeepSpeed makes masters of the parameters
    before = {key: value.clone() for key, value in masters.state_dict().items()}
    optimizer = torch.optim.SGD(masters.parameters(), lr=RATE)
    product = PRODUCTS.get(name, torch.bfloat16)
    for number in range(STEPS):
        model = built().to(PARAMETERS.get(name, torch.float32))
        model.load_state_dict(masters.state_dict())
        for rank in range(world):
            with torch.autocast("cpu", product):
                loss = loss_of(model, number + rank)
            (loss / world).backward()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
    return before, masters.state_dict()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_precision_holds(ranks, world, name, stage):
    before, after = expected(name, world)
    for found, _ in ranks:
        dtypes, _, skipped, goes_on = found[name, stage]
        assert dtypes == {(PARAMETERS.get(name, torch.float32), PRODUCTS.get(name, torch.bfloat16))}
        assert skipped == [True] * (name == "scaled") + [False] * STEPS
        assert goes_on
    for key, value in ranks[0][0][name, stage][1].items():
        assert value.dtype is torch.float32
        moved = after[key] - before[key]
        torch.testing.assert_close(value - before[key], moved, rtol=0, atol=0.02 * float(moved.abs().max()))


def test_a_precision_that_would_not_hold_is_refused(ranks):
    for _, said in ranks:
        assert "ZeRO stage 0 was asked for with parameters in bfloat16" in said["pure in stage 0"]
        assert "ZeRO stage 0 was asked for with parameters in bfloat16" in said["masters in stage 0"]
        assert "Parameters are in float16" in said["parameters in float16"]
        assert "'fp16.enabled' with true" in said["float16 by the section"]
        assert "'torch_autocast' with float16, but the precision is" in said["another section"]

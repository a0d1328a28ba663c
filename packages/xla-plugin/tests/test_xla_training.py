"""Training on XLA's CPU, on meshes of one and four devices: equal to one process, compiled once, counted exactly."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch_xla") is None:  # it is not imported here, which would exchange torch's `new_group`
    pytest.skip("torch_xla fits another torch: nox -s xla", allow_module_level=True)

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, WorldError
from accel_testing import run_ranks
from accel_xla import XLA

WAIT = 300.0
STEPS, ROWS, EVALUATED = 50, 8, 43  # the last batch of the evaluation has three rows


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.tanh(self.first(x))))
        return out


def samples(count: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4] ** 2)


def train(accelerator: Accelerator, steps: int = STEPS, make: str = "adamw", accumulation: int = 1) -> dict[str, Any]:
    """Trains with clipping and a schedule, then evaluates; says what came out and how much was compiled."""
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.1),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3),
    }[make]()
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loaders = DataLoader(samples(steps * ROWS), ROWS), DataLoader(samples(EVALUATED), ROWS)
    model, optimizer, scheduler, loader, validation = accelerator.prepare(model, optimizer, scheduler, *loaders)
    engine = getattr(accelerator._parts.strategy, "_engine", None)
    compiled = [0 if engine is None else engine.compilations()]
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    compiled.append(0 if engine is None else engine.compilations())
    model.eval()
    outputs = []
    for x, _ in validation:
        with torch.no_grad():
            outputs.append(accelerator.gather_for_metrics(model(x)))
    if engine is not None:
        engine.sync()
    compiled.append(0 if engine is None else engine.compilations())
    evaluated = torch.cat([each.cpu() for each in outputs])
    state = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    told = {"device": str(accelerator.device), "type": str(accelerator.distributed_type)}
    accelerator.end_training()
    return {"state": state, "evaluated": evaluated, "compiled": compiled, **told}


def on_xla(shard: int, make: str, accumulation: int) -> dict[str, Any]:
    accelerator = Accelerator(strategy=XLA(shard), gradient_accumulation_steps=accumulation)
    return {**train(accelerator, make=make), "explained": str(accelerator.explain())}


def alone(make: str, accumulation: int) -> dict[str, Any]:
    return train(Accelerator(cpu=True, gradient_accumulation_steps=accumulation), make=make)


@functools.cache
def expected_of(make: str, accumulation: int) -> dict[str, Any]:
    [found] = run_ranks(alone, 1, make, accumulation, timeout=WAIT)
    return found  # type: ignore[no-any-return]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("devices", "shard", "mesh"),
    [
        (1, 1, "1 (replicate) x 1"),
        (4, 1, "4 (replicate) x 1"),
        (4, -1, "1 (replicate) x 4"),
        (4, 2, "2 (replicate) x 2"),
    ],
)
@pytest.mark.parametrize(("make", "accumulation", "small"), [("sgd", 1, 0), ("adamw", 2, 1)])
def test_training_is_that_of_one_process_and_is_compiled_once(
    devices: int, shard: int, mesh: str, make: str, accumulation: int, small: int
) -> None:
    """`small`: graphs that only make the first state of an optimizer. Then one is for training, and one for evaluation."""
    world = {"CPU_NUM_DEVICES": str(devices)}
    [found] = run_ranks(on_xla, 1, shard, make, accumulation, timeout=WAIT, env=world)
    expected = expected_of(make, accumulation)
    assert difference(found["state"], expected["state"]) < 1e-5
    assert found["evaluated"].shape == (EVALUATED, 4)
    assert float((found["evaluated"] - expected["evaluated"]).abs().max()) < 1e-5
    before, trained, evaluated = found["compiled"]
    assert trained - before == 1 + small
    assert evaluated - trained == 2  # the model, and the last batch: on one device a smaller one, else its rows cut out
    assert (found["device"], found["type"]) == ("xla:0", "XLA")
    assert mesh in found["explained"]
    assert f"{devices} CPU" in found["explained"]


def dropping_out(folder: str) -> tuple[list[float], list[float], list[float]]:
    """Numbers of the device's stream behind a save, those of a run that loads it, and from a seed."""
    accelerator = Accelerator(strategy=XLA())
    accelerator.prepare(nn.Linear(4, 4), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    torch.rand(3, device=accelerator.device).cpu()
    accelerator.save_state(folder)
    behind = torch.rand(3, device=accelerator.device).tolist()
    accelerator.load_state(folder)
    again = torch.rand(3, device=accelerator.device).tolist()
    torch.get_device_module("xla").manual_seed(3)
    first = torch.rand(3, device=accelerator.device).tolist()
    torch.get_device_module("xla").manual_seed(3)
    assert first == torch.rand(3, device=accelerator.device).tolist()
    return behind, again, first


@pytest.mark.timeout(400)
def test_random_numbers_of_the_device_go_on(tmp_path: Path) -> None:
    [(behind, again, first)] = run_ranks(dropping_out, 1, str(tmp_path), timeout=WAIT)
    assert behind == again != first


def in_bf16() -> tuple[float, str]:
    accelerator = Accelerator(strategy=XLA(shard=-1), mixed_precision="bf16")
    seen = []
    net = Net()
    net.first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
    x, y = (tensor.to(accelerator.device) for tensor in samples(ROWS).tensors)
    for _ in range(20):
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss), str(seen[0])


@pytest.mark.timeout(400)
def test_bf16_computes_in_bf16() -> None:
    pytest.importorskip("accel_precision")
    [(loss, dtype)] = run_ranks(in_bf16, 1, timeout=WAIT)
    assert dtype == "torch.bfloat16"
    assert loss < 1.5


def with_a_strange_model() -> tuple[list[str], list[str]]:
    accelerator = Accelerator(strategy=XLA())
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    said = []
    for rows in (4, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = model(torch.ones(rows, 4, device=accelerator.device))
            accelerator.backward(torch.special.bessel_j0(out.detach()).sum() + out.sum())
            optimizer.step()
            optimizer.zero_grad()
        said.append([str(each.message) for each in caught])
    return said[0], said[1]


@pytest.mark.timeout(400)
def test_model_with_operations_that_xla_lacks_and_rows_that_do_not_divide() -> None:
    [(lacking, uneven)] = run_ranks(with_a_strange_model, 1, timeout=WAIT)
    assert any("operations that XLA lacks: special_bessel_j0 (1 times)" in each for each in lacking)
    assert any("called with 3 rows, which the 4 devices of the mesh do not divide" in each for each in uneven)


def refused() -> tuple[str, str]:
    from torch_xla import runtime

    with pytest.raises(ValueError, match="XLA") as caught:
        Accelerator(strategy=XLA(shard=3))
    counted = runtime.process_count
    runtime.process_count = lambda: 4  # a stand-in: no machine here is one of several hosts
    try:
        with pytest.raises(WorldError) as several:
            Accelerator(strategy=XLA())
    finally:
        runtime.process_count = counted
    return str(caught.value), str(several.value)


@pytest.mark.timeout(400)
def test_number_that_does_not_divide_the_mesh_and_one_host_of_several() -> None:
    [(uneven, several)] = run_ranks(refused, 1, timeout=WAIT)
    assert "XLA(shard=3) was asked for, and the mesh has 4 devices (CPU)" in uneven
    assert "torch_xla runs in 4 processes" in several
    assert "slice with one host" in several

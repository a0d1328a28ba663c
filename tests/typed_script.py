"""A script as a type checker sees it: `nox -s types` reads it, and nothing runs it.

`# type: ignore` stands where a mistake has to be found: mypy in strict mode fails on one that is not needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from accel_core import Accelerator
from accel_core import gather as gather_everywhere
from accel_core.contract.strategy import Strategy


def prepared(accelerator: Accelerator, model: nn.Linear, optimizer: SGD, loader: DataLoader[int]) -> None:
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    assert_type(accelerator.prepare(model), nn.Linear)
    assert_type(accelerator.prepare(model, optimizer), tuple[nn.Linear, SGD])
    assert_type(
        accelerator.prepare(model, optimizer, loader, scheduler), tuple[nn.Linear, SGD, DataLoader[int], LambdaLR]
    )
    assert_type(accelerator.prepare(model, loader, device_placement=[True, False]), tuple[nn.Linear, DataLoader[int]])
    assert_type(accelerator.prepare_model(model), nn.Linear)
    assert_type(accelerator.prepare_optimizer(optimizer), SGD)
    assert_type(accelerator.prepare_scheduler(scheduler), LambdaLR)
    many = [model, nn.Linear(2, 2)]
    assert_type(accelerator.prepare(*many, optimizer), Any)


def gathered(accelerator: Accelerator, tensor: torch.Tensor) -> None:
    assert_type(accelerator.gather(tensor), torch.Tensor)
    assert_type(accelerator.gather({"loss": tensor}), dict[str, torch.Tensor])
    assert_type(accelerator.reduce((tensor, tensor)), tuple[torch.Tensor, torch.Tensor])
    assert_type(accelerator.pad_across_processes(tensor), torch.Tensor)
    assert_type(accelerator.gather_for_metrics((tensor, tensor)), tuple[torch.Tensor, torch.Tensor])
    assert_type(accelerator.gather_for_metrics(["a", "b"]), list[str])
    assert_type(accelerator.gather_for_metrics(("a", "b"), use_gather_object=True), list[str])
    assert_type(gather_everywhere([tensor]), list[torch.Tensor])


def constructed(strategy: Strategy) -> None:
    Accelerator(mixed_precision="bf16", strategy=strategy)
    Accelerator(fsdp_plugin=strategy, step_with_optimizer=False)
    Accelerator(mixed_precison="bf16")  # type: ignore[call-arg]
    Accelerator(gradient_accumulation_step=2)  # type: ignore[call-arg]
    Accelerator(step_with_optimizer="no")  # type: ignore[arg-type]
    optimizer = Accelerator().prepare_optimizer(Adam([torch.zeros(1)]))
    assert_type(optimizer, Adam)

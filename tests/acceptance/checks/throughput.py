"""Tokens a second against the same loop by plain torch. Figures, and no gates: PASS says that both ran."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from acceptance.registry import ALL, ANY, Run, check, skip
from acceptance.training import Shape, loss_of, make_model, parameters_of
from torch import nn

BASE = Shape(vocabulary=50304, width=768, heads=12, layers=12, length=1024, rows=8)  # 125 M parameters and the head
LARGE = Shape(vocabulary=32000, width=2048, heads=16, layers=18, length=1024, rows=8)  # 1 B
WIDE = Shape(vocabulary=32000, width=4096, heads=32, layers=4, length=2048, rows=8)  # 1 B, of products that fp8 is for
TINY = Shape(vocabulary=512, width=128, layers=2, length=128, rows=4)
ROUNDS, STEPS = 6, 10

Step = Callable[[torch.Tensor], None]


def plain(run: Run, shape: Shape, compiled: bool, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    model = make_model(shape).to(run.device)
    model = wrap(model)
    if compiled:
        model.compile()
    optimizer = adam(run, model)

    def step(tokens: torch.Tensor) -> None:
        with autocast(run):
            loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def adam(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.is_cuda)


def autocast(run: Run) -> AbstractContextManager[Any]:
    return torch.autocast(run.device.type, torch.bfloat16) if run.device.type != "cpu" else nullcontext()


def ours(run: Run, shape: Shape, compiled: bool, **options: Any) -> Step:
    precision = "no" if run.device.type == "cpu" else "bf16"
    backend = "inductor" if compiled else "no"
    accelerator = run.accelerator(**{"mixed_precision": precision, "dynamo_backend": backend, **options})
    model = make_model(shape)
    model, optimizer = accelerator.prepare(model, adam(run, model))

    def step(tokens: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, tokens))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def synchronize(run: Run) -> None:
    if run.device.type != "cpu":
        torch.accelerator.synchronize()


def compared(run: Run, shape: Shape, steps: dict[str, Step]) -> str:
    """Rounds of each in turn, forwards and backwards; the median of tokens a second, and of the ratios to the first."""
    tokens = torch.randint(shape.vocabulary, (shape.rows, shape.length + 1), device=run.device)
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + 1):
        for name, step in list(steps.items())[:: -1 if number % 2 else 1]:
            synchronize(run)
            began = time.perf_counter()
            for _ in range(STEPS if number else 3):
                step(tokens)
            synchronize(run)
            if number:  # the first compiles
                seconds = time.perf_counter() - began
                rounds[name].append(STEPS * shape.rows * shape.length * run.size / seconds)
    base = next(iter(rounds.values()))
    told = []
    for name, rates in rounds.items():
        ratio = statistics.median(rate / other for rate, other in zip(rates, base, strict=True))
        told.append(
            f"{name} {statistics.median(rates):,.0f} tokens/s" + (f" (×{ratio:.3f})" if rates is not base else "")
        )
    return ", ".join(told)


def over_plain(run: Run, shape: Shape) -> str:
    """A model on one device, compiled where that is not a CPU, over plain torch."""
    shape, compiled = (shape, True) if run.device.type != "cpu" else (TINY, False)
    size = parameters_of(list(make_model(shape).parameters())) / 1e6
    steps = {"plain": plain(run, shape, compiled, lambda model: model), "accel": ours(run, shape, compiled)}
    return f"{size:.0f} M parameters: {compared(run, shape, steps)}"


@check(long=True, seconds=420)
def gpt_125m(run: Run) -> str:
    """G1: GPT of 125 M, bf16, compiled: one device, over plain torch."""
    return over_plain(run, BASE)


@check(long=True, seconds=420, on="cuda")
def gpt_1b(run: Run) -> str:
    """G1: the same with 1 B."""
    needs(run, 40)
    return over_plain(run, LARGE)


@check(long=True, seconds=420, devices=ALL)
def gpt_125m_ddp(run: Run) -> str:
    """G1: the same under DDP, over torch's own."""
    shape, compiled = (BASE, True) if run.device.type != "cpu" else (TINY, False)
    run.world()
    ids = None if run.device.type == "cpu" else [run.device]

    def wrap(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    return compared(run, shape, {"plain": plain(run, shape, compiled, wrap), "accel": ours(run, shape, compiled)})


@check(long=True, seconds=420, devices=ANY)
def gpt_125m_fsdp(run: Run) -> str:
    """G1: the same under FSDP, over torch's `fully_shard` of each block, not compiled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from accel_fsdp import FSDP

    shape = BASE if run.device.type != "cpu" else TINY
    run.world()
    mesh = init_device_mesh(run.device.type, (run.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if run.device.type != "cpu" else MixedPrecisionPolicy()

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    steps = {"plain": plain(run, shape, False, wrap), "accel": ours(run, shape, False, strategy=FSDP())}
    return compared(run, shape, steps)


@check(package="torchao", long=True, seconds=600, on="cuda")
def fp8_1b(run: Run) -> str:
    """G2: fp8 over bf16, a GPT of 1 B with a width of 4096, compiled."""
    if torch.cuda.get_device_capability() < (8, 9):
        skip("needs compute capability 8.9")
    needs(run, 48)
    steps = {"bf16": ours(run, WIDE, True), "fp8": ours(run, WIDE, True, mixed_precision="fp8")}
    return compared(run, WIDE, steps)


def needs(run: Run, gib: int) -> None:
    if torch.cuda.get_device_properties(run.device).total_memory < gib << 30:
        skip(f"needs {gib} GiB")

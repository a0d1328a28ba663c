"""`estimate_memory`: from a model to a row for each dtype and strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_big_model.estimate.activations import ActivationsUnknownError, Timeline, default_loss, trace
from accel_big_model.estimate.divided import divided
from accel_big_model.estimate.fully_sharded import fully_sharded, tensor_and_data
from accel_big_model.estimate.inputs import unknown
from accel_big_model.estimate.optimizers import OptimizerMaker, check_optimizer
from accel_big_model.estimate.precisions import Precision, read_precision
from accel_big_model.estimate.result import MemoryEstimate, StrategyEstimate
from accel_big_model.estimate.shapes import ROOT, ModelShape, shape_of_model
from accel_big_model.estimate.sources import open_model
from accel_big_model.estimate.strategies import FORMULAS, STRATEGIES, Facts, replicated
from accel_big_model.estimate.zero import zero
from accel_big_model.sizes import convert_file_size_to_int
from accel_core.api.component import flatten

DEVICES = ("accelerator", "cpu")
BATCH = "batch of a rank"

_ALWAYS = {
    "activations": "all storages that are alive in a forward and backward without memory, fused attention, temporary results; what "
    "kernels take inside of themselves, and what the allocator and libraries keep, is not in",
    "optimizer": "state and need of a second step, tried without memory on the shapes that a rank steps; whether an engine "
    "takes it is not asked",
    "not in": "the batch itself, and what a loader holds; gradients that no_sync() holds back",
}


def estimate_memory(
    model: nn.Module | ModelShape | str | Path,
    *,
    batch: Any = None,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    strategies: Sequence[str] = STRATEGIES,
    world_size: int = 8,
    tensor_parallel: int = 2,
    parallelize_plan: Mapping[str, str] | None = None,
    optimizer: str | OptimizerMaker = "adamw",
    memory: int | str = "80GiB",
    device: str = "accelerator",
    activation_checkpointing: bool = False,
    loss: Callable[[Any], torch.Tensor] = default_loss,
    name: str | None = None,
) -> MemoryEstimate:
    """Bytes that training takes on the rank that holds most, by dtype and strategy.

    Nothing is allocated, no process is started, the model stays as it is. All sizes are bytes.

    Args:
        model: of any device; built in `init_empty_weights()`, for one that does not fit here. Or
            what `accel estimate-memory` takes: a folder, a config.json, "module:function", a name
            on the hub.
        batch: what the model takes on one rank: a tensor, a tuple of positional or a dictionary of
            named arguments, on any device; only shapes and dtypes count. None: activations are
            unknown.
        dtypes: names of `mixed_precision`; "float32", "bfloat16", "float16" of parameters. "int8"
            and "int4" are of weights that are not trained.
        strategies: of "single", "ddp", "fsdp", "zero1", "zero2", "zero3", "tensor".
        world_size: how many processes train, but under "single".
        tensor_parallel: how many of them share a layer under "tensor".
        parallelize_plan: what they divide: names of layers, with "*", to "colwise" or "rowwise", as
            FSDP takes them. None: all matrices, and activations count whole: an upper bound.
        optimizer: "sgd", "momentum", "adam", "adamw", "adafactor", "adagrad", "rmsprop", "lion",
            "adamw8bit"; "module:Class"; a class, or a function of the list of parameters.
        memory: bytes of each device, for `fits`: a number, or text such as "80GiB".
        device: "accelerator", or "cpu": of DeepSpeed's buckets only what is written counts.
        activation_checkpointing: whether units compute their forward again in the backward under
            "fsdp" and "tensor", as `FSDP(activation_checkpointing=True)` does it.
        loss: of what the model returns, a scalar. Left out: its `loss`, else a sum.
        name: how the model is called; None: by its class.

    Raises:
        CheckpointError: a file of weights, whose shapes are asked for, is damaged.
        NotInstalledError: the model is a configuration, and transformers is not installed.
        ValueError: for a text that is no model, an unknown name, a number below 1, a world that
            `tensor_parallel` does not divide, a plan that misfits, or an optimizer that cannot be
            tried.
    """
    precisions = [read_precision(each) for each in dtypes]
    _check(strategies, world_size, tensor_parallel, device)
    check_optimizer(optimizer)
    limit = convert_file_size_to_int(memory)
    if isinstance(model, (str, Path)):
        name = str(model) if name is None else name
        model = open_model(str(model))
    if parallelize_plan is not None and "tensor" not in strategies:
        raise ValueError("parallelize_plan= was given, and strategy 'tensor', which it is for, is not asked for.")
    part = None if parallelize_plan is None else _divided(model, parallelize_plan, tensor_parallel)
    shape = model if isinstance(model, ModelShape) else shape_of_model(model)
    rows, assumptions = list[StrategyEstimate](), {BATCH: _described(batch), **_ALWAYS}
    for precision in precisions:
        if precision.param is None:
            rows.append(_weights_only(shape, precision))
            continue
        again = _units(shape) if activation_checkpointing else []
        gathers = (bool(again) or precision.compute is not None) and bool({"fsdp", "tensor"}.intersection(strategies))
        timeline, gathered, reason = _timelines(model, batch, shape, precision, loss, gathers, again)
        facts = Facts(shape, precision, timeline, gathered, optimizer, world_size, tensor_parallel, device != "cpu")
        if reason:
            assumptions[f"activations in {precision.name}"] = f"unknown: {reason}"
        refused = {each: why for each in strategies if (why := _refusal(each, facts))}
        assumptions |= {f"{each} in {precision.name}": f"left out: {why}" for each, why in refused.items()}
        for each in [each for each in strategies if each not in refused]:
            of_part = each == "tensor" and part is not None
            rows.append(_of_a_part(part, batch, facts, loss, gathers, again) if of_part else _row(each, facts))
    return MemoryEstimate(
        name or type(model).__name__,
        shape.numel,
        shape.trained_numel,
        optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", str(optimizer)),
        device,
        limit,
        tuple(rows),
        {**assumptions, **{each: FORMULAS[each] for each in strategies}},
    )


def _described(batch: Any) -> str:
    """The dtypes and shapes of a batch."""
    tensors = [each for each in flatten(batch)[0] if isinstance(each, torch.Tensor)]
    shapes = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors]
    return ", ".join(shapes) or "unknown"


def _check(strategies: Sequence[str], world_size: int, tensor_parallel: int, device: str) -> None:
    for each in strategies:
        if each not in STRATEGIES:
            raise unknown("Strategy", each, STRATEGIES)
    for name, number in (("world_size", world_size), ("tensor_parallel", tensor_parallel)):
        if number < 1:
            raise ValueError(f"{name}={number}: expected how many processes, at least 1.")
    if "tensor" in strategies and world_size % tensor_parallel:
        raise ValueError(
            f"tensor_parallel={tensor_parallel} does not divide world_size={world_size}: give a divisor, or leave strategy "
            f"'tensor' out."
        )
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is unknown. Known are {', '.join(DEVICES)}.")


def _weights_only(shape: ModelShape, precision: Precision) -> StrategyEstimate:
    size = -(-shape.numel * precision.bits // 8) + shape.buffers
    note = f"weights alone: nothing is trained in {precision.name}; scales of quantisation are not in"
    return StrategyEstimate("weights", precision.name, 1, size, None, None, None, None, {"weights": size}, (note,))


def _timelines(
    model: nn.Module | ModelShape,
    batch: Any,
    shape: ModelShape,
    precision: Precision,
    loss: Callable[[Any], torch.Tensor],
    gathers: bool,
    recomputed: Sequence[str],
) -> tuple[Timeline, Timeline, str | None]:
    """What a rank with all weights runs, and one that gathers them; the reason if nobody knows."""
    unknown = Timeline.unknown(shape)
    if isinstance(model, ModelShape):
        return unknown, unknown, "there are only files with weights, and no code that runs them"
    if batch is None:
        return unknown, unknown, "no batch was given (--input, or batch=), and the model does not tell what it takes"
    try:
        timeline = trace(model, batch, shape, precision, loss)
        gathered = trace(model, batch, shape, precision, loss, True, recomputed) if gathers else timeline
    except ActivationsUnknownError as error:
        return unknown, unknown, str(error)
    return timeline, gathered, None


def _units(shape: ModelShape) -> list[str]:
    """The names of the modules that compute twice. Raises `ValueError` if there are none."""
    units = list(dict.fromkeys(each.unit for each in shape.parameters if each.unit != ROOT))
    if not units:
        raise ValueError(
            "activation_checkpointing was asked for, but the model has no repeated blocks whose forward could run again. Leave "
            "it out, or checkpoint inside of the model."
        )
    return units


def _divided(model: nn.Module | ModelShape, plan: Mapping[str, str], ranks: int) -> nn.Module:
    if isinstance(model, ModelShape):
        raise ValueError("parallelize_plan= was given, and there are only files with weights, and no layers to divide.")
    return divided(model, plan, ranks)


def _of_a_part(
    part: nn.Module | None,
    batch: Any,
    facts: Facts,
    loss: Callable[[Any], torch.Tensor],
    gathers: bool,
    again: Sequence[str],
) -> StrategyEstimate:
    """The row of "tensor" for a rank whose part of the model is known."""
    assert part is not None, "a plan was given"
    shape = shape_of_model(part)
    timeline, gathered, reason = _timelines(part, batch, shape, facts.precision, loss, gathers, again)
    ranks = facts.ranks // facts.tensor
    row = fully_sharded(replace(facts, shape=shape, timeline=timeline, gathered=gathered, ranks=ranks), "tensor")
    note = f"{facts.tensor} tensor-parallel × {ranks} sharding ranks, divided by the plan"
    return replace(row, ranks=facts.ranks, notes=(note, *([f"activations are unknown: {reason}"] if reason else ())))


def _refusal(strategy: str, facts: Facts) -> str | None:
    if strategy == "ddp" and facts.ranks == 1:
        return "it needs several processes"
    if strategy.startswith("zero") and facts.dtype is torch.float16:
        return "accel-deepspeed refuses parameters in float16"
    if strategy.startswith("zero") and facts.optimizer in ("adafactor", torch.optim.Adafactor):
        return "it looks at more than one element at a time, and ZeRO steps flat parts"
    return None


def _row(strategy: str, facts: Facts) -> StrategyEstimate:
    if strategy in ("single", "ddp"):
        return replicated(facts, strategy)
    if strategy == "fsdp":
        return fully_sharded(facts)
    return tensor_and_data(facts) if strategy == "tensor" else zero(facts, int(strategy[-1]))

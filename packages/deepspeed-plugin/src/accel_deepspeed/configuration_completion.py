"""Completing a configuration when the run is known: batch sizes, dtypes, sizes of buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_deepspeed.configuration_keys import autos
from accel_deepspeed.configuration_offload import check_folders, keep_state_here
from accel_deepspeed.configuration_precision import settle_precision

if TYPE_CHECKING:
    import torch

    from accel_core import PrecisionPolicy

_SIZES: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {
        "reduce_bucket_size": lambda width: width * width,
        "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
        "stage3_param_persistence_threshold": lambda width: 10 * width,
    }
)
"""What "auto" means for the sizes that follow from the width of a model, as transformers' Trainer fills them."""

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_KEPT = ("data_types.keep_in_fp32_modules",)
"""Keys of which "auto" is a value of DeepSpeed's own."""


def complete(
    values: dict[str, Any],
    source: str,
    stage: int,
    *,
    world_size: int,
    policy: PrecisionPolicy,
    hidden_size: int | None = None,
    parameter_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Completes a configuration in place, and returns it.

    Args:
        values: what was read; source: how messages call it; stage: of ZeRO.
        world_size: how many processes share the data.
        policy: the dtypes that are to hold.
        hidden_size: that of the model (`hidden_size_of`), if it tells.
        parameter_dtype: that of the model's trained parameters, if they share one.

    Raises:
        ValueError: what the configuration says contradicts these, or an "auto" stays open.
    """
    _settle_batches(values, source, world_size)
    settle_precision(values, source, stage, policy, parameter_dtype)
    _settle_sizes(values["zero_optimization"], source, stage, hidden_size)
    values["gradient_clipping"] = 0.0  # the Accelerator clips; DeepSpeed's own default is 1.0
    _check_hierarchy(values["zero_optimization"], source, world_size)
    _settle_norm(values["zero_optimization"], stage)
    values["zero_allow_untested_optimizer"] = True  # the strategy looks at optimizers by itself
    values.setdefault("zero_force_ds_cpu_optimizer", False)
    values.setdefault("steps_per_print", None)  # by default it reports each tenth step, which the loop may do too
    _check_autos(values, source)
    check_folders(values["zero_optimization"])
    keep_state_here(values["zero_optimization"])
    return values


def accumulation_steps(values: Mapping[str, Any], world: int) -> int | None:
    """The steps of a window: as written, else those of the batch sizes; None if the configuration leaves them open."""
    total, micro, steps = _batches(values)
    if steps is None and total and micro and total % (micro * world) == 0:
        steps = total // (micro * world)
    return None if steps is None else int(steps)


def _batches(values: Mapping[str, Any]) -> list[Any]:
    return [None if values.get(name) == "auto" else values.get(name) for name in _BATCHES]


def _settle_batches(values: dict[str, Any], source: str, world: int) -> None:
    (total, micro, _), window = _batches(values), accumulation_steps(values, world) or 1
    if total is not None and micro is None and total % (window * world) == 0:
        micro = total // (window * world)
    if total is not None and total != (micro or 0) * window * world:
        raise ValueError(
            f"{source} has 'train_batch_size' with {total}, but train_micro_batch_size_per_gpu({micro or '?'}) * "
            f"gradient_accumulation_steps({window}) * processes({world}) = {micro * window * world if micro else 'no multiple'}. "
            f'Change one of them, or write "auto".'
        )
    # DeepSpeed sees windows of one, for the core accumulates; of the batch it only makes figures of throughput.
    micro = 1 if micro is None else int(micro)
    values.update(zip(_BATCHES, (micro * world, micro, 1), strict=True))


def _settle_sizes(zero: dict[str, Any], source: str, stage: int, width: int | None) -> None:
    if stage < 3:
        for name in [name for name, value in zero.items() if name.startswith("stage3_") and value == "auto"]:
            del zero[name]  # nothing reads it there
    open_ = [name for name in _SIZES if zero.get(name) == "auto"]
    if open_ and width is None:
        raise ValueError(
            f'{source} has "auto" for {", ".join(open_)}, which follow from the width of the model, and model.config has '
            f"neither hidden_size nor hidden_sizes. Write numbers of elements, such as 500000000 for reduce_bucket_size; or "
            f"leave the keys out, for DeepSpeed's own defaults."
        )
    for name in open_:
        assert width is not None, "looked at above"
        zero[name] = _SIZES[name](width)


def _check_hierarchy(zero: Mapping[str, Any], source: str, world: int) -> None:
    size = zero.get("zero_hpz_partition_size", 1)
    if size != "auto" and (
        type(size) is not int or size < 0 or world % max(size, 1)
    ):  # DeepSpeed would make groups that leave ranks out
        raise ValueError(
            f"{source} has 'zero_optimization.zero_hpz_partition_size' with {size}, which does not divide {world} processes. Write the "
            f"number of processes of a machine."
        )


def _settle_norm(zero: dict[str, Any], stage: int) -> None:
    # Nobody reads the norm that DeepSpeed computes in a step, and where it is not finite the step is left out in silence.
    # Offloaded optimizer state, and stage 3, do not offer to leave it out.
    if stage in (1, 2) and "offload_optimizer" not in zero:
        zero.setdefault("compute_grad_norm", False)


def _check_autos(values: Mapping[str, Any], source: str) -> None:
    left = [name for name in autos(values) if name not in _KEPT]
    if left:
        raise ValueError(
            f'{source} has "auto" for {", ".join(map(repr, left))}, which nothing here fills in. Write a value, or leave the '
            f"key out for DeepSpeed's own default."
        )

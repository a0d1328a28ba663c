"""Weights and optimizer states in files of torch, as trainers write them beside their own.

`accelerator.save_state` is what loads under any strategy; these are for who calls them by name. All are collectives, but for
`merge_fsdp_weights`, and load only what executes nothing.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint import on_each_rank, write_weights
from accel_compat.checkpoints.distributed_files import whole_state
from accel_compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_compat.plugins.fsdp import RAM_EFFICIENT, FullyShardedDataParallelPlugin
from accel_core import World

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.optim import Optimizer

    Location = str | os.PathLike[str]


def _states() -> Any:
    return import_module("torch.distributed.checkpoint.state_dict")  # takes long to import


def _checkpoint() -> Any:
    return import_module("torch.distributed.checkpoint")


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    output_dir: Location,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Writes the weights: one file, or a folder in which each rank writes its parts.

    Args:
        fsdp_plugin: its `state_dict_type` says which of both; `output_dir` is made.
        accelerator: knows the ranks.
        model: prepared.
        output_dir: where `pytorch_model_fsdp.bin`, or the folder `pytorch_model_fsdp_0`, goes.
        model_index: the number of the model, in the name.
        adapter_only: whether weights that are not trained are left out.
        use_dcp: False: each rank writes a file of its own, which the same number of ranks loads.
    """
    options = replace(_options(fsdp_plugin), ignore_frozen_params=adapter_only)
    state = _states().get_model_state_dict(model, options=options)
    _write(accelerator, "model", state, _place(fsdp_plugin, output_dir, FSDP_MODEL_NAME, model_index), use_dcp=use_dcp)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    input_dir: Location,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Reads what `save_fsdp_model` wrote, with the same arguments, into a prepared model.

    Returns the missing and unexpected names, of which there are none unless `adapter_only`.
    """
    place = _place(fsdp_plugin, input_dir, FSDP_MODEL_NAME, model_index)
    options = replace(_read_options(place, use_dcp), ignore_frozen_params=adapter_only, strict=not adapter_only)
    state = _read(accelerator, "model", place, use_dcp=use_dcp)
    result = _states().set_model_state_dict(model, state, options=options)
    if result.unexpected_keys:
        raise ValueError(f"{place} has weights that the model has not: {', '.join(result.unexpected_keys[:8])}.")
    accelerator.wait_for_everyone()
    return result


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: Location,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Writes the state of the optimizer of a model, by names of parameters, as `save_fsdp_model` does."""
    state = _states().get_optimizer_state_dict(model, _own(optimizer), options=_options(fsdp_plugin))
    place = _place(fsdp_plugin, output_dir, OPTIMIZER_NAME, optimizer_index)
    _write(accelerator, "optimizer", state, place, use_dcp=use_dcp)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: Location,
    optimizer_index: int = 0,
    adapter_only: bool = False,  # noqa: ARG001  # its state names the parameters that it has
    use_dcp: bool = True,
) -> None:
    """Reads what `save_fsdp_optimizer` wrote, with the same arguments."""
    place = _place(fsdp_plugin, input_dir, OPTIMIZER_NAME, optimizer_index)
    state = _read(accelerator, "optimizer", place, use_dcp=use_dcp)
    _states().set_optimizer_state_dict(model, _own(optimizer), state, options=_read_options(place, use_dcp))
    accelerator.wait_for_everyone()


def merge_fsdp_weights(
    checkpoint_dir: Location,
    output_path: Location,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Writes the weights of a folder that ranks wrote together as `model.safetensors`, or `pytorch_model.bin`.

    Call it in one process; it takes as much memory as the weights do. `ValueError` if
    `checkpoint_dir` is no such folder, or is to be removed with `output_path` in it,
    `CheckpointError` if it is damaged.
    """
    if remove_checkpoint_dir:
        check_outside(output_path, checkpoint_dir)
    folder = Path(checkpoint_dir)
    if not (folder / ".metadata").is_file():
        listed = sorted(path.name for path in folder.glob(f"{FSDP_MODEL_NAME}_*")) if folder.is_dir() else []
        advice = f"Give {folder / listed[0]}." if listed else "Give the folder that has a file .metadata."
        raise ValueError(f"{folder} is not the folder of a model's weights. {advice}")
    state = whole_state(folder, "model")
    if not state:
        raise ValueError(f"{folder} has no weights of a model. Give a folder that save_fsdp_model wrote.")
    write_weights(state, output_path, safe_serialization=safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(folder)


def check_outside(output: Location, removed: Location) -> None:
    """Raises `ValueError` if what is written would be removed with the folder that it is made of."""
    if Path(output).resolve().is_relative_to(Path(removed).resolve()):
        raise ValueError(
            f"{output} was to be written, and {removed}, in which it is, to be removed afterwards. Give a folder outside of that."
        )


def enable_fsdp_ram_efficient_loading() -> None:
    """Tells transformers that only rank 0 reads weights; prepared models begin with those of rank 0."""
    os.environ.update({"ACCELERATE_USE_FSDP": "True", RAM_EFFICIENT: "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Tells transformers that every rank reads weights."""
    os.environ[RAM_EFFICIENT] = "False"


def _options(plugin: FullyShardedDataParallelPlugin) -> StateDictOptions:
    return _options_for(_is_whole(plugin))


def _read_options(place: Path, use_dcp: bool) -> StateDictOptions:
    """What rank 0 reads whole goes to the other ranks; their own files are theirs."""
    return _options_for(place.suffix == ".bin" or use_dcp)


def _options_for(whole: bool) -> StateDictOptions:
    made: StateDictOptions = _states().StateDictOptions(
        full_state_dict=whole, cpu_offload=whole, broadcast_from_rank0=whole
    )
    return made


def _is_whole(plugin: FullyShardedDataParallelPlugin) -> bool:
    return bool(plugin.state_dict_type.name == "FULL_STATE_DICT")


def _own(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside of what wraps it."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _place(plugin: FullyShardedDataParallelPlugin, folder: Location, name: str, index: int) -> Path:
    if _is_whole(plugin):
        return Path(folder) / (f"{name}_{index}.bin" if index else f"{name}.bin")
    inside = f"{name}_{index}"
    return Path(folder) if Path(folder).name == inside else Path(folder) / inside


def _of_rank(place: Path, accelerator: Any) -> Path:
    return place.with_name(f"{place.name}_rank{accelerator.process_index}.bin")


def _write(accelerator: Any, kind: str, state: dict[str, Any], place: Path, *, use_dcp: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.suffix == ".bin":
        if accelerator.process_index == 0:
            accelerator.save(state, place)  # the whole file or none: a full disk leaves the one of the last save
    elif use_dcp:
        _checkpoint().save({kind: state}, checkpoint_id=place)
    else:
        torch.save(state, _of_rank(place, accelerator))
    accelerator.wait_for_everyone()


def _read(accelerator: Any, kind: str, place: Path, *, use_dcp: bool) -> dict[str, Any]:
    """What this rank reads; an error of one is an error of all."""

    def read() -> dict[str, Any]:
        if place.suffix != ".bin" and not use_dcp:
            return torch.load(_of_rank(place, accelerator), weights_only=True)  # type: ignore[no-any-return]
        if accelerator.process_index != 0:
            return {}
        if place.suffix == ".bin":
            return torch.load(place, weights_only=True, map_location="cpu")  # type: ignore[no-any-return]
        return whole_state(place, kind)

    return on_each_rank(World.current(), f"for all ranks to have read the {kind}", read)

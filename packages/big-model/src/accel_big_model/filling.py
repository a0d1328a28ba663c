"""Filling a model from files, in the places of a map, without hooks: for a call of `dispatch_model` that follows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

import accel_checkpoint
from accel_big_model.loading import FittingWeights, fill, floating_dtype, planned, wanted_by
from accel_big_model.module_tensors import find_tied_parameters, retie_parameters
from accel_big_model.weights import StoredWeights
from accel_core.api.component import listed

if TYPE_CHECKING:
    from accel_big_model.memory import Place


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Place | torch.device] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001  (one weight at a time is in memory in any case)
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    strict: bool = True,
) -> None:
    """Fills a model in the places of a map; `dispatch_model` with the same map then runs it.

        load_checkpoint_in_model(model, "weights/", device_map=places, offload_folder="offload/")
        model = dispatch_model(model, places, offload_dir="offload/")

    `load_checkpoint_and_dispatch` does both, and copies nothing: what is on "disk" stays in the
    files of the checkpoint. The function of this name in accel-core fills a model where it is.

    Args:
        model: may lie on the meta device. With a `device_map` its parameters are replaced: make
            optimizers afterwards.
        checkpoint: a `.safetensors`, `.bin` or `.index.json` file, a directory of such, or a
            checkpoint of `save_state`.
        device_map: as for `load_checkpoint_and_dispatch`. None: where the model is, and the CPU for
            one on the meta device.
        offload_folder: where what is on "disk" is written, in `dtype`. It needs no memory.
        dtype: which floating weights have afterwards. None: that of the model.
        offload_state_dict: without effect: a weight goes from its file to its place, one at a time.
        offload_buffers: whether buffers are written, too. Otherwise they go to the CPU.
        keep_in_fp32_modules: names of modules whose weights are float32 whatever `dtype` says.
        strict: whether names, shapes and kinds of dtype (floating, integer, complex, bool) have to be
            those of the model. False reads what fits, and warns of the rest.

    Raises as `load_checkpoint_and_dispatch`; `ValueError` where "disk" has no `offload_folder`.
    """
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if device_map is None and not on_meta:
        accel_checkpoint.load_checkpoint_in_model(
            model, checkpoint, dtype=dtype, keep_in_fp32_modules=keep_in_fp32_modules, strict=strict
        )
        return
    chosen = floating_dtype(dtype)
    places = planned(model, device_map, dtype=chosen, offload_buffers=offload_buffers)
    if "disk" in places.values() and offload_folder is None:
        names = [name or type(model).__name__ for name, place in places.items() if place == "disk"]
        raise ValueError(
            f"device_map has {listed(names)} on 'disk', and nothing says where there. Pass offload_folder=, or call "
            f"load_checkpoint_and_dispatch(), which leaves weights in their files."
        )
    tied = find_tied_parameters(model)
    wanted = _kept_wide(model, wanted_by(model, chosen), keep_in_fp32_modules)
    weights = FittingWeights(StoredWeights(checkpoint), wanted, tied)
    weights.check(type(model).__name__, strict)
    fill(model, weights, places, offload_buffers, offload_folder)
    retie_parameters(model, tied)


def _kept_wide(
    model: nn.Module, wanted: dict[str, torch.Tensor], modules: Sequence[str] | None
) -> dict[str, torch.Tensor]:
    """What is wanted, with the floating weights below some modules in float32."""
    kept = {module: [name for name in wanted if f".{module}." in f".{name}"] for module in modules or ()}
    if unknown := [module for module, names in kept.items() if not names]:
        raise ValueError(
            f"keep_in_fp32_modules= names no weights of this {type(model).__name__}: {', '.join(unknown)}."
        )
    for name in itertools.chain(*kept.values()):
        if wanted[name].is_floating_point():
            wanted[name] = wanted[name].to(torch.float32)
    return wanted

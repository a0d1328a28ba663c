"""Weights of Megatron-core GPT models as folders that transformers loads."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint import WeightGather, write_weights
from accel_core import World
from accel_megatron.conversion.building import sizes_of
from accel_megatron.conversion.comparison import check_same
from accel_megatron.conversion.named_tensors import Place, shared_state
from accel_megatron.conversion.offers import find_family
from accel_megatron.conversion.settings import settings_of
from accel_megatron.stages import Stages


def to_transformers(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    config: Any = None,
    ignore: Iterable[str] = (),
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes config.json and weights for `AutoModelForCausalLM.from_pretrained(folder)`. A collective.

    The main process puts one tensor after another together, in CPU memory, and writes safetensors:
    one file, or parts and their index. A save that fails leaves the weights that were there.
    Tokenizers and settings of generation are not written: copy them from where they are.

    Args:
        model: what `prepare` or `build_model` gave; or the GPTModels of this rank, in a list if
            they are several.
        folder: made if it does not exist; weights and config.json in it are replaced.
        config: the configuration of transformers to write; None: that of `from_transformers`.
        ignore: as for `from_transformers`, beside what that was given.
        max_shard_size: of one file: bytes, or a text such as "5GB".

    Raises:
        ValueError: if there is no configuration, or if it says other than the model, on every rank.
        PluginError, CheckpointError: as for `from_transformers`.
        OSError: of the main process's disk, on every rank.
    """
    models = _chunks(model)
    config = config or getattr(models[0], "transformers_config", None)
    if config is None:
        raise ValueError(
            "to_transformers() writes a configuration beside the weights, but this model was not built by from_transformers(), and "
            "has none. Pass it: to_transformers(model, folder, config=...), a LlamaConfig of transformers, say."
        )
    family = find_family(config.model_type)
    world, place = World.current(), Place.current()
    settings = settings_of(family, config.to_dict(), [*ignore, *getattr(models[0], "transformers_ignored", ())])
    check_same(settings, models[0])
    sizes = sizes_of(models[0], settings["vocab_size"])
    state = shared_state(family, models, place, sizes, world, settings["share_embeddings_and_output_weights"])
    gathering = WeightGather(state, world)
    dtype = next(iter(models[0].parameters())).dtype

    def write() -> None:
        write_weights(gathering, folder, max_shard_size)
        _write_config(config, Path(folder), dtype)

    gathering.together("to_transformers()", write)


def _chunks(model: Any) -> list[Any]:
    """The GPTModels on this rank, without what is around them."""
    if isinstance(model, Stages):
        return _chunks(list(model.chunks))
    if isinstance(model, (list, tuple)):
        return [chunk for each in model for chunk in _chunks(each)]
    inner = getattr(model, "module", None)
    return _chunks(inner) if isinstance(inner, torch.nn.Module) else [model]


def _write_config(config: Any, folder: Path, dtype: torch.dtype) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    written = copy.deepcopy(config)
    written.dtype = dtype
    written.architectures = [CLASSES[config.model_type]]
    written.save_pretrained(folder)

"""Megatron-core GPT models from configurations and weights of transformers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_checkpoint import load_weights, on_each_rank
from accel_core import World
from accel_megatron.conversion.named_tensors import Place, all_names, clear_padding, shared_state
from accel_megatron.conversion.offers import find_family
from accel_megatron.conversion.pieces import Sizes, padded_vocabulary
from accel_megatron.conversion.settings import Settings, settings_of

if TYPE_CHECKING:
    from accel_megatron.conversion.table import Family

VOCABULARY, TIED = "vocab_size", "share_embeddings_and_output_weights"


def from_transformers(
    config_or_folder: Any,
    *,
    ignore: Iterable[str] = (),
    layer_spec: Any = None,
    parallel: Mapping[str, Any] | None = None,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
    read_later: list[Callable[[], None]] | None = None,
    **settings: Any,
) -> Any:
    """Builds the Megatron-core model of a model of transformers: this rank's part. A collective.

        model = accelerator.build_model(partial(from_transformers, "Llama-3.1-8B/"))

    Of a folder each rank reads the parts of tensors that it has, one after another. The vocabulary
    is padded until tensor parallelism divides it: `model.vocab_size` is the padded number, padded
    logits are the lowest number of their dtype, so that no loss counts them.

    Args:
        config_or_folder: a configuration of transformers, for a model with new weights; or a folder
            with config.json and weights: model.safetensors, or its parts and their index.
        ignore: names of fields of the configuration that the table does not know, and that change
            nothing.
        layer_spec: the modules of a layer; None: those of Megatron-core itself.
        parallel, pre_process, post_process, vp_stage: what `build_model` gives a factory. Without
            them sizes and the stage are those of Megatron-core's process groups.
        read_later: a list to which reading the weights is added, a collective of all ranks, instead of
            doing it: where a rank has several stages, it is due when all of them are built, because
            Megatron-core has stages with tied embeddings wait for each other while they are built.
            `build_model` gives one.
        settings: fields of `TransformerConfig` and arguments of `GPTModel`, beside those that the
            configuration gives: `bf16=True, params_dtype=torch.bfloat16`.

    Returns:
        megatron.core.models.gpt.GPTModel: its `transformers_config` is the configuration.

    Raises:
        PluginError: if no table of the family is installed; see `Family`.
        ValueError: if fields of the configuration have no equivalent in Megatron-core: all of them.
        CheckpointError: if tensors are missing, unexpected, or of another shape: all of them.
        FileNotFoundError: if the folder, or one of its files, is not there.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "from_transformers() builds this rank's part of a model, but Megatron-core has no process groups yet. Make "
            "Accelerator(strategy=Megatron(...)) first, and call it in accelerator.build_model(...)."
        )
    world = World.current()
    folder = Path(config_or_folder) if isinstance(config_or_folder, (str, os.PathLike)) else None
    if folder is None:
        config = config_or_folder
    elif vp_stage:  # the first has read it
        config = _read_config(folder)
    else:
        config = on_each_rank(world, "for a configuration", lambda: _read_config(folder))
    family = find_family(config.model_type)
    meant = settings_of(family, config.to_dict(), ignore) | {**(parallel or {}), **settings}
    if folder is not None:
        meant.setdefault("perform_initialization", False)  # every number is read
    model = build_model(meant, layer_spec, pre_process, post_process, vp_stage)
    model.transformers_config, model.transformers_ignored = config, tuple(ignore)
    place, vocabulary = Place.current(), meant[VOCABULARY]
    clear_padding(family, model, place, vocabulary)
    if model.post_process and model.vocab_size > vocabulary:
        kept = max(vocabulary - place.tensor.rank * (model.vocab_size // place.tensor.size), 0)
        model.output_layer.register_forward_hook(partial(_hide_padding, here=kept, whole=vocabulary))
    if folder is None:
        return model

    def read() -> None:
        state = shared_state(family, [model], place, sizes_of(model, vocabulary), world, meant[TIED])
        names = all_names(family, meant["num_layers"], meant.get("num_moe_experts") or 0)
        load = partial(load_weights, state, folder, "this model", _renaming(family, state.keys(), names))
        on_each_rank(world, "for weights", load)

    if read_later is None:
        read()
    else:
        read_later.append(read)
    return model


def sizes_of(model: Any, vocabulary: int) -> Sizes:
    """What the arithmetic of rows needs to know of a model."""
    config = model.config
    return Sizes(
        config.num_attention_heads, config.num_query_groups, config.kv_channels, vocabulary, config.num_moe_experts or 0
    )


def build_model(
    settings: Settings,
    layer_spec: Any = None,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
) -> Any:
    """The part of a GPTModel on this rank, by settings of it and of its TransformerConfig."""
    from megatron.core import parallel_state as groups
    from megatron.core.models.gpt import GPTModel

    config, arguments = configured(settings)
    if unknown := arguments.keys() - inspect.signature(GPTModel).parameters.keys():
        raise TypeError(
            f"A GPTModel was to be built with {', '.join(sorted(unknown))}: neither TransformerConfig nor GPTModel of Megatron-core has "
            f"that. Correct the arguments of from_transformers(), or the table."
        )
    vocabulary = padded_vocabulary(arguments.pop(VOCABULARY), config.tensor_model_parallel_size)
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config,
        layer_spec or _local_spec(config),
        vocabulary,
        pre_process=groups.is_pipeline_first_stage(**stage) if pre_process is None else pre_process,
        post_process=groups.is_pipeline_last_stage(**stage) if post_process is None else post_process,
        vp_stage=vp_stage,
        **arguments,
    )


def configured(settings: Settings) -> tuple[Any, Settings]:
    """A TransformerConfig for the process groups, and the settings that are none of its fields."""
    from megatron.core import parallel_state as groups
    from megatron.core.transformer import TransformerConfig

    sizes = {
        "tensor_model_parallel_size": groups.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": groups.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": groups.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": groups.get_context_parallel_world_size(),
        "expert_model_parallel_size": groups.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": groups.get_expert_tensor_parallel_world_size(),
        "pipeline_dtype": settings.get("params_dtype", torch.float32),
    }
    known = {field.name for field in fields(TransformerConfig)}
    config = TransformerConfig(**sizes | {key: value for key, value in settings.items() if key in known})
    return config, {key: value for key, value in settings.items() if key not in known}


def _local_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"from_transformers() was asked to read {str(folder)!r}, which should be a folder with config.json and weights, but there is "
            f"no {folder / 'config.json'}. Pass a configuration; or download the model with snapshot_download of huggingface_hub, and pass its folder."
        )
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _renaming(family: Family, state: Iterable[str], names: Iterable[str]) -> Callable[[str], str | None]:
    """By a name in files, that in the state; None for what other chunks have, and for no weights."""
    anywhere = {*names}
    elsewhere = anywhere - {*state}

    def rename(name: str) -> str | None:
        if name.endswith(family.ignored):
            return None
        if family.prefix and f"{family.prefix}{name}" in anywhere:
            name = f"{family.prefix}{name}"
        return None if name in elsewhere else name

    return rename


def _hide_padding(module: nn.Module, arguments: Any, output: Any, *, here: int, whole: int) -> None:  # noqa: ARG001
    """Makes padded logits so low, in place, that no softmax and no search counts them."""
    logits = output[0]
    kept = whole if module.gather_output else here
    if kept < logits.shape[-1]:
        logits[..., kept:] = torch.finfo(logits.dtype).min

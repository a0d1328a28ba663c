"""From a factory to stages, and from those to an engine; what does not fit is refused before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_checkpoint import load_weights, on_each_rank
from accel_core import place_model
from accel_core.api.component import gather_objects
from accel_core.api.strategy import check_alike
from accel_megatron.layouts import parts_of, shares_experts
from accel_megatron.model_engine import ModelEngine
from accel_megatron.random_streams import begin
from accel_megatron.stages import Stages, build_chunks
from accel_megatron.state import model_state
from accel_megatron.validation import check_config, check_models, check_trained

if TYPE_CHECKING:
    from pathlib import Path

    from accel_core import PrepareRequest, World
    from accel_megatron.options import Options
    from accel_megatron.parallel_groups import Sizes


def build(
    factory: Callable[..., nn.Module],
    checkpoint: Path | None,
    world: World,
    sizes: Sizes,
    options: Options,
    number: int,
) -> nn.Module:
    """This rank's stages of a model, or its experts; the model itself, if it has all. A collective.

    `number`: of the model, for each begins random streams of its own.
    """
    from megatron.core import parallel_state

    begin(world, 2 * number, alike=True)
    settings = {**sizes.settings(), "sequence_parallel": options.sequence_parallel}
    if sizes.pipeline > 1:
        settings["pipeline_dtype"] = torch.float32
    rank = parallel_state.get_pipeline_model_parallel_rank()

    def made() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chunks = build_chunks(factory, settings, rank, sizes.pipeline, sizes.virtual)
        check_models(chunks, sizes, options)
        is_pipeline = sizes.pipeline > 1
        return Stages(chunks, is_pipeline) if is_pipeline or shares_experts(chunks[0]) else chunks[0]

    model = on_each_rank(world, "for a model to be built", made)
    begin(world, 2 * number + 1)  # for dropout
    if isinstance(model, Stages):
        model.exchange(world)
    if checkpoint is not None:
        on_each_rank(
            world, "for weights to be read", lambda: load_weights(model_state(model), checkpoint, type(model).__name__)
        )
    return model


def prepare(
    model: nn.Module, request: PrepareRequest, world: World, sizes: Sizes, options: Options
) -> ModelEngine | None:
    """Places a model, and makes its engine; None for one that is not trained. A collective."""
    chunks = list(model.chunks) if isinstance(model, Stages) else [model]
    trains = not request.evaluation and any(parameter.requires_grad for parameter in model.parameters())
    if isinstance(model, Stages):
        check_trained(model, gather_objects([trains], world))
    if trains:
        if not isinstance(model, Stages) and shares_experts(model):
            raise ValueError(
                f"A {type(model).__name__} was prepared whose experts are shared among processes, but in each process they have the same names, "
                f"so a checkpoint would have those of one. Make it by accelerator.build_model(factory), which names them."
            )
        on_each_rank(world, "for a model to be checked", lambda: check_models(chunks, sizes, options))
        if sizes.tensor == sizes.pipeline == sizes.expert == 1:
            check_alike(model, world)
    policy = request.policy
    within = replace(
        request, policy=replace(policy, output=policy.input or policy.output)
    )  # whose output another takes
    for chunk in chunks:
        place_model(chunk, request if getattr(chunk, "post_process", True) else within)
    if isinstance(model, Stages):
        model.exchange(world)  # anew: since it was built, parameters may have been frozen, or got another dtype
    if not trains:
        return None
    on_each_rank(world, "for dtypes to be checked", lambda: check_config(model, request, options))
    parts = [part for chunk in chunks for part in parts_of(chunk)]
    config = config_of(chunks[0])
    if sizes.pipeline > 1:
        config.pipeline_dtype = within.policy.output or next(model.parameters()).dtype
    made = [chunk if hasattr(chunk, "set_input_tensor") else Plain(chunk) for chunk in chunks]
    return ModelEngine(made, parts, config, options)


def config_of(chunk: Any) -> Any:
    """Megatron's configuration of a model; one without effect for a module that is not Megatron's."""
    from megatron.core.transformer import TransformerConfig

    found = getattr(chunk, "config", None)
    if isinstance(found, TransformerConfig):
        return found
    return TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)


class Plain(nn.Module):
    """A module that is not Megatron's, with what its schedules ask of a model."""

    def __init__(self, module: nn.Module) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.module = module
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, _: Sequence[torch.Tensor | None]) -> None:
        """Nothing comes from another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)

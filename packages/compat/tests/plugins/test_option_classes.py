"""Option classes have Accelerate's fields and leniency, and give ours."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta

import pytest
import torch

import accel_core
import accel_data
import accel_precision
from accel_compat.arguments import complete_fp8_recipe, handlers_by_attribute
from accel_core import NotInstalledError
from accelerate.utils import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TERecipeKwargs,
    TorchDynamoPlugin,
)

GIVEN = [
    (AutocastKwargs(cache_enabled=False), accel_core.AutocastKwargs(cache_enabled=False)),
    (DataLoaderConfiguration(data_seed=3), accel_data.DataLoaderConfiguration(data_seed=3)),
    (
        DistributedDataParallelKwargs(dim=1, check_reduction=True, static_graph=True),
        accel_core.DistributedDataParallelKwargs(static_graph=True, gradient_as_bucket_view=False),
    ),
    (
        DistributedDataParallelKwargs(comm_wrapper="fp16"),
        accel_core.DistributedDataParallelKwargs(gradient_as_bucket_view=False),
    ),
    (
        DistributedDataParallelKwargs(
            comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option={"matrix_approximation_rank": 2}
        ),
        accel_core.DistributedDataParallelKwargs(
            comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2}, gradient_as_bucket_view=False
        ),
    ),
    (GradientAccumulationPlugin(num_steps=4), accel_core.GradientAccumulationPlugin(num_steps=4, mean_over="steps")),
    (GradientAccumulationPlugin(), accel_core.GradientAccumulationPlugin(num_steps=1, mean_over="steps")),
    (GradScalerKwargs(init_scale=8.0), accel_precision.GradScalerKwargs(init_scale=8.0)),
    (InitProcessGroupKwargs(), accel_core.InitProcessGroupKwargs()),
    (
        InitProcessGroupKwargs(timeout=timedelta(seconds=5)),
        accel_core.InitProcessGroupKwargs(timeout=timedelta(seconds=5)),
    ),
    (ProjectConfiguration("p", total_limit=2), accel_core.ProjectConfiguration("p", "p")),
    (
        ProjectConfiguration("p", automatic_checkpoint_naming=True, total_limit=2),
        accel_core.ProjectConfiguration("p", "p", automatic_checkpoint_naming=True, total_limit=2),
    ),
    (TERecipeKwargs(margin=2, fp8_format="e4m3"), accel_precision.TERecipeKwargs(margin=2, fp8_format="E4M3")),
    (TorchDynamoPlugin(backend="EAGER", mode="default"), accel_core.TorchDynamoPlugin(backend="eager")),
    (TorchDynamoPlugin(), None),
]


@pytest.mark.parametrize("given, ours", GIVEN, ids=lambda value: type(value).__name__)
def test_each_gives_the_object_of_our_packages(given, ours):
    assert given.ours() == ours
    assert type(given.ours()) is type(ours)


def test_they_can_be_subclassed_and_changed():
    @dataclass
    class Mine(DataLoaderConfiguration):
        more: int = 1

    mine = Mine(split_batches=True)
    mine.even_batches = False
    assert mine.ours() == accel_data.DataLoaderConfiguration(split_batches=True, even_batches=False)


def test_a_handler_of_a_script_is_one_of_ours_and_handed_on():
    @dataclass
    class Mine(KwargsHandler):
        a: int = 0
        b: bool = False
        c: float = 3.0

    mine = Mine(a=2, c=2.25)
    assert isinstance(mine, accel_core.KwargsHandler)
    assert mine.ours() is mine
    assert mine.to_kwargs() == {"a": 2, "c": 2.25}
    assert mine.to_dict() == {"a": 2, "b": False, "c": 2.25}


def test_what_differs_from_a_default_is_told_without_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    assert plugin.to_kwargs() == {"backend": "eager", "mode": "reduce-overhead"}
    assert plugin.ours().mode == "reduce-overhead"


def test_ao_pads_and_gathers_in_fp8_unless_told_otherwise(monkeypatch):
    pytest.importorskip("torchao")
    assert AORecipeKwargs().config.pad_inner_dim is True
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    config = AORecipeKwargs(enable_fsdp_float8_all_gather=False).config
    assert (config.pad_inner_dim, config.enable_fsdp_float8_all_gather) == (False, False)
    assert AORecipeKwargs(config=config).ours().config is config


def test_older_classes_of_fp8_say_what_they_stand_for():
    with pytest.warns(FutureWarning, match="write TERecipeKwargs or AORecipeKwargs"):
        older = FP8RecipeKwargs(backend="te", margin=1)
    assert older.ours() == accel_precision.TERecipeKwargs(margin=1, fp8_format="HYBRID")
    with pytest.raises(ValueError, match="MS-AMP is no longer maintained"):
        MSAMPRecipeKwargs().ours()
    with pytest.raises(ValueError, match="must be one of HYBRID, E4M3 and E5M2, not 'E5'"):
        TERecipeKwargs(fp8_format="e5")


def test_compressed_gradients_in_batches_are_refused():
    with pytest.raises(ValueError, match="Write comm_hook='power_sgd'"):
        DistributedDataParallelKwargs(comm_hook="batched_power_sgd").ours()


def test_a_profiler_is_built_from_names():
    with ProfileKwargs(activities=["cpu"], record_shapes=True).build() as profiler:
        torch.ones(2) + 1
    assert profiler.record_shapes
    assert type(ProfileKwargs().ours()) is accel_core.ProfileKwargs


def test_megatron_is_translated_or_refused_by_name():
    package = pytest.importorskip("accel_megatron")
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, sequence_parallelism=True)
    made = plugin.ours(4)
    assert isinstance(made, package.Megatron)
    assert made.details() == package.Megatron(2, 2, sequence_parallel=True).details()
    plugin.gradient_clipping = 1.0
    with pytest.raises(ValueError, match=r"gradient_clipping=1.0\) was given.* call accelerator.clip_grad_norm_"):
        plugin.ours(4)


def test_megatron_that_is_not_installed_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "accel_megatron", None)
    with pytest.raises(NotInstalledError, match="MegatronLMPlugin: accel-megatron is not installed. "):
        MegatronLMPlugin(tp_degree=2).ours(2)


@pytest.mark.parametrize("kind", [DynamoBackend, LoggerType, PrecisionType, RNGType])
def test_lists_of_words_are_texts(kind):
    word = next(iter(kind))
    assert word == word.value == str(word)
    assert word.value in kind
    assert "nonsense" not in kind
    assert kind.list() == [member.value for member in kind]
    assert DynamoBackend("inductor") is DynamoBackend.INDUCTOR


def test_every_option_class_is_a_dataclass():
    import accel_compat.plugins as plugins

    kinds = [getattr(plugins, name) for name in plugins.__all__]
    made = [kind for kind in kinds if hasattr(kind, "ours")]
    assert len(made) > 15
    assert all(is_dataclass(kind) and (fields(kind) or kind is KwargsHandler) for kind in made)


def test_a_recipe_of_fp8_with_another_precision_is_refused():
    with pytest.raises(
        ValueError, match=r"AORecipeKwargs was given with mixed_precision='bf16'\. Write mixed_precision='fp8'"
    ):
        complete_fp8_recipe(handlers_by_attribute([AORecipeKwargs()]), "bf16")


def test_an_unknown_library_of_fp8_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "other")
    with pytest.raises(ValueError, match="ACCELERATE_FP8_BACKEND is 'OTHER': expected AO or TE"):
        complete_fp8_recipe(handlers_by_attribute(None), "fp8")

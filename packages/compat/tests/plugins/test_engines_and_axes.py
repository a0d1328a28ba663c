"""Plugins of DeepSpeed and of meshes, and what the environment says."""

from __future__ import annotations

import json

import pytest

import accel_core
from accel_compat.environment import Environment, from_environment
from accel_fsdp import FSDP
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSchedulerWrapper, DummyOptim, FullyShardedDataParallelPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig, get_active_deepspeed_plugin

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}


def test_options_become_a_configuration_that_libraries_read():
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=1.0)
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.is_zero3_init_enabled()
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 2
    assert plugin.get_value("zero_optimization.stage") == 3
    assert plugin.is_auto("train_micro_batch_size_per_gpu")
    assert not plugin.selected


def test_a_configuration_fills_in_fields_and_its_autos_are_filled(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    plugin = DeepSpeedPlugin(hf_ds_config=str(path), gradient_clipping=0.5)
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.gradient_clipping) == (3, "cpu", 0.5)
    plugin.deepspeed_config_process(
        **{"train_micro_batch_size_per_gpu": 4, "optimizer.params.lr": 0.1}, must_match=False
    )
    assert plugin.deepspeed_config["optimizer"]["params"]["lr"] == 0.1
    with pytest.raises(ValueError, match="mismatch kwargs:\n- ds train_micro_batch_size_per_gpu=4 vs arg .*=5"):
        plugin.deepspeed_config_process(train_micro_batch_size_per_gpu=5)
    with pytest.raises(ValueError, match="'zero_optimization' is missing"):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": 1})


def test_a_precision_is_written_once():
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
    with pytest.raises(ValueError, match="mixed_precision='fp16' was asked for, and the configuration has 'bf16'"):
        plugin.set_mixed_precision("fp16")


def test_the_strategy_has_what_the_plugin_says(monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # DeepSpeed sets it when it is imported
    pytest.importorskip("deepspeed")
    strategy = DeepSpeedPlugin(zero_stage=1).ours(2)
    assert strategy.zero_stage == 1


def test_names_of_deepspeed_serve_isinstance_and_selection():
    assert not isinstance(object(), DeepSpeedSchedulerWrapper)
    with pytest.raises(TypeError, match="DeepSpeedSchedulerWrapper wraps nothing here"):
        DeepSpeedSchedulerWrapper(None, None)

    class State:
        deepspeed_plugins = {"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()}

    State.deepspeed_plugins["b"].select(_from_accelerator_state=True)
    assert get_active_deepspeed_plugin(State) is State.deepspeed_plugins["b"]
    with pytest.raises(ValueError, match="selected by AcceleratorState"):
        DeepSpeedPlugin().select()
    assert HfDeepSpeedConfig(CONFIG).get_value("zero_optimization.stage") == 3
    assert DummyOptim.__module__.startswith("accel_deepspeed")


def test_axes_have_sizes_names_and_products():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    assert config.total_size == 8
    assert (config.data_parallel_size, config.non_data_parallel_size) == (4, 2)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.cp_enabled
    assert not config.tp_enabled
    assert config.to_json()["cp_handler"] == {"cp_comm_strategy": "allgather"}


def test_axes_become_fsdp_ddp_or_nothing():
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2).ours(8)._sizes
    assert (sizes["replicate"], sizes["context"], sizes["tensor"]) == (2, 2, 1)
    assert isinstance(ParallelismConfig(dp_replicate_size=2).ours(2), accel_core.DDP)
    assert ParallelismConfig().ours(2) is None
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    assert ParallelismConfig(dp_shard_size=2).ours(2, plugin)._options.activation_checkpointing is True
    assert isinstance(ParallelismConfig().ours(2, plugin), FSDP)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"dp_shard_size": 2}, "has 2 ranks, and there are 4"),
        ({"tp_size": 4}, r"tp_size=4 does not say which layers are cut. .*FSDP\(tensor_parallel=4, parallelize_plan="),
        ({"sp_size": 4}, "asks for DeepSpeed's sequence parallelism, which is not offered. Write cp_size=4"),
    ],
)
def test_axes_that_cannot_be_had_say_so(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**sizes).ours(4)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tp_size": 0}, "tp_size must be at least 1"),
        ({"cp_size": 2, "sp_size": 2}, "exclude each other"),
        ({"tp_size": 2, "dp_replicate_size": 2}, "need shards, too"),
        ({"cp_backend": "other"}, "cp_backend must be 'torch'"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**sizes)


def test_the_environment_is_read_as_arguments():
    environ = {
        "ACCELERATE_MIXED_PRECISION": "BF16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
        "ACCELERATE_USE_CPU": "yes",
    }
    found = from_environment(environ)
    assert (found.mixed_precision, found.gradient_accumulation_steps, found.cpu) == ("bf16", 4, True)
    assert found.fsdp_plugin.fsdp_version == 2
    assert found.fsdp_plugin.transformer_cls_names_to_wrap == ["A", "B"]
    assert found.parallelism_config.dp_shard_size == 2
    assert (str(found.dynamo_plugin.backend), found.dynamo_plugin.fullgraph) == ("INDUCTOR", True)
    assert from_environment({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_DYNAMO_BACKEND": "no"}) == Environment()
    with pytest.raises(ValueError, match="'maybe' is no truth value"):
        from_environment({"ACCELERATE_USE_FSDP": "maybe"})

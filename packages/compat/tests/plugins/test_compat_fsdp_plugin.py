"""The options of both generations of FSDP become a strategy of accel-fsdp."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accel_fsdp import FSDP
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin


def options(plugin, world=4):
    strategy = plugin.ours(world)
    assert isinstance(strategy, FSDP)
    return {**vars(strategy._options), **strategy._sizes}


def chosen(plugin, model):
    wrap = options(plugin)["wrap"]
    return [name for name, module in model.named_modules() if wrap(module, name)]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())


@pytest.mark.parametrize("given", ["SHARD_GRAD_OP", "shard_grad_op", "2", 2, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("name", ["sharding_strategy", "reshard_after_forward"])
def test_the_first_generation_says_by_a_strategy_whether_weights_are_let_go_of(name, given):
    plugin = Plugin(**{name: given})
    assert getattr(plugin, name) is ShardingStrategy.SHARD_GRAD_OP
    assert options(plugin)["reshard_after_forward"] is False
    assert options(Plugin())["reshard_after_forward"] is True


def test_the_second_generation_says_it_by_a_truth_value():
    assert options(Plugin(fsdp_version=2, reshard_after_forward="false"))["reshard_after_forward"] is False
    assert options(Plugin(fsdp_version=2, sharding_strategy="SHARD_GRAD_OP"))["reshard_after_forward"] is False
    with pytest.raises(ValueError, match="expected True or False for fsdp_version=2"):
        Plugin(fsdp_version=2, reshard_after_forward=ShardingStrategy.FULL_SHARD)
    with pytest.raises(ValueError, match="expected a sharding strategy"):
        Plugin(fsdp_version=1, reshard_after_forward=True)


def test_replicas_are_the_machines_or_all_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert options(Plugin(sharding_strategy="HYBRID_SHARD"), world=4)["replicate"] == 2
    assert options(Plugin(sharding_strategy="NO_SHARD"), world=4)["replicate"] == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(
        ValueError, match="has a replica on each machine, but LOCAL_WORLD_SIZE=0 .* FSDP\\(replicate=n\\)"
    ):
        Plugin(sharding_strategy="HYBRID_SHARD").ours(4)


def test_units_are_classes_sizes_or_what_a_policy_of_torch_chooses(model):
    by_class = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Linear,ReLU")
    assert by_class.auto_wrap_policy is transformer_auto_wrap_policy
    assert options(by_class)["wrap"] == ["Linear", "ReLU"]
    by_class.set_auto_wrap_policy(model)
    assert by_class.auto_wrap_policy.keywords == {"transformer_layer_cls": {nn.Linear, nn.ReLU}}
    assert chosen(by_class, model) == ["0", "1.0", "2"]
    assert options(Plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10))["wrap"] == 10
    assert (
        options(Plugin(auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=10)))["wrap"]
        == 10
    )
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.ReLU))
    assert chosen(Plugin(auto_wrap_policy=policy), model) == ["2"]
    assert chosen(Plugin(auto_wrap_policy=lambda module, name: name == "1"), model) == ["1"]
    assert options(Plugin())["wrap"] is None  # the repeated blocks
    assert options(Plugin(auto_wrap_policy="NO_WRAP"))["wrap"] == "none"


def test_a_class_that_the_model_has_not_is_an_error(model):
    plugin = Plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"])
    with pytest.raises(ValueError, match="Could not find the transformer layer class Block"):
        plugin.set_auto_wrap_policy(model)
    with pytest.raises(ValueError, match="'WRAP' is none of TRANSFORMER_BASED_WRAP"):
        Plugin(auto_wrap_policy="WRAP")


@pytest.mark.parametrize("version, kind", [(1, CPUOffload), (2, CPUOffloadPolicy)])
def test_offload_is_a_truth_value_or_an_object_of_torch(version, kind):
    plugin = Plugin(fsdp_version=version, cpu_offload=True)
    assert isinstance(plugin.cpu_offload, kind)
    assert options(plugin)["cpu_offload"] is True
    assert options(Plugin(fsdp_version=version))["cpu_offload"] is False
    other = CPUOffload(offload_params=True) if version == 2 else CPUOffloadPolicy()
    with pytest.raises(ValueError, match=f"for fsdp_version={version}"):
        Plugin(fsdp_version=version, cpu_offload=other)


def test_dtypes_become_a_precision_if_they_were_given():
    assert Plugin().precision() is None
    plugin = Plugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    policy = plugin.precision().policy
    assert (policy.compute, policy.reduce) == (torch.bfloat16, torch.bfloat16)
    later = Plugin()
    later.set_mixed_precision("fp16", buffer_autocast=True)
    assert later.mixed_precision_policy == MixedPrecision(torch.float16, torch.float16, torch.float32)
    assert later.precision() is None  # it is that of the Accelerator
    with pytest.raises(
        ValueError, match="Invalid mixed precision policy .* expected param_dtype, reduce_dtype, output_dtype"
    ):
        Plugin(fsdp_version=2, mixed_precision_policy={"param_dtype": torch.bfloat16})


def test_the_kind_of_files_follows_the_generation_and_may_change():
    assert Plugin().state_dict_type is StateDictType.FULL_STATE_DICT
    plugin = Plugin(fsdp_version=2)
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    with pytest.raises(ValueError, match="LOCAL_STATE_DICT is of fsdp_version=1"):
        Plugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")


def test_ignored_modules_are_objects_or_a_pattern(model):
    assert options(Plugin(ignored_modules=[model[0]]))["ignored_modules"] == [model[0]]
    ignored = options(Plugin(ignored_modules=r"1\..*"))["ignored_modules"]
    assert [name for name, module in model.named_modules() if ignored(module, name)] == ["1.0"]


def test_variables_fill_in_what_is_not_given(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "yes")
    plugin = Plugin(activation_checkpointing=False)
    assert (plugin.fsdp_version, plugin.activation_checkpointing) == (2, False)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def test_it_says_to_transformers_who_reads_weights(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")
    plugin = Plugin(cpu_ram_efficient_loading=True)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    assert plugin.sync_module_states is True


def test_what_memory_cannot_be_saved_by_is_said(caplog):
    plugin = Plugin(fsdp_version=2, activation_checkpointing=True, activation_checkpointing_offload=True)
    assert options(plugin)["activation_checkpointing"] is True
    assert "activation_checkpointing_offload has no effect" in caplog.text
    with pytest.raises(ValueError, match="takes activation_checkpointing=True"):
        Plugin(fsdp_version=2, activation_checkpointing_offload=True)


def test_a_policy_of_its_own_is_the_precision_of_the_run():
    plugin = Plugin(fsdp_version=2, mixed_precision_policy="bf16")
    with pytest.raises(ValueError, match=r"mixed_precision='fp16' and a plugin .* give mixed_precision='bf16'"):
        Accelerator(cpu=True, mixed_precision="fp16", fsdp_plugin=plugin)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.mixed_precision == "bf16"
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.autocast():
        assert model(torch.ones(1, 2)).dtype is not torch.float16
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16
    accelerator.end_training()

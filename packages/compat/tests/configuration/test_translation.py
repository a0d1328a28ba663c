"""Files of Accelerate's, as its version 1.15 writes them: what they say here, and that nothing of them is lost without a word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from accel_compat.configuration.blocks import BLOCKS
from accel_compat.configuration.rules import PREFIXES
from accel_compat.configuration.top_level import TOP
from accel_compat.configuration.translation import translate
from accel_core.api.launcher import LOADER_OPTIONS
from accel_launch import run_command

FOLDER = Path(__file__).parent / "peer_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
RUNS = [file for file in FILES if file.stem != "sagemaker"]


def read(path: Path) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def keys_of(data: dict[str, Any]) -> list[str]:
    """Every key; of a block that says something, those inside."""
    return [
        f"{key}.{inner}" if inner else key
        for key, value in data.items()
        for inner in (value if isinstance(value, dict) and value else [""])
    ]


def reason(data: dict[str, Any], key: str) -> str:
    (found,) = [left for left in translate(data).left if left.old == key]
    return found.reason


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_every_key_ends_in_exactly_one_of_carried_and_left(file: Path):
    data = read(file)
    imported = translate(data)
    carried, left = {each.old for each in imported.carried}, [each.old for each in imported.left]
    assert sorted([*carried, *left]) == sorted(keys_of(data))
    assert all(len(each.reason) > 20 for each in imported.left)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_what_is_carried_over_is_a_valid_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Every option is one here, with a value of its type."""
    target = tmp_path / "config.yaml"
    assert run_command(["config", "import", "--config-file", str(target), str(file)]) == 0
    assert read(target) == translate(read(file)).data
    capsys.readouterr()
    status, said = run_command(["config", "validate", str(target)]), capsys.readouterr()
    assert (status, said.err) == (0, "") or "cannot be used here" in said.err


def test_a_default_file():
    assert translate(read(FOLDER / "default_config.yaml")).data == {
        "num_processes": 1,
        "cpu": True,
        "mixed_precision": "bf16",
    }


def test_fsdp_of_the_first_generation():
    imported = translate(read(FOLDER / "fsdp_1.yaml"))
    assert imported.data == {
        "num_machines": 2,
        "main_process_ip": "192.168.0.10",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
        "num_processes": 8,
        "strategy": "fsdp",
        "mixed_precision": "bf16",
        "fsdp": {
            "reshard_after_forward": True,
            "replicate": 2,
            "wrap": ["LlamaDecoderLayer", "LlamaEmbedding"],
            "activation_checkpointing": True,
            "cpu_offload": False,
        },
    }
    assert {each.old.rpartition(".")[2] for each in imported.left} == {
        "fsdp_version",
        "fsdp_state_dict_type",
        "fsdp_cpu_ram_efficient_loading",
        "machine_rank",  # c10d numbers machines as they come
    }


def test_fsdp_of_the_second_generation_with_a_mesh_fp8_and_compilation():
    imported = translate(read(FOLDER / "fsdp_2.yaml"))
    assert imported.data == {
        "num_processes": 8,
        "strategy": "fsdp",
        "mixed_precision": "fp8",
        "numa_binding": "node",
        "dynamo_backend": "inductor",
        "fsdp": {
            "reshard_after_forward": False,
            "wrap": 100_000_000,
            "cpu_offload": True,
            "activation_checkpointing": False,
            "replicate": 2,
            "shard": 2,
            "context_parallel": 2,
        },
        "fp8": {"backend": "torchao", "enable_fsdp_float8_all_gather": True},
        "dynamo": {
            "mode": "reduce-overhead",
            "fullgraph": False,
            "dynamic": True,
            "use_regional_compilation": True,
        },
    }
    assert {each.old for each in imported.left} == {"fsdp_config.fsdp_state_dict_type", "fp8_config.pad_inner_dim"}


def test_old_names_and_yaml_as_people_write_it():
    assert translate(read(FOLDER / "old.yaml")).data == {
        "num_processes": 4,
        "strategy": "fsdp",
        "mixed_precision": "fp16",
        "fsdp": {"reshard_after_forward": False, "wrap": 2000, "cpu_offload": True},
    }


def test_two_gpus():
    imported = translate(read(FOLDER / "two_gpus.yaml"))
    assert (imported.data, imported.left) == ({"num_processes": 2, "device_ids": [0, 1]}, [])


def test_deepspeed_says_what_is_not_its_own():
    imported = translate(read(FOLDER / "deepspeed.yaml"))
    assert imported.data["strategy"] == "deepspeed"
    assert imported.data["gradient_accumulation_steps"] == 4
    assert imported.data["machine_rank"] == 1
    reasons = {each.old.partition(".")[2]: each.reason for each in imported.left}
    assert imported.data["deepspeed"]["zero_stage"] == 3
    assert imported.data["deepspeed"]["offload_folder"] == "/nvme"
    assert "accelerator.build_model" in reasons["zero3_init_flag"]
    assert "clip_grad_norm_" in reasons["gradient_clipping"]
    assert "srun or mpirun" in reasons["deepspeed_hostfile"]


def test_sagemaker_is_refused_as_a_whole():
    with pytest.raises(ValueError, match=r"(?s)AMAZON_SAGEMAKER.*Nothing of it is carried over.*accel config default"):
        translate(read(FOLDER / "sagemaker.yaml"))


FSDP = {"distributed_type": "FSDP"}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {"reshard_after_forward": True}),
        ({"fsdp_sharding_strategy": "1"}, {"reshard_after_forward": True}),
        ({"fsdp_sharding_strategy": "shard_grad_op"}, {"reshard_after_forward": False}),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        ({"fsdp_sharding_strategy": 5}, {"reshard_after_forward": False, "replicate": 3}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, {"reshard_after_forward": True}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {"wrap": "none"}),
        ({"fsdp_ignored_modules": r"head|layers\..*\.norm"}, {"ignored_modules": ["head", "layers.*.norm"]}),
    ],
)
def test_what_fsdp_options_become(block: dict[str, Any], expected: dict[str, Any]):
    imported = translate({**FSDP, "num_machines": 3, "fsdp_config": block})
    assert imported.data["fsdp"] == expected
    assert not imported.left


def test_a_strategy_that_shards_nothing_is_ddp():
    data = {
        **FSDP,
        "fsdp_config": {"fsdp_sharding_strategy": 3, "fsdp_offload_params": True, "fsdp_use_orig_params": True},
    }
    assert translate(data).data == {"strategy": "ddp"}
    assert "NO_SHARD is strategy ddp here" in reason(data, "fsdp_config.fsdp_offload_params")


@pytest.mark.parametrize(
    ("data", "key", "says"),
    [
        ({"distributed_type": "NO", "num_processes": 4}, "distributed_type", "num_processes: 1"),
        ({"distributed_type": "NEW"}, "distributed_type", "no strategy goes by this name"),
        ({"distributed_type": "TPU"}, "distributed_type", "torch_xla"),
        ({"distributed_type": "MULTI_CPU", "use_cpu": False}, "use_cpu", "says otherwise"),
        ({"compute_environment": "CLOUD"}, "compute_environment", "expected LOCAL_MACHINE"),
        ({"num_processes": "two"}, "num_processes", "expected a whole number. Set num_processes yourself"),
        ({"machine_rank": 1}, "machine_rank", "num_machines is 1"),
        ({"gpu_ids": "GPU-8f3a"}, "gpu_ids", "expected indices of accelerators"),
        ({"gpu_ids": "0", "use_cpu": True}, "gpu_ids", "the run is on the CPU"),
        ({"enable_cpu_affinity": True, "use_cpu": True}, "enable_cpu_affinity", "the run is on the CPU"),
        ({"mixed_precision": "int4"}, "mixed_precision", "no precision goes by this name"),
        ({"mixed_precision": "bf16", "fp16": True}, "fp16", "Accelerate follows that"),
        ({"fp16": "maybe"}, "fp16", "expected true or false"),
        ({"main_training_function": "train"}, "main_training_function", "__main__"),
        ({"mpirun_config": {"mpirun_hostfile": "hosts"}}, "mpirun_config.mpirun_hostfile", "mpirun --hostfile"),
        ({"mpirun_config": True}, "mpirun_config", "expected a mapping"),
        ({"num_proceses": 4}, "num_proceses", "does not know it either. If num_processes was meant"),
        ({**FSDP, "fsdp_config": {"fsdp_wrap": 4}}, "fsdp_config.fsdp_wrap", "Accelerate 1.15 does not know it either"),
        (
            {**FSDP, "fsdp_config": {"fsdp_shard_strategy": 4}},
            "fsdp_config.fsdp_shard_strategy",
            "If fsdp_sharding_strategy was meant",
        ),
        (
            {"distributed_type": "NO", "fsdp_config": {"fsdp_offload_params": True}},
            "fsdp_config.fsdp_offload_params",
            "Accelerate reads fsdp_config under FSDP only",
        ),
        (
            {**FSDP, "fsdp_config": {"sharding_strategy": "HALF"}},
            "fsdp_config.sharding_strategy",
            "expected one of FULL_SHARD",
        ),
        (
            {**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": 1}},
            "fsdp_config.fsdp_sharding_strategy",
            "does not read it either",
        ),
        (
            {**FSDP, "fsdp_config": {"fsdp_sharding_strategy": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}},
            "fsdp_config.fsdp_reshard_after_forward",
            "Accelerate follows fsdp_sharding_strategy (FULL_SHARD)",
        ),
        (
            {**FSDP, "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
            "fsdp_config.fsdp_auto_wrap_policy",
            "Units are the repeated blocks of the model here",
        ),
        (
            {**FSDP, "fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
            "fsdp_config.fsdp_auto_wrap_policy",
            "fsdp_min_num_params does not say",
        ),
        (
            {**FSDP, "fsdp_config": {"auto_wrap_policy": "ALL"}},
            "fsdp_config.auto_wrap_policy",
            "expected TRANSFORMER_BASED",
        ),
        (
            {**FSDP, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block"}},
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "set fsdp.wrap: [Block]",
        ),
        ({**FSDP, "fsdp_config": {"fsdp_min_num_params": 9}}, "fsdp_config.fsdp_min_num_params", "fsdp.wrap: 9"),
        (
            {**FSDP, "fsdp_config": {"fsdp_ignored_modules": "layers.[0-3]"}},
            "fsdp_config.fsdp_ignored_modules",
            "it is a regular expression",
        ),
        (
            {"dynamo_config": {"dynamo_use_dynamic": True}},
            "dynamo_config.dynamo_use_dynamic",
            "models are not compiled",
        ),
        ({"fp8_config": {"backend": "AO"}}, "fp8_config.backend", "mixed_precision is not fp8"),
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP"}},
            "fp8_config.backend",
            "MS-AMP is no longer maintained",
        ),
        (
            {"mixed_precision": "fp8", "fp8_config": {"fp8_margin": 2}},
            "fp8_config.fp8_margin",
            "TERecipeKwargs(margin=...)",
        ),
        (
            {"mixed_precision": "fp8", "fp8_config": {"enable_fsdp_float8_all_gather": True}},
            "fp8_config.enable_fsdp_float8_all_gather",
            "the strategy is not fsdp",
        ),
        (
            {**FSDP, "parallelism_config": {"parallelism_config_tp_size": 2}},
            "parallelism_config.parallelism_config_tp_size",
            "parallelize_plan",
        ),
        (
            {"parallelism_config": {"parallelism_config_cp_size": 2}},
            "parallelism_config.parallelism_config_cp_size",
            "under strategy fsdp only",
        ),
        (
            {
                **FSDP,
                "num_machines": 2,
                "parallelism_config": {"dp_replicate_size": 4},
                "fsdp_config": {"sharding_strategy": 4},
            },
            "parallelism_config.dp_replicate_size",
            "fsdp_config.sharding_strategy says something else about fsdp.replicate",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_accumulation_steps": "auto"}},
            "deepspeed_config.gradient_accumulation_steps",
            "Accelerator(gradient_accumulation_steps=n)",
        ),
    ],
)
def test_what_cannot_be_carried_over_exactly_is_left_and_says_what_to_do(data: dict[str, Any], key: str, says: str):
    assert says in reason(data, key)


def test_values_that_say_nothing_are_carried_over_as_nothing():
    data = {
        "num_processes": -1,
        "mixed_precision": False,  # `no`, as YAML 1.1 reads it
        "gpu_ids": "all",
        "main_process_port": 0,
        "num_machines": 1,
        "rdzv_backend": "static",
        "fsdp_config": {},
        "dynamo_backend": "NO",
        "commands": None,
        "tpu_env": [],
    }
    imported = translate(data)
    assert (imported.data, imported.left) == ({}, [])
    assert [each.new for each in imported.carried] == [""] * len(data)


def test_every_rule_of_the_table_decides_about_any_value():
    for value in (True, False, 0, 3, 1.5, "no", "text", [1], {"a": 1}):
        for kind in ("NO", *(block.distributed_type for block in BLOCKS.values() if block.distributed_type)):
            blocks = {
                name: {f"{PREFIXES.get(name, '')}{key}": value for key in block.rules} for name, block in BLOCKS.items()
            }
            data = {**dict.fromkeys(TOP, value), "mixed_precision": "fp8", "distributed_type": kind, **blocks}
            imported = translate(data)
            assert {each.old for each in imported.carried}.isdisjoint(each.old for each in imported.left)
            assert {*imported.data}.isdisjoint(LOADER_OPTIONS)


def test_the_command_lists_what_it_did_and_why_the_rest_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "config.yaml"
    assert run_command(["config", "import", "--config-file", str(target), str(FOLDER / "fsdp_2.yaml")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"fsdp_config\.fsdp_offload_params +fsdp\.cpu_offload +true", out)
    assert re.search(r"fsdp_config\.fsdp_state_dict_type +FULL_STATE_DICT +checkpoints are written in parts", out)
    assert "Says nothing, or what is so here in any case:" in out
    assert "# " in target.read_text()

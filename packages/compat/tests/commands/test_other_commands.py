"""`accelerate config`, `to-fsdp2`, `env`, `merge-weights`, and the console script."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from accel_compat.commands import config
from accel_compat.commands.config import to_peer
from accel_compat.commands.config_file import ClusterConfig, load_config_from_file, read, write
from accel_compat.commands.fsdp2 import convert_config_to_fsdp2
from accel_compat.commands.main import COMMANDS, main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HOME", "XDG_CACHE_HOME", "ACCELERATE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("launch", "launch_command launch_command_parser main"),
        ("config", "default_config_file load_config_from_file get_config_parser"),
        ("config.config_args", "ClusterConfig SageMakerConfig load_config_from_file cache_dir"),
        ("config.default", "write_basic_config"),
        ("config.update", "update_config"),
        ("env", "env_command env_command_parser"),
        ("test", "test_command test_command_parser"),
        ("estimate", "estimate_command estimate_command_parser"),
        ("merge", "merge_command merge_command_parser"),
        ("to_fsdp2", "convert_config_to_fsdp2 to_fsdp2_command to_fsdp2_command_parser"),
        ("accelerate_cli", "main"),
        ("utils", "CustomArgumentParser"),
    ],
)
def test_libraries_find_the_commands_where_they_look(module: str, names: str):
    found = import_module(f"accelerate.commands.{module}")
    assert {*names.split()} <= {*found.__all__}
    assert all(callable(getattr(found, name)) or isinstance(getattr(found, name), str) for name in names.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([name, "-h"])
    assert ended.value.code == 0
    assert "usage: accelerate" in capsys.readouterr().out


def test_the_program_says_what_there_is(capsys: pytest.CaptureFixture[str]):
    assert main(["-h"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)
    assert main([]) == 2
    assert main(["lunch"]) == 2
    assert "there is no command 'lunch'" in capsys.readouterr().err
    assert main(["tpu-config"]) == 2
    assert "pods of TPUs are not set up here" in capsys.readouterr().err


def test_a_default_file_is_what_launch_reads_and_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "new" / "default.yaml")
    assert main(["config", "default", "--config_file", path, "--mixed_precision", "bf16"]) == 0
    found = load_config_from_file(path)
    assert isinstance(found, ClusterConfig)
    assert found.mixed_precision == "bf16"
    assert found.num_processes >= 1
    before = Path(path).read_text()
    assert main(["config", "default", "--config_file", path]) == 0
    assert "there already" in capsys.readouterr().err
    assert Path(path).read_text() == before


def test_an_older_file_is_updated(tmp_path: Path):
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: NO\nfp16: true\ndynamo_backend: INDUCTOR\n")
    assert main(["config", "update", "--config_file", str(path)]) == 0
    found = read(str(path))
    assert (found["mixed_precision"], found["num_processes"]) == ("fp16", 1)
    assert found["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert "fp16" not in found


def test_what_is_written_says_the_same_in_both_versions_of_yaml(tmp_path: Path):
    content = {
        "mixed_precision": "no",
        "port": 29500,
        "use_cpu": False,
        "block": {"a": "yes", "b": [1, 2]},
        "empty": {},
    }
    path = str(tmp_path / "file.yaml")
    write(path, content)
    assert read(path) == content
    assert YAML(typ="safe", pure=True).load(Path(path).read_text()) == content
    write(path.replace("yaml", "json"), content)
    assert json.loads((tmp_path / "file.json").read_text()) == content


@pytest.mark.parametrize(
    ("ours", "expected", "left"),
    [
        ({"num_processes": 1, "cpu": True}, {"distributed_type": "NO", "use_cpu": True}, []),
        ({"num_processes": 4, "cpu": True}, {"distributed_type": "MULTI_CPU", "num_processes": 4}, []),
        ({"num_processes": 4}, {"distributed_type": "MULTI_GPU"}, []),
        ({"num_processes": 2, "strategy": "fsdp"}, {"distributed_type": "FSDP"}, []),
        ({"num_processes": 2, "strategy": "mine"}, {"distributed_type": "MULTI_GPU"}, ["strategy"]),
        ({"num_processes": 1, "mixed_precision": "bf16-true"}, {"mixed_precision": "no"}, ["mixed_precision"]),
        ({"num_processes": 1, "log_with": ["wandb"]}, {"distributed_type": "NO"}, ["log_with"]),
    ],
)
def test_answers_become_a_file_of_theirs(ours: dict[str, Any], expected: dict[str, Any], left: list[str]):
    content, without = to_peer(ours, {"fsdp_config": {"fsdp_version": 2}, "num_machines": 3})
    assert content.items() >= {**expected, "fsdp_config": {"fsdp_version": 2}}.items()
    assert "num_machines" not in content
    assert without == left


def test_the_questions_are_those_of_accel_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "theirs.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n")

    def answers(place: Path) -> int:
        assert read(str(place)) == {"num_processes": 2, "strategy": "fsdp"}
        place.write_text("num_processes: 8\nstrategy: fsdp\nmixed_precision: bf16\nlog_with: [tensorboard]\n")
        return 0

    monkeypatch.setattr(config, "ask_for_config", answers)
    assert main(["config", "--config_file", str(path)]) == 0
    assert (
        read(str(path)).items() >= {"num_processes": 8, "mixed_precision": "bf16", "distributed_type": "FSDP"}.items()
    )
    assert read(str(path))["fsdp_config"] == {"fsdp_version": 2}
    assert "log_with has no place in that file" in capsys.readouterr().out
    before = path.read_text()
    monkeypatch.setattr(config, "ask_for_config", lambda place: 130)
    assert main(["config", "--config_file", str(path)]) == 130
    assert path.read_text() == before


def test_a_file_of_the_first_fsdp_becomes_one_of_the_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_use_orig_params": True, "fsdp_offload_params": True}
    path, new = str(tmp_path / "old.yaml"), str(tmp_path / "new.yaml")
    write(path, {"distributed_type": "FSDP", "fsdp_config": old})
    assert main(["to-fsdp2", "--config_file", path]) == 2
    assert "Give --output_file FILE, or --overwrite" in capsys.readouterr().err
    assert main(["to-fsdp2", "--config_file", path, "--output_file", new]) == 0
    expected = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}
    assert read(new)["fsdp_config"] == expected
    assert main(["to-fsdp2", "--config_file", path, "--output_file", new]) == 2
    assert main(["to-fsdp2", "--config_file", path, "--overwrite"]) == 0
    assert read(path) == read(new)
    assert convert_config_to_fsdp2({"fsdp_config": expected}) == {"fsdp_config": expected}


def test_env_prints_ours(capsys: pytest.CaptureFixture[str]):
    assert main(["env"]) == 0
    assert "accel-core" in capsys.readouterr().out


def test_weights_are_merged_by_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import torch
    from safetensors.torch import load_file, save_file

    (tmp_path / "in").mkdir()
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "in" / "model.safetensors")
    assert main(["merge-weights", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].sum() == 4
    assert main(["merge-weights", "--unsafe_serialization", str(tmp_path / "in"), str(tmp_path / "out2")]) == 2
    assert "safetensors" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process writes, without a group
def test_parts_that_fsdp_wrote_are_merged(tmp_path: Path):
    import torch
    from safetensors.torch import load_file
    from torch.distributed import checkpoint

    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "in", no_dist=True)
    assert main(["merge-weights", "--remove_checkpoint_dir", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].tolist() == [1, 1]
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("output", ["in", "in/merged"])
def test_a_folder_with_the_merged_weights_in_it_is_not_removed(output: str, tmp_path: Path, capsys):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "in" / "model.safetensors")
    assert main(["merge-weights", "--remove_checkpoint_dir", str(tmp_path / "in"), str(tmp_path / output)]) == 2
    assert "in which it is, to be removed afterwards. Give a folder outside of that." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["model.safetensors"]


def test_a_tilde_is_the_home_folder_also_behind_an_equals_sign(home: Path):
    assert main(["config", "default", "--config_file=~/first.yaml"]) == 0
    assert main(["config", "update", "--config_file=~/first.yaml"]) == 0
    config = {"fsdp_config": {"fsdp_offload_params": False}, "distributed_type": "FSDP"}
    write(str(home / "second.yaml"), config)
    main(["to-fsdp2", "--config_file=~/second.yaml", "--output_file=~/third.yaml"])
    assert {"first.yaml", "second.yaml", "third.yaml"} <= {path.name for path in home.iterdir()}


def test_memory_is_estimated_by_ours(capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", "--library_name", "timm", "resnet50"]) == 2
    assert "accel estimate-memory timm:create_model" in capsys.readouterr().err

"""`accelerate launch`: its options and files become those of our launcher, and variables of the processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_compat.commands import launch as commands
from accel_compat.commands.launch import launch_command, launch_command_parser
from accel_compat.commands.main import main

SHOW = """
import json, os, sys
names = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
found = {name: text for name, text in os.environ.items() if name.startswith(names) and name != "ACCELERATE_CONFIG"}
with open(f"said-{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump({"world": os.environ.get("WORLD_SIZE", "1"), "arguments": sys.argv[1:], "variables": found}, file)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and a home without configuration."""
    for name in ("HF_HOME", "XDG_CACHE_HOME", "ACCELERATE_CONFIG_FILE", "STATUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path


class Started:
    """What would be started: stands for `accel_launch.launch`."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.variables: dict[str, str] = {}

    def __call__(self, words: list[str], variables: dict[str, str], *, stays: bool) -> int:
        self.words, self.variables = [word for word in words if not word.startswith("--config-file=")], variables
        return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Started:
    found = Started()
    monkeypatch.setattr(commands, "launch", found)
    return found


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100)


def said(folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"said-{rank}.json").read_text())


def test_one_process_gets_its_arguments_and_no_variable_that_was_not_asked_for(folder: Path):
    found = run("show.py", "--cpu", "--use_fsdp")
    assert (found.returncode, found.stderr) == (0, "")
    assert said(folder) == {"world": "1", "arguments": ["--cpu", "--use_fsdp"], "variables": {}}


def test_two_processes_find_the_settings_under_the_names_that_libraries_read(folder: Path):
    options = "--cpu --num-processes 2 --use_fsdp --fsdp-version=2 --fsdp_offload_params true --mixed_precision bf16"
    found = run(*options.split(), "--fsdp_transformer_layer_cls_to_wrap", "Block", "show.py")
    assert found.returncode == 0, found.stderr
    for rank in (0, 1):
        told = said(folder, rank)
        assert told["world"] == "2"
        assert (
            told["variables"].items()
            >= {
                "ACCELERATE_USE_CPU": "true",
                "ACCELERATE_USE_FSDP": "true",
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "FSDP_VERSION": "2",
                "FSDP_OFFLOAD_PARAMS": "true",
                "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
            }.items()
        )


def test_a_failure_has_the_status_of_the_script(folder: Path):
    assert run("show.py", STATUS="7").returncode == 7


def test_the_function_stays_and_raises(folder: Path, monkeypatch: pytest.MonkeyPatch):
    parse = launch_command_parser().parse_args
    launch_command(parse(["show.py", "x"]))
    assert said(folder)["arguments"] == ["x"]
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        launch_command(parse(["show.py"]))
    assert raised.value.returncode == 3
    with pytest.raises(SystemExit) as ended:
        launch_command(parse(["--quiet", "show.py"]))
    assert ended.value.code == 3


FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_processes: 4
num_machines: 2
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 1234
use_cpu: false
gpu_ids: all
debug: true
enable_cpu_affinity: true
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_cpu_ram_efficient_loading: false
parallelism_config:
  parallelism_config_dp_shard_size: 2
"""


def test_a_file_says_what_the_command_line_does_not(started: Started, folder: Path):
    (folder / "file.yaml").write_text(FILE)
    assert (
        commands.main(
            ["--config_file", "file.yaml", "--num_processes", "8", "--fsdp_offload_params=true", "s.py", "-x"]
        )
        == 0
    )
    assert started.words == [
        "--num-processes=8",
        "--num-machines=2",
        "--machine-rank=1",
        "--main-process-ip=10.0.0.1",
        "--main-process-port=1234",
        "--numa-binding=node",
        "--debug",
        "s.py",
        "-x",
    ]
    assert (
        started.variables.items()
        >= {
            "ACCELERATE_DEBUG_MODE": "true",
            "ACCELERATE_CPU_AFFINITY": "1",
            "FSDP_RESHARD_AFTER_FORWARD": "false",
            "FSDP_OFFLOAD_PARAMS": "true",
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        }.items()
    )
    assert "ACCELERATE_MIXED_PRECISION" not in started.variables


def test_the_file_in_the_cache_is_read_but_with_cpu(started: Started, folder: Path):
    place = folder / ".cache" / "huggingface" / "accelerate" / "default_config.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"distributed_type": "MULTI_CPU", "num_processes": 3, "mixed_precision": "bf16"}')
    commands.main(["s.py"])
    assert started.words == ["--cpu", "--num-processes=3", "s.py"]
    assert started.variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    commands.main(["--cpu", "s.py"])
    assert (started.words, started.variables) == (["--cpu", "s.py"], {"ACCELERATE_USE_CPU": "true"})


def test_deepspeed_megatron_compilation_and_fp8(started: Started, folder: Path):
    (folder / "ds.json").write_text("{}")
    options = "--use_deepspeed --zero_stage 2 --gradient_accumulation_steps 4 --deepspeed_config_file ds.json"
    commands.main([*options.split(), "s.py"])
    assert (
        started.variables.items()
        >= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json",
        }.items()
    )
    commands.main(["--use_megatron_lm", "--megatron_lm_tp_degree", "2", "s.py"])
    assert started.variables["MEGATRON_LM_TP_DEGREE"] == "2"
    commands.main(
        [
            "--dynamo_backend",
            "inductor",
            "--dynamo_mode",
            "max-autotune",
            "--mixed_precision",
            "fp8",
            "--fp8_backend",
            "ao",
            "s.py",
        ]
    )
    assert (
        started.variables.items()
        >= {
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "ACCELERATE_DYNAMO_MODE": "max-autotune",
            "ACCELERATE_FP8_BACKEND": "ao",
            "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
        }.items()
    )


def test_options_of_starting_are_handed_on(started: Started):
    options = "--max_restarts 2 --tee 3 --log_dir logs --gpu_ids 0,1 --rdzv_conf timeout=9,a=b -m package.module"
    commands.main(options.split())
    assert started.words == [
        "--max-restarts=2",
        "--tee=3",
        "--log-dir=logs",
        "--device-ids=0,1",
        '--rdzv-conf={"timeout": "9", "a": "b"}',
        "--module",
        "package.module",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tpu", "TPUs are not started here"),
        ("--mpirun_hostfile hosts", "mpirun --hostfile FILE accelerate launch"),
        ("--use_fsdp --use_deepspeed", "a run has one strategy"),
        ("--use_deepspeed --num_machines 2 --deepspeed_multinode_launcher pdsh", "on each machine"),
        ("--use_parallelism_config", "needs --use_fsdp"),
        ("--gpu_ids GPU-1", "Set CUDA_VISIBLE_DEVICES"),
        ("--module --no_python", "one or the other"),
        ("--env A=1", "NAME=value in front"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("started")
def test_what_would_change_the_result_is_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["launch", *options.split(), "s.py"]) == 2
    assert message in capsys.readouterr().err


def test_sagemaker_and_keys_that_nobody_knows_are_refused(
    started: Started, folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "file.yaml").write_text("distributed_type: NO\nnum_proceses: 2\n")
    assert main(["launch", "--config_file", "file.yaml", "s.py"]) == 2
    assert "does not know: num_proceses" in capsys.readouterr().err
    (folder / "file.yaml").write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: x\niam_role_name: y\n"
        "mixed_precision: fp16\nuse_cpu: false\ndebug: false\n"
    )
    assert main(["launch", "--config_file", "file.yaml", "s.py"]) == 2
    assert "type `accelerate launch` in the job" in capsys.readouterr().err
    assert not started.words


@pytest.mark.usefixtures("started")
def test_what_has_no_effect_is_said_in_one_line(capsys: pytest.CaptureFixture[str]):
    main(["launch", "--zero_stage", "2", "--same_network", "--cpu", "--num_processes", "2", "s.py"])
    assert capsys.readouterr().err.splitlines() == [
        "accelerate: --same_network has no effect: machines meet at main_process_ip.",
        "accelerate: --zero_stage: no effect without --use_deepspeed.",
        "accelerate: 2 processes are started, where Accelerate starts one. For one, give --num_processes 1.",
    ]


@pytest.mark.usefixtures("started")
def test_a_script_that_has_moved_is_told_that_it_reads_no_strategy(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "moved.py").write_text("from accel_core import Accelerator\n")
    main(["launch", "--use_fsdp", "moved.py"])
    assert "moved.py imports accel_core, which reads nothing of --use_fsdp" in capsys.readouterr().err
    main(["launch", "--mixed_precision", "bf16", "moved.py"])
    (folder / "moved.py").write_text("from accelerate import Accelerator\n")
    main(["launch", "--use_fsdp", "moved.py"])
    assert capsys.readouterr().err == ""

"""`accel plan`: the simplest way that fits is chosen, the reasons are said, and what is written can be launched."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from estimate_jobs import MODELS, batch_of, loss_of, peak_of_steps
from torch import nn

from accel_big_model import estimate_memory, init_empty_weights, plan_training
from accel_big_model.planning.command import FITS, NO_ANSWER, NOTHING_FITS, main, parser
from accel_big_model.planning.configuration import write_configuration
from accel_core import Accelerator
from accel_testing import preload, run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED

preload("torch.distributed.fsdp")

BATCH = torch.empty(64, 256, device="meta")
OFFLOADED = "fsdp, activation checkpointing, CPU offload"
SCRIPT = Path(__file__).with_name("planned_script.py")
MODEL = ["torch.nn:Linear", "--arguments", '{"in_features": 4, "out_features": 4}']


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(layers: int = 4, width: int = 256) -> nn.Module:
    with init_empty_weights():
        return nn.Sequential(*(Block(width) for _ in range(layers)))


def plan(memory: int | str, devices: int = 4, rows: int = 64, **options):
    batch = torch.empty(rows, 256, device="meta")
    return plan_training(build(), batch=batch, devices=devices, memory=memory, dtype="fp32", **options)


def peaks() -> dict[str, int]:
    """The peak of each way, simplest first."""
    return {each.name: each.estimate.peak for each in plan(1, rows=4096).considered}


def test_each_way_is_chosen_where_the_simpler_ones_do_not_fit():
    found = peaks()
    assert list(found) == [
        "ddp",
        "fsdp",
        "fsdp, activation checkpointing",
        "fsdp, activation checkpointing, CPU offload",
    ]
    assert sorted(found.values(), reverse=True) == list(found.values())
    for name, peak in found.items():
        chosen = plan(peak, rows=4096, room=0.0)
        assert chosen.chosen.name == name
        assert list(found)[: len(chosen.considered)] == [each.name for each in chosen.considered]


def test_head_room_is_left():
    peak = peaks()["ddp"]
    assert plan(peak, rows=4096, room=0.1).chosen.name == "fsdp"
    assert plan(int(peak / 0.9) + 1, rows=4096, room=0.1).chosen.name == "ddp"


def test_the_configuration_says_what_was_chosen():
    assert dict(plan("80GiB").configuration) == {"num_processes": 4, "mixed_precision": "no", "strategy": "ddp"}
    assert plan("80GiB", devices=1).configuration["strategy"] == "single"
    last = plan(peaks()["fsdp, activation checkpointing, CPU offload"], rows=4096, room=0.0)
    assert last.configuration["fsdp"] == {"activation_checkpointing": True, "cpu_offload": True}


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("bfloat16", "bf16-true"),
        ("float16", "fp16-true"),
        ("float32", "no"),
        ("no", "no"),
        ("tf32", "tf32"),
    ],
)
def test_the_configuration_has_a_precision_that_the_accelerator_takes(dtype, precision):
    found = plan_training(build(), batch=BATCH, devices=2, memory="1GiB", dtype=dtype).configuration
    assert found["mixed_precision"] == precision
    Accelerator(cpu=True, mixed_precision=precision)


def test_offloading_asks_for_main_memory_if_it_is_known():
    peak = peaks()["fsdp, activation checkpointing, CPU offload"]
    assert plan(peak, rows=4096, room=0.0, host_memory="1MiB").chosen is None
    assert plan(peak, rows=4096, room=0.0, host_memory="1GiB").chosen is not None


def test_where_nothing_fits_it_says_what_would_help():
    def tiny(rows: int, **options):
        return plan_training(build(), batch=torch.empty(rows, 256, device="meta"), dtype="fp32", **options)

    offload = tiny(4, devices=2, memory=1).considered[-1].estimate.peak
    nothing = tiny(4, devices=2, memory=offload - 1, room=0.0)
    assert nothing.chosen is None
    assert any("bf16-true" in line for line in nothing.advice)
    with pytest.raises(ValueError, match="Nothing fits, so there is no configuration"):
        print(nothing.configuration)
    crowded = tiny(8192, devices=2, memory="4MiB")
    assert any("a smaller batch or shorter rows: activations take" in line for line in crowded.advice)
    hopeless = tiny(1, devices=2, memory=1)
    assert not any("devices: fsdp" in line for line in hopeless.advice)


def test_a_model_without_blocks_is_told_to_checkpoint_inside():
    with init_empty_weights():
        model = nn.Linear(256, 256)
    found = plan_training(model, batch=BATCH, devices=2, memory=1)
    assert any("it has no repeated blocks" in line for line in found.advice)
    with pytest.raises(ValueError, match="no repeated blocks whose forward could run again"):
        estimate_memory(model, batch=BATCH, strategies=["fsdp"], activation_checkpointing=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "devices=0: expected how many accelerators train"),
        ({"room": 1.0}, r"room=1.0: expected the part of the memory"),
        ({"dtype": "int8"}, "weights that are not trained"),
        ({"batch": None}, "give --input, the shape of one row"),
        ({"memory": "much"}, "'much' is no size in bytes"),
    ],
)
def test_bad_input_is_said(options, words):
    given = {"batch": BATCH, "devices": 2, "memory": "1GiB", "dtype": "fp32", **options}
    with pytest.raises(ValueError, match=words):
        plan_training(build(), **given)


def test_the_command_writes_a_configuration_into_a_new_file(tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    known = ["--devices", "2", "--memory", "1GiB", "--input", "4", "--dtype", "fp32", "--output", str(file)]
    assert main([*MODEL, *known]) == FITS
    assert f"accel launch --config-file {file} train.py" in capsys.readouterr().out
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert lines == ["num_processes: 2", "mixed_precision: no", "strategy: ddp"]
    assert f"accel plan {shlex.join([*MODEL, *known])}" in file.read_text()  # so that it can be repeated
    assert main([*MODEL, *known]) == NO_ANSWER
    assert "exists. Give another path to --output" in capsys.readouterr().err


@pytest.mark.full(group="estimate")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "told"), [("ddp", "2 MULTI_CPU True"), (OFFLOADED, "2 FSDP True")])
def test_what_is_written_is_launched_and_trains(tmp_path, way, told):
    """The fullest configuration, and the plainest; on a CPU, where what is offloaded lies in main memory anyway."""
    pytest.importorskip("accel_launch")
    if way == OFFLOADED:
        pytest.importorskip("accel_fsdp")
    peak = {each.name: each.estimate.peak for each in plan(1, devices=2, rows=4096).considered}[way]
    chosen = plan(peak, devices=2, rows=4096, room=0.0)
    assert chosen.chosen.name == way
    write_configuration(chosen, tmp_path / "plan.yaml", "")
    launch = [sys.executable, "-m", "accel_launch", "launch", "--config-file", str(tmp_path / "plan.yaml"), str(SCRIPT)]
    ran = subprocess.run(launch, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(told) == 2


def test_the_command_prints_json_and_its_status(capsys):
    assert main([*MODEL, "--devices", "2", "--memory", "10B", "--input", "4", "--json"]) == NOTHING_FITS
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] is None
    assert told["configuration"] is None
    assert [each["name"] for each in told["considered"]] == ["ddp", "fsdp"]
    assert main([*MODEL, "--devices", "2", "--memory", "10B", "--input", "4"]) == NOTHING_FITS
    text = capsys.readouterr().out
    assert "Nothing fits. What would help:" in text
    assert "too much, the most for" in text


def test_its_options_are_completed(capsys):
    accel = pytest.importorskip("accel_launch.main").main
    assert accel(["completion", "bash"]) == 0
    text = capsys.readouterr().out
    (options,) = [line for line in text.splitlines() if line.startswith("_shtab_accel_plan_option_strings=")]
    assert "--host-memory" in options


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has accelerators, which are found")
def test_without_an_accelerator_the_command_asks_for_numbers(capsys):
    assert main([*MODEL, "--input", "4"]) == NO_ANSWER
    assert "This machine has no accelerator. Say which you mean: --devices 8 --memory 80GiB." in capsys.readouterr().err
    assert main([*MODEL, "--devices", "2", "--input", "4"]) == NO_ANSWER
    assert "How much memory a device has is not known here" in capsys.readouterr().err
    assert main([*MODEL, "--devices", "2", "--memory", "1GiB", "--batch", "0"]) == NO_ANSWER
    assert "--batch 0: expected a number of at least 1" in capsys.readouterr().err


@pytest.mark.full(group="estimate")
@pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="the system does not tell the peak of a process")
def test_activation_checkpointing_takes_what_is_estimated():
    pytest.importorskip("accel_fsdp")
    with init_empty_weights():
        model = MODELS["mlp_of_many_rows"]()
    known = {"batch": batch_of("mlp_of_many_rows"), "dtypes": ["fp32"], "strategies": ["fsdp"], "device": "cpu"}
    estimate = estimate_memory(model, world_size=2, loss=loss_of, activation_checkpointing=True, **known).rows[0]
    without = estimate_memory(model, world_size=2, loss=loss_of, **known).rows[0]
    measured = max(run_ranks(peak_of_steps, 2, "mlp_of_many_rows", "fsdp, checkpointing", "no", timeout=120.0))
    told = f"estimated {estimate.peak / 1e6:.1f} MB, without checkpointing {without.peak / 1e6:.1f}, measured {measured / 1e6:.1f}"
    print(told)
    assert estimate.peak < without.peak
    assert abs(estimate.peak - measured) < 0.1 * measured, told


def test_a_tilde_is_the_home_folder_also_behind_an_equals_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parser().parse_args(["model", "--output=~/plan.yaml"]).output == str(tmp_path / "plan.yaml")

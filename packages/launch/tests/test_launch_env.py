"""`accel env` says what a bug report needs, and gives no secret away."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from accel_core.api.launcher import HIDDEN
from accel_launch.commands.env import main


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "ACCELERATE_CONFIG_FILE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def as_json(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_is_a_block_to_paste(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert any(line.split() == ["version", torch.__version__] for line in lines)


def test_versions_of_everything_that_takes_part_are_there(capsys):
    found = as_json(capsys)
    assert found["system"]["python"].startswith(platform.python_version())
    assert {"accel-core", "accel-launch", "torch", "pluggy", "xxhash"} <= found["distributions"].keys()
    assert "gloo" in found["torch"]["backends"]
    assert len(found["devices"]) == torch.accelerator.device_count()
    assert "usable of" in found["system"]["cores"]


def test_variables_that_bear_on_a_launch_are_there_and_secrets_are_not(capsys, monkeypatch):
    channel = {
        "file": {"ACCELERATE_HUB__TOKEN": ["tell-nobody", "config.yaml"], "ACCELERATE_CPU": [True, "config.yaml"]}
    }
    given = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "NCCL_SOCKET_IFNAME": "eth0",
        "SLURM_JWT": "tell-nobody",
        "ACCELERATE_WANDB__API_KEY": "tell-nobody",
        "ACCELERATE_CONFIG": json.dumps(channel),
        "GLOO_PROXY": "http://ada:tell-nobody@proxy:80",
        "UNRELATED": "tell-nobody",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = as_json(capsys)["environment"]
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert found["NCCL_SOCKET_IFNAME"] == "eth0"
    assert found["SLURM_JWT"] == found["ACCELERATE_WANDB__API_KEY"] == HIDDEN
    assert found["GLOO_PROXY"] == "http://(hidden)@proxy:80"
    assert json.loads(found["ACCELERATE_CONFIG"])["file"]["ACCELERATE_CPU"] == [True, "config.yaml"]
    assert "UNRELATED" not in found
    main([])
    assert "tell-nobody" not in capsys.readouterr().out


def test_the_configuration_is_shown_without_secrets(capsys, home):
    file = home / "mine.yaml"
    file.write_text("num_processes: 2\nwandb:\n  api_key: tell-nobody\n  project: p\n")
    shown = as_json(capsys, "--config-file", str(file))["configuration"]
    assert shown == {"file": str(file), "num_processes": 2, "wandb": {"api_key": "(hidden)", "project": "p"}}


def test_a_configuration_that_cannot_be_read_is_not_shown(capsys, home):
    file = home / "mine.yaml"
    assert "is not there" in as_json(capsys)["configuration"]["file"]
    assert "is not there" in as_json(capsys, "--config-file", str(file))["configuration"]["file"]
    file.write_text("api_key: [tell-nobody")
    shown = as_json(capsys, "--config-file", str(file))["configuration"]
    assert shown == {"file": f"{file} (cannot be read: `accel config validate` says why)"}


def test_who_started_this_is_said(capsys, monkeypatch):
    assert as_json(capsys)["started"]["by"] == "alone"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert as_json(capsys)["started"]["by"] == "torchrun, rank 1 of 2"
    monkeypatch.setenv("RANK", "5")
    assert as_json(capsys)["started"]["by"].startswith("unclear: ")

"""No command prints a value whose name says that it is secret."""

from __future__ import annotations

import json
import os

import pytest

from accel_core.api.launcher import HIDDEN
from accel_launch.commands import config, launch

PEER = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_processes: 2
use_cpu: true
env: {WANDB_API_KEY: tell-nobody, MODE: x}
hf_token: tell-nobody
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("HF_HOME", "XDG_CACHE_HOME", "ACCELERATE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ACCELERATE_FSDP__API_KEY", "tell-nobody")  # of a component that is not chosen
    return tmp_path


@pytest.fixture
def script(home):
    (home / "script.py").write_text("")
    return str(home / "script.py")


def shown(capsys, command, *words):
    assert command.main(list(words)) == 0
    out, err = capsys.readouterr()
    assert "tell-nobody" not in out + err
    return out + err


def test_what_an_imported_file_leaves_out_is_listed_without_secrets(capsys, home, script):
    pytest.importorskip("accel_compat")  # which translates
    theirs = home / "theirs.yaml"
    theirs.write_text(PEER)
    for command, words in (
        (config, ("show", "--config-file", str(theirs))),
        (config, ("validate", str(theirs))),
        (config, ("import", "--config-file", str(home / "ours.yaml"), str(theirs))),
        (launch, ("--dry-run", "--config-file", str(theirs), script)),
    ):
        text = shown(capsys, command, *words)
        assert HIDDEN in text
        assert "MODE" in text


def test_options_are_shown_without_secrets(capsys, home, script):
    assert f"fsdp.api_key {HIDDEN}" in " ".join(shown(capsys, config, "show").split())
    listed = shown(capsys, config, "show", "--json").partition("\naccel:")[0]  # behind it stand notes
    found = {row["option"]: row["value"] for row in json.loads(listed)}
    assert found["fsdp.api_key"] == HIDDEN
    text = shown(capsys, launch, "--dry-run", script, "--api-key", "tell-nobody", "--token=tell-nobody", "--lr", "1")
    assert f"--api-key '{HIDDEN}' '--token={HIDDEN}' --lr 1" in text
    assert os.environ["ACCELERATE_FSDP__API_KEY"] == "tell-nobody", "what runs gets it"

"""`accel merge-weights` turns a checkpoint of any strategy into plain safetensors. What it reads and writes is tested with the core."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from accel_core import Accelerator, load_checkpoint_in_model
from accel_launch.main import main
from accel_testing import run_ranks


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def seeded(seed=0):
    torch.manual_seed(seed)
    return Tied()


def save(folder, strategy=None, models=1):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    accelerator.prepare(*(seeded(number) for number in range(models)))
    accelerator.save_state(folder)
    accelerator.free_memory()


def test_what_two_ranks_saved_in_shards_is_read_by_any_library(tmp_path, capsys):
    pytest.importorskip("accel_fsdp", reason="accel-fsdp, which cuts models into shards, is not installed")
    run_ranks(save, 2, tmp_path / "saved", "fsdp")
    assert main(["merge-weights", str(tmp_path / "saved"), str(tmp_path / "out"), "--max-shard-size", "200B"]) == 0
    told = capsys.readouterr().out.splitlines(keepends=True)[-1]  # behind what the ranks have printed
    assert re.fullmatch(r"3 tensors, \d+ bytes, 1 more names of tied ones: .*index\.json and \d parts\n", told), told
    assert main(["merge-weights", str(tmp_path / "out"), str(tmp_path / "one")]) == 0  # parts are put together, too
    plain = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    expected = seeded().state_dict()
    assert {"embed.weight", "body.weight", "body.bias"} == plain.keys()
    assert all(torch.equal(plain[name], expected[name]) for name in plain)
    for folder in ("one", "out"):
        model = seeded(9)
        load_checkpoint_in_model(model, tmp_path / folder)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_done_is_said_with_status_2(tmp_path, capsys):
    save(tmp_path / "saved", models=2)
    source, target = str(tmp_path / "saved"), str(tmp_path / "out")
    assert main(["merge-weights", source, target]) == 2
    assert re.search(r"this checkpoint has 2: .*Choose one .*model=0\) \(--model 0\)", capsys.readouterr().err)
    assert main(["merge-weights", source, target, "--model", "1"]) == 0
    assert main(["merge-weights", source, target, "--model", "0"]) == 2
    assert "holds weights already: model.safetensors" in capsys.readouterr().err
    assert main(["merge-weights", source, target, "--model", "0", "--force"]) == 0
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["body.weight"], seeded().body.weight)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_sees_how_far_it_is_and_a_file_does_not(tmp_path):
    import pty

    save(tmp_path / "saved")
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "accel_launch", "merge-weights", str(tmp_path / "saved"), str(tmp_path / "out")]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=environment, text=True)
    os.close(follower)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "\x1b" not in out
    assert out.startswith("3 tensors, ")
    assert b"bytes" in os.read(leader, 1 << 16)
    os.close(leader)

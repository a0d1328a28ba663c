"""Who starts the processes learns what one of them failed with, and whether that only follows from another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.processes import failure_output

JOB = """
import torch
from accel_core import Accelerator

accelerator = Accelerator()
if accelerator.process_index == 1:
    raise ValueError("one is wrong")
accelerator.gather(torch.ones(1))
"""


def told(file: Path) -> tuple[str, bool]:
    message = json.loads(file.read_text(encoding="utf-8"))["message"]
    assert "Traceback (most recent call last)" in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["timestamp"] == str(int(message["extraInfo"]["time"]))
    return message["message"], message["extraInfo"]["follows"]


@pytest.mark.timeout(90)
def test_the_rank_that_failed_says_what_and_the_others_that_they_follow(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB, encoding="utf-8")
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29371"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env=os.environ
            | environment
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), failure_output.VARIABLE: str(tmp_path / f"{rank}.json")},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert all(rank.wait(timeout=60) != 0 for rank in ranks)
    assert told(tmp_path / "1.json") == ("ValueError: one is wrong", False)
    assert told(tmp_path / "0.json")[1]


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "message"), [(AssertionError(), "AssertionError"), (Speechless(), "Speechless: <exception str() failed>")]
)
def test_an_error_without_words_is_named(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failure_output.VARIABLE, str(tmp_path / "error.json"))
    failure_output.leave(error, follows=False)
    written = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))
    assert written["message"]["message"].endswith(message)


def test_what_is_written_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    file.write_text("theirs", encoding="utf-8")
    monkeypatch.setenv(failure_output.VARIABLE, str(file))
    failure_output.leave(ValueError("ours"), follows=False)
    assert file.read_text(encoding="utf-8") == "theirs"


def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(failure_output.VARIABLE, str(tmp_path / "missing" / "error.json"))
    failure_output.leave(ValueError("ours"), follows=False)
    assert "could not be written: [Errno 2]" in capsys.readouterr().err


def test_nothing_is_written_where_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failure_output.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    failure_output.leave(ValueError("ours"), follows=False)
    assert not list(tmp_path.iterdir())

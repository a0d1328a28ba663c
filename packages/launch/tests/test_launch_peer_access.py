"""Copies between GPUs are tried where nothing is lost if they hang, and what came of each is told."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from accel_core.api.launcher import Place
from accel_launch.checking import doctor_job, peer_access
from accel_launch.checking.peer_access import Trial, begin, tried

pytestmark = pytest.mark.timeout(90)

PAIRS = """
import sys, time
print("0 to 1: begun")
print("0 to 1: 21.5 GB/s")
print("1 to 0: begun")
print("1 to 0: wrong")
"""


def trial(program: str) -> Trial:
    return Trial([sys.executable, "-c", program])


def test_pairs_are_told_apart():
    found = trial(PAIRS).result(time.monotonic() + 30)
    assert found == {"GB/s": {"0 to 1": 21.5}, "wrong": ["1 to 0"]}


def test_a_copy_that_hangs_is_named_and_its_process_killed():
    hanging = trial(PAIRS + "print('0 to 2: begun', flush=True); time.sleep(600)")
    deadline = time.monotonic() + 30
    while "0 to 2" not in os.pread(hanging._printed.fileno(), 1000, 0).decode():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert hanging.result(time.monotonic())["stuck"] == "0 to 2"
    assert hanging._process.poll() is not None


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (PAIRS + "raise SystemExit('CUDA error: all devices are busy')", "CUDA error: all devices are busy"),
        ("raise SystemExit(3)", "it did not begin in time"),
    ],
)
def test_a_trial_that_fails_says_why(program, error):
    assert trial(program).result(time.monotonic() + 30)["error"] == error


def test_a_trial_without_time_says_so():
    assert trial("import time; time.sleep(600)").result(time.monotonic()) == {
        "GB/s": {},
        "wrong": [],
        "error": "it did not begin in time",
    }


class Sent:
    """Numbers on a device of the stand-in, of which one connection brings others."""

    def __init__(self, values: torch.Tensor, device: str) -> None:
        self.values, self.device = values, device

    def to(self, device: str) -> Sent:
        return Sent(self.values + 1 if (self.device, device) == ("cuda:1", "cuda:0") else self.values, device)

    def cpu(self) -> torch.Tensor:
        return self.values


def test_each_pair_that_claims_to_is_tried_before_it_is_told(monkeypatch):
    module = SimpleNamespace(
        __name__="torch.cuda",
        synchronize=lambda device: None,
        can_device_access_peer=lambda source, target: 2 not in (source, target),
    )
    numbers = torch.arange(8)
    monkeypatch.setattr(
        torch, "arange", lambda count: SimpleNamespace(to=lambda device: Sent(numbers, device), values=numbers)
    )
    monkeypatch.setattr(torch, "equal", lambda found, expected: bool((found == expected.values).all()))
    told = list(tried(module, 3, 64))
    assert [text.rpartition(" ")[0] if "GB/s" not in text else text.partition(": ")[0] for text in told] == [
        "0 to 1:",
        "0 to 1",
        "1 to 0:",
        "1 to 0:",
    ]
    assert (told[0], told[1].endswith(" GB/s"), told[3]) == ("0 to 1: begun", True, "1 to 0: wrong")


@pytest.mark.parametrize(("device", "count", "begins"), [(None, 0, False), ("cuda", 1, False), ("cuda", 2, True)])
def test_a_trial_takes_two_gpus_that_the_process_sees(monkeypatch, device, count, begins):
    current = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(peer_access, "Trial", lambda: "begun")
    assert begin() == ("begun" if begins else None)


def test_the_examination_of_a_machine_has_what_its_trial_found(monkeypatch, capsys):
    """Alone, for a driver that hangs does so in a process with two GPUs, too."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor_job, "read_place", lambda environ: Place())
    monkeypatch.setattr(peer_access, "begin", lambda: trial(PAIRS))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    reports = []
    monkeypatch.setattr(doctor_job, "_conclude", lambda found, place, output: not reports.extend(found))
    monkeypatch.setattr(doctor_job.verdict, "leave", lambda options, is_good: 0)
    arguments = ["--patience", "30", "--verdict", "-", "--launcher", "0"]
    assert doctor_job.main(arguments) == 0
    assert reports[0]["peers"] == {"GB/s": {"0 to 1": 21.5}, "wrong": ["1 to 0"]}

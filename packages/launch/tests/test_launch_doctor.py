"""`accel doctor` names what keeps processes apart, whatever gets stuck, and says what to do."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from torch.distributed import PrefixStore

from accel_core import NotInstalledError
from accel_core.api.component import how_to_install
from accel_core.api.launcher import Place, find
from accel_launch.checking import doctor_doors, doctor_facts, doctor_findings, doctor_job
from accel_launch.checking.doctor_findings import examine
from accel_launch.commands import doctor
from accel_launch.commands.doctor import main
from accel_testing import run_ranks

pytestmark = pytest.mark.timeout(90)


def report(rank: int, machine: int = 0, **told: Any) -> dict[str, Any]:
    """Of a rank that found nothing wrong."""
    found = {
        "rank": rank,
        "machine": machine,
        "local rank": 0,
        "host": f"node{machine}",
        "pid": 100 + rank,
        "addresses": [f"10.0.0.{machine + 1}", "127.0.0.1"],
        "host resolves to": [f"10.0.0.{machine + 1}"],
        "interface": "",
        "versions": {"python": "3.12.1", "torch": "2.13.0", "accel-core": "0.1.0"},
        "variables": {"OMP_NUM_THREADS": "1"},
        "driver": "580.65.06",
        "shared memory": 8 << 30,
        "open files": 65536,
        "doors": {str(1 - rank): {"ms": 0.4}},
        "gathered": 0.1,
        "group": {
            "device": "cpu",
            "met": 0.2,
            "sum": 3.0,
            "expected": 3.0,
            "took": 0.01,
        },
    }
    return {**found, **told}


APART = """
import os
from accel_launch.checking.doctor_job import _output_apart

with _output_apart() as output:
    os.write(1, b"what gloo says\\n")
    print("and a library")
    output.write("{}")
print("afterwards")
"""


def test_json_has_standard_output_for_itself():
    ended = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "{}afterwards\n", ended.stderr
    assert ended.stderr == "what gloo says\nand a library\n"


def test_two_processes_are_examined_for_real(tmp_path, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    command = [sys.executable, "-m", "accel_launch", "doctor", "--num-processes", "2", "--cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["healthy"] is True
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    for rank, each in enumerate(found["ranks"]):
        other = str(1 - rank)
        assert each["machine"] == 0
        assert each["group"]["sum"] == each["group"]["expected"] == 3
        assert 0 < each["doors"][other]["ms"] < 1000
        assert "step" not in each
        assert each["group"]["GB/s"] > 0
        assert {"python", "torch", "accel-core", "accel-launch"} <= each["versions"].keys()


def examine_beside_a_rank_that_stands_still(moments: tuple[str, ...]) -> int:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    if os.environ["RANK"] == "1":
        write = PrefixStore.set

        def write_late(store: PrefixStore, name: str, value: str) -> None:
            if name.startswith(moments):
                time.sleep(6)
            write(store, name, value)

        PrefixStore.set = write_late  # type: ignore[method-assign]
    return doctor_job._examine_rank(argparse.Namespace(patience=60.0, launcher=os.getpid()), None)


def test_a_rank_that_stands_still_for_seconds_is_waited_for():
    """Before it hands its report in, and before it says that it has read the verdict, for which rank 0 keeps the store."""
    assert run_ranks(examine_beside_a_rank_that_stands_still, 2, ("report", "read"), timeout=80) == [0, 0]


def test_healthy_reports_have_no_findings_and_make_a_page(capsys):
    reports = [report(0), report(1, machine=1)]
    assert examine(reports, 2) == []
    doctor_findings.print_page(reports, [], 2)
    page = capsys.readouterr().out
    assert page.splitlines()[-1] == "✓ 2 processes on 2 machines: all met, and all reach each other."
    assert [line.split() for line in page.splitlines() if line.startswith(("0     1 ", "1     0 "))][-1][-2:] == [
        "0.400",
        "ms",
    ]
    assert "node1" in page
    assert "10.0.0.2, 127.0.0.1" in page


CASES = {
    "missing": ([report(0)], True, "No report came from rank 1.", "killed"),
    "closed": (
        [report(0, doors={"1": {"error": "timed out", "at": "10.0.0.2:4711"}}), report(1, machine=1)],
        True,
        "Rank 0 (machine 0, node0) does not reach rank 1 at 10.0.0.2:4711: timed out.",
        "firewall",
    ),
    "stuck": (
        [report(0), report(1, machine=1, stuck="a sum over all ranks")],
        True,
        "Rank 1 (machine 1, node1) was stuck in a sum over all ranks.",
        "NCCL_DEBUG=INFO",
    ),
    "error": (
        [report(0), report(1, step="meeting the others", error="WorldError: no")],
        True,
        "Rank 1 (machine 0, node0) failed in meeting the others: WorldError: no",
        "failed first counts",
    ),
    "wrong": (
        [report(0), report(1, group={"device": "cpu", "met": 1, "sum": 2.0, "expected": 3.0})],
        True,
        "Rank 1 (machine 0, node0) got 2.0 as the sum over all ranks, which is 3.0.",
        "vendor",
    ),
    "device": (
        [report(rank, group={"device": "cuda:0 H100", "met": 1}) for rank in range(2)],
        True,
        "ranks 0–1 share cuda:0 H100 of machine 0.",
        "one process for each device",
    ),
    "versions": (
        [report(0), report(1, machine=1, versions={"python": "3.12.1", "torch": "2.14.0", "accel-core": "0.1.0"})],
        True,
        "torch differs between the machines: 2.13.0 on machine 0, 2.14.0 on machine 1.",
        "Install the same",
    ),
    "loopback": (
        [report(0), report(1, machine=1, **{"host resolves to": ["127.0.1.1"]})],
        True,
        (
            "The name of machine 1, node1, resolves to 127.0.1.1, where no other machine reaches it, and gloo takes its address "
            "from that name."
        ),
        "GLOO_SOCKET_IFNAME",
    ),
    "name": (
        [report(0), report(1, machine=1, **{"host resolves to": []})],
        False,
        "The name of machine 1, node1, does not resolve to an address.",
        "/etc/hosts there: 10.0.0.2 node1",
    ),
    "variables": (
        [report(0), report(1, machine=1, variables={"NCCL_IB_DISABLE": "1", "OMP_NUM_THREADS": "1"})],
        False,
        "NCCL_IB_DISABLE differs between the machines: not set on machine 0, 1 on machine 1.",
        "Set it alike",
    ),
    "memory": (
        [report(0, **{"shared memory": 64 << 20}), report(1)],
        False,
        "Machine 0 (node0) has 64 MiB of shared memory free (/dev/shm); workers of loaders pass batches through it.",
        "--shm-size",
    ),
    "peers that hang": (
        [report(0, peers={"GB/s": {"0 to 1": 20.0}, "wrong": [], "stuck": "1 to 0"}), report(1)],
        True,
        (
            "The driver of machine 0 (node0) says that GPUs reach each other's memory, and a copy from 1 to 0 did not end."
        ),
        "NCCL_P2P_DISABLE=1",
    ),
    "peers that bring something else": (
        [report(0, peers={"GB/s": {}, "wrong": ["0 to 1"]}), report(1)],
        True,
        "The driver of machine 0 (node0) says that GPUs reach each other's memory, and a copy from 0 to 1 brought other values.",
        "NCCL_P2P_DISABLE=1",
    ),
    "peers that NCCL leaves alone": (
        [report(0, variables={"NCCL_P2P_DISABLE": "1"}, peers={"GB/s": {}, "wrong": [], "stuck": "0 to 1"}), report(1)],
        False,
        "The driver of machine 0 (node0) says that GPUs reach each other's memory, and a copy from 0 to 1 did not end.",
        "NCCL_P2P_DISABLE=1",
    ),
    "peers that were not tried": (
        [report(0, peers={"GB/s": {}, "wrong": [], "error": "CUDA error: all devices are busy"}), report(1)],
        False,
        "Copies between the GPUs of machine 0 (node0) could not be tried: CUDA error: all devices are busy",
        "it means nothing",
    ),
    "models": (
        [
            report(rank, group={"device": f"cuda:{rank}", "model": f"H{rank + 1}00, 79 GiB", "met": 1})
            for rank in (0, 1)
        ],
        False,
        "Not all devices are alike: H100, 79 GiB: rank 0; H200, 79 GiB: rank 1.",
        "as the slowest",
    ),
    "drivers": (
        [report(0), report(1, machine=1, driver="550.54")],
        False,
        "The drivers differ: 580.65.06 on machine 0, 550.54 on machine 1.",
        "Install the same",
    ),
    "files": (
        [report(0), report(1, machine=1, **{"open files": 1024})],
        False,
        "A process of machine 1 (node1) may open 1024 files.",
        "ulimit -n 65536",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_finding_says_what_and_what_to_do(case, capsys):
    reports, is_problem, text, advice = CASES[case]
    (finding,) = examine(reports, 2)
    assert (finding.is_problem, finding.text) == (is_problem, text)
    assert advice in finding.advice
    doctor_findings.print_page(reports, [finding], 2)
    page = capsys.readouterr().out
    assert f"{'✗' if is_problem else '!'} {text}\n    {finding.advice}\n" in page
    assert page.rstrip().endswith("1 problem, see above." if is_problem else "all reach each other, 1 remark above.")
    assert doctor_findings.as_json(reports, [finding])["healthy"] is not is_problem


def test_problems_stand_before_remarks():
    reports = [report(0, **{"open files": 1024}, stuck="the end"), report(1)]
    assert [finding.is_problem for finding in examine(reports, 2)] == [True, False]


def test_a_door_that_is_closed_or_never_answers_is_named_in_time(monkeypatch):
    monkeypatch.setattr(doctor_doors, "PATIENCE", 0.3)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    keeper = doctor_doors.DoorKeeper("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        doors = {
            1: keeper.door,
            2: doctor_doors.Door("127.0.0.1", mute.getsockname()[1]),
            3: doctor_doors.Door("127.0.0.1", closed.getsockname()[1]),
            4: doctor_doors.Door("no.such.host.invalid", 1),
        }
        start = time.monotonic()
        found = doctor_doors.knock(doors)
        assert time.monotonic() - start < 20
    keeper.close()
    assert found[1]["ms"] > 0
    assert found[2] == {"error": "timed out", "at": f"127.0.0.1:{doors[2].port}"}
    assert "refused" in found[3]["error"]
    assert found[4]["error"]


def test_the_address_is_that_of_the_interface_that_gloo_was_told(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor_doors.bound_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    assert doctor_doors.bound_address() is None


def test_what_is_stuck_is_reported_with_the_step_in_which_it_is():
    found: dict[str, Any] = {}

    released = threading.Event()

    def examination() -> None:
        found["step"] = "a sum over all ranks"
        released.wait(20)

    start = time.monotonic()
    doctor_job._examine_in_time(found, examination, 0.1)
    assert time.monotonic() - start < 5
    released.set()
    assert found["stuck"] == "a sum over all ranks"

    def failing() -> None:
        raise ValueError("no such host")

    failed: dict[str, Any] = {}
    doctor_job._examine_in_time(failed, failing, 5)
    assert failed == {"step": "the beginning", "error": "ValueError: no such host"}


def test_facts_are_those_of_this_machine_and_hide_secrets(monkeypatch):
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "12345")
    monkeypatch.setenv("RANK", "0")
    found = json.loads(json.dumps(doctor_facts.facts(Place())))
    assert found["host"] == socket.gethostname()
    assert found["pid"] == os.getpid()
    assert "12345" not in json.dumps(found)
    assert "NCCL_SECRET_TOKEN" in found["variables"]
    assert "RANK" not in found["variables"]
    assert examine([found | {"host resolves to": ["10.0.0.1"], "shared memory": None, "open files": None}], 1) == []
    assert doctor_findings.SHARED_MEMORY > 0


@pytest.mark.parametrize(
    ("path", "text", "version"),
    [
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 12.2.0\n",
            "550.54.15",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            "580.65.06",
        ),
        ("sys/module/amdgpu/version", "6.12.12\n", "6.12.12"),
        ("another", "1", ""),
    ],
)
def test_the_version_of_the_driver_is_what_the_kernel_says(tmp_path, path, text, version):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert doctor_facts._driver(tmp_path) == version


def test_the_page_tells_how_fast_ranks_send_and_gpus_copy(capsys):
    peers = {"GB/s": {"0 to 1": 21.5, "1 to 0": 12.25}, "wrong": []}
    reports = [report(rank) for rank in (0, 1)]
    reports[0]["peers"] = peers
    for each, speed in zip(reports, (1.5, 1.25), strict=True):
        each["group"] |= {"GB/s": speed}
    doctor_findings.print_page(reports, [], 2)
    page = capsys.readouterr().out
    assert "In a sum of 16 MiB over all ranks, each sends 1.25 GB/s.\n" in page
    assert "Between the GPUs of machine 0, copies take 12.2 (from 1 to 0) to 21.5 GB/s.\n" in page


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_patience_is_a_number_of_seconds(text):
    with pytest.raises(ValueError, match=rf"--patience {text} was given, which is no number of seconds.*--patience 60"):
        main(["--patience", text])


def test_a_program_is_not_what_a_doctor_takes():
    with pytest.raises(ValueError, match=r"train\.sh was given.*accel launch starts yours"):
        main(["train.sh"])


def test_a_script_is_handed_to_the_command_that_checks_scripts(monkeypatch):
    asked = []

    class Offer:
        def load(self):
            return lambda words: asked.append(words) or 1

    monkeypatch.setattr(doctor, "find", lambda group, name: Offer())
    assert doctor.main(["--json", "train.py"]) == 1
    assert asked == [["--json", "train.py"]]


def test_without_that_command_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor, "find", lambda group, name: find(group, name, []))
    with pytest.raises(NotInstalledError, match=how_to_install("accel-compat")):
        doctor.main(["train.py"])

"""`accel launch` on two machines: they are network namespaces with a virtual cable between them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machines_job
import pytest
from namespaces import FILES, Machine, two_machines, why_not
from safetensors.torch import load_file

from accel_testing import run_ranks

pytestmark = pytest.mark.timeout(240)  # seconds; it takes a tenth of them where nothing else runs
PORT = 29511


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    reason = why_not()
    if reason:
        pytest.skip(f"two machines need network namespaces: {reason}")
    with two_machines() as both:
        yield both


class Site:
    """Where launchers are started, and what they have printed: a file for each."""

    def __init__(self, zero: Machine, folder: Path) -> None:
        self.zero, self.folder = zero, folder
        self.started: list[subprocess.Popen] = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "GLOO_"))}
        self.env |= {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder), "HF_HOME": str(folder)}

    def launch(
        self, machine: Machine, rank: int, name: str, *arguments: str, command: str = "launch"
    ) -> subprocess.Popen:
        options = (
            f"--num-machines 2 --machine-rank {rank} --main-process-ip {self.zero.address} --main-process-port {PORT}"
        )
        line = [sys.executable, "-m", "accel_launch", command, *options.split(), *arguments]
        self.started.append(machine.start(line, self.folder / name, self.env))
        return self.started[-1]

    def said(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def site(machines, tmp_path) -> Iterator[Site]:
    here = Site(machines[0], tmp_path)
    yield here
    for machine in machines:
        machine.lose_power()
    for each in here.started:
        each.wait(5)


def eventually(condition: Callable[[], object], within: float, show: Callable[[], str]) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, show()
        time.sleep(0.02)


@pytest.mark.full
def test_two_machines_train_as_one_does_although_one_loses_power_and_comes_back(machines, site):
    _zero, one = machines
    job = [str(Path(machines_job.__file__)), str(site.folder), "0.1"]
    options = ["--num-processes", "4", "--cpu", "--max-restarts", "1"]
    running = [site.launch(machine, rank, str(rank), *options, *job) for rank, machine in enumerate(machines)]
    everything = lambda: f"{site.said('0')}\n----\n{site.said('1')}\n----\n{site.said('again')}"
    saved = site.folder / "checkpoints" / "checkpoint_2"
    eventually(lambda: saved.exists() or any(each.poll() for each in running), 60, everything)
    assert saved.exists(), everything()
    one.lose_power()
    running[1].wait(5)
    running[1] = site.launch(one, 1, "again", *options, *job)
    statuses = [each.wait(90) for each in running]
    assert statuses == [0, 0], everything()
    lines = re.findall(r"rank (\d) of 4 made the steps (\d+) to 16", site.said("0") + site.said("again"))
    assert sorted(rank for rank, _ in lines) == ["0", "1", "2", "3"], everything()
    assert len({first for _, first in lines}) == 1
    assert int(lines[0][1]) >= 2 * machines_job.EVERY, "they went on from a checkpoint"
    assert "made the steps" not in site.said("1")

    alone = site.folder / "one machine"
    alone.mkdir()
    run_ranks(machines_job.train, 4, alone, timeout=60)
    trained, expected = load_file(site.folder / "trained.safetensors"), load_file(alone / "trained.safetensors")
    assert trained.keys() == expected.keys()
    assert all(trained[name].equal(expected[name]) for name in expected)


def test_a_second_machine_0_ends_both_at_once(machines, site):
    zero, one = machines
    program = ["--num-processes", "2", "--cpu", "--no-python", "sleep", "60"]
    first = site.launch(zero, 0, "first", *program)
    eventually(lambda: _listens(zero), 20, lambda: site.said("first"))
    start = time.monotonic()
    second = site.launch(one, 0, "second", *program)
    assert [first.wait(20), second.wait(20)] == [1, 1]
    assert time.monotonic() - start < 15, (
        "most of it is the start of Python; the meeting itself takes less than a second"
    )
    for name in ("first", "second"):
        assert "accel launch: Machine rank 0 of 2 was claimed twice: by machine 0 (" in site.said(name)
        assert "Traceback" not in site.said(name)


def test_a_newcomer_is_refused_and_without_machine_0_the_other_ends_and_says_so(machines, site):
    zero, one = machines
    started = site.folder / "started"
    program = ["--num-processes", "2", "--cpu", "--no-python", "sh", "-c", f"echo >> {started}; exec sleep 60"]
    first = site.launch(zero, 0, "zero", *program)
    second = site.launch(one, 1, "one", *program)
    eventually(
        lambda: started.exists() and started.read_text() == "\n\n", 30, lambda: site.said("zero") + site.said("one")
    )
    stray = site.launch(one, 1, "stray", *program)
    assert stray.wait(20) == 1
    assert "Machine rank 1 of 2 was claimed twice" in site.said("stray")
    assert "The run that had begun goes on." in site.said("stray")
    assert [first.poll(), second.poll()] == [None, None]
    zero.lose_power()
    start = time.monotonic()
    assert second.wait(20) == 1
    assert time.monotonic() - start < 10
    assert f"that meet at {zero.address}:{PORT}, but machine 0, which keeps the meeting point, is gone" in site.said(
        "one"
    )
    assert not one.pids(), "the processes have ended too"


def _listens(machine: Machine) -> bool:
    table = subprocess.run(
        ["ip", "netns", "exec", machine.name, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    return any(f":{PORT:04X} " in line and " 0A " in line for line in table.stdout.splitlines())


def test_the_doctor_names_the_pairs_that_do_not_reach_each_other(machines, site):
    """Machine 1 is told to use an interface that no other machine reaches."""
    options = ["--num-processes", "2", "--cpu"]
    site.env["GLOO_SOCKET_IFNAME"] = "lo"
    second = site.launch(machines[1], 1, "one", *options, command="doctor")
    del site.env["GLOO_SOCKET_IFNAME"]
    first = site.launch(machines[0], 0, "zero", *options, command="doctor")
    assert [first.wait(60), second.wait(20)] == [1, 1], site.said("zero") + site.said("one")
    page = site.said("zero")
    assert re.search(r"✗ Rank 0 \(machine 0, \S+\) does not reach rank 1 at 127\.0\.0\.1:\d+: ", page), page
    assert re.search(r"\n1 +0 +\d+\.\d+ ms\n", page), "the other way is open"
    assert f"{machines[1].address}, 127.0.0.1" in page
    assert page.rstrip().endswith("✗ 2 processes on 2 machines: 1 problem, see above."), page


TALK = """
from accel_core import Accelerator
import torch
accelerator = Accelerator(cpu=True)
print("heard", accelerator.gather(torch.tensor([accelerator.process_index])).tolist(), flush=True)
accelerator.end_training()
"""


def test_ranks_of_another_launcher_talk_by_the_interface_that_joins_them(machines, site):
    """Each machine takes its own name for its loopback, as Debian does; gloo alone would listen there."""
    outputs = []
    for rank, machine in enumerate(machines):
        hosts = FILES / machine.name / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env = {**site.env, **place, "MASTER_ADDR": site.zero.address, "MASTER_PORT": str(PORT + 1)}
        site.started.append(machine.start([sys.executable, "-c", TALK], site.folder / f"talk {rank}", env))
        outputs.append(f"talk {rank}")
    everything = lambda: "\n----\n".join(map(site.said, outputs))
    try:
        assert [each.wait(60) for each in site.started] == [0, 0], everything()
        assert all("heard [0, 1]" in site.said(each) for each in outputs), everything()
    finally:
        for machine in machines:
            (FILES / machine.name / "hosts").unlink()

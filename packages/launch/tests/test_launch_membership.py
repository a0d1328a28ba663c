"""Launchers of several machines, all on this one: a machine that comes late takes part, and one that stands still for seconds is not lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from start_many import HERE

from accel_launch.starting import meeting_store

pytestmark = pytest.mark.timeout(180)  # on a busy machine launchers take long to start

MACHINES: dict[str, Any] = {"num_machines": 2, "num_processes": 2, "main_process_ip": "127.0.0.1"}
WAITS = "echo; until [ -e {folder}/end-$RANK ]; do sleep 0.05; done; touch {folder}/ended-$RANK"


class Launchers:
    """Launchers that are killed at the end of a test, if they still run."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("", 0)) as server:
            self.port = server.getsockname()[1]
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def start(self, command: str, **options: Any) -> subprocess.Popen[str]:
        """A launcher whose ranks execute a command of the shell."""
        given = json.dumps({**MACHINES, "main_process_port": self.port, **options})
        program = ["sh", "-c", command.format(folder=self.folder)]
        self.running.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "start_driver.py"), given, *program],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self.running[-1]


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    made = Launchers(tmp_path)
    yield made
    for each in made.running:
        each.kill()
        each.communicate(timeout=10)


def read_line(launcher: subprocess.Popen[str]) -> str:
    assert launcher.stdout is not None
    return launcher.stdout.readline()


def test_machine_that_joins_a_run_without_restarts_takes_part(launchers: Launchers) -> None:
    command = "echo $WORLD_SIZE; [ $WORLD_SIZE = 2 ] || exec sleep 60"
    options = {"rdzv_backend": "c10d", "min_machines": 1, "rdzv_conf": {"last_call_timeout": "1"}}
    first = launchers.start(command, **options, tee="1", log_dir=str(launchers.folder))
    assert read_line(first).startswith("accel launch: the ranks' output is written to files")
    assert read_line(first) == "[rank0]:1\n"
    second = launchers.start(command, **options)
    told = [each.communicate(timeout=90)[0] for each in (first, second)]
    assert re.fullmatch(r"\[rank[01]\]:2\n", told[0])
    assert told[1] == "2\n"
    assert [first.returncode, second.returncode] == [0, 0]
    logs = {path.parts[-3]: path.read_text() for path in launchers.folder.glob("*/attempt_*/0/stdout.log")}
    assert logs == {"attempt_0": "1\n", "attempt_1": "2\n"}, "what ran before the machine came is kept"


def test_machine_that_stands_still_at_the_end_is_waited_for_and_its_ranks_finish(launchers: Launchers) -> None:
    zero, one = (launchers.start(WAITS, machine_rank=rank) for rank in (0, 1))
    assert [read_line(zero), read_line(one)] == ["\n", "\n"]
    os.kill(one.pid, signal.SIGSTOP)
    (launchers.folder / "end-0").touch()
    with pytest.raises(subprocess.TimeoutExpired):
        zero.wait(2 * meeting_store.SILENCE + 2)
    os.kill(one.pid, signal.SIGCONT)
    time.sleep(1.0)  # it hears of machine 0 again
    (launchers.folder / "end-1").touch()
    assert one.communicate(timeout=60)[0] == ""
    assert zero.communicate(timeout=60)[0] == "accel launch: this machine has finished, and waits for machine 1\n"
    assert [zero.returncode, one.returncode] == [0, 0]
    assert (launchers.folder / "ended-1").exists()

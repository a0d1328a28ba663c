"""Where a process is, and at which line its threads stand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from accel_core.processes.watch.rank_status import Entry, RankStatus
from accel_core.processes.watch.stack_location import Process, calling_line, position_of


def until(process: Process, state: str) -> str:
    deadline = time.monotonic() + 10
    while process.state() != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.state()


def test_process_is_seen_running_stopped_and_gone() -> None:
    code = "import sys; from accel_core.processes.watch.stack_location import Process as P; import json; print(json.dumps(P.current()), flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        import json

        assert child.stdout is not None
        process = Process(*json.loads(child.stdout.readline()))
        assert process.pid == child.pid
        assert process.state() == "running"
        os.kill(child.pid, signal.SIGSTOP)
        assert until(process, "stopped") == "stopped"
        os.kill(child.pid, signal.SIGKILL)
        assert until(process, "gone") == "gone", "a zombie will not answer either"
    finally:
        child.kill()
        child.communicate()
    assert process.state() == "gone"
    assert f"process {process.pid} on " in str(process)


def test_number_that_was_given_again_is_another_process() -> None:
    mine = Process.current()
    assert mine.state() == "running"
    assert mine._replace(started="1").state() == "gone"


def test_process_of_another_machine_is_unknown() -> None:
    assert Process.current()._replace(machine="elsewhere").state() == "unknown"


def test_line_is_the_users_and_not_the_machinerys() -> None:
    def called_from_torch(line: list[str]) -> torch.Tensor:
        line.append(calling_line())
        return torch.ones(1)

    found: list[str] = []
    torch.func.vmap(lambda x: called_from_torch(found) + x)(torch.ones(2))
    assert "test_stack_location.py, line" in found[0]
    assert "in called_from_torch: line.append(calling_line())" in found[0]


def wait_here(entered: threading.Event, leave: threading.Event) -> None:
    entered.set()
    leave.wait()


def test_thread_stands_at_the_line_that_waits() -> None:
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(entered, leave))
    thread.start()
    assert entered.wait(10)
    try:
        position = position_of(thread.ident or 0)
        assert position is not None
        assert "in wait_here" in position.line
        assert (position.meeting, position.differentiates) == ("", False)
    finally:
        leave.set()
        thread.join()
    assert position_of(thread.ident or 0) is None


def test_thread_that_computes_inside_of_a_collective_does_not_wait_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = [100.0], [0.0]
    monkeypatch.setattr("accel_core.processes.watch.rank_status.time.monotonic", lambda: now[0])
    monkeypatch.setattr("accel_core.processes.watch.rank_status.time.process_time", lambda: used[0])
    status = RankStatus(3)
    status.inside[threading.get_ident()] = Entry("backward()")
    status.report()
    for computes, seconds in [(1.0, 0.0), (0.0, 1.5), (1.0, 0.0)]:
        now[0] += 1.5
        used[0] += computes
        assert status.report().calls[0].seconds == seconds


def test_rank_is_free_as_long_as_one_thread_that_takes_part_is_in_no_collective() -> None:
    status, entered, leave = RankStatus(3), threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(entered, leave))
    thread.start()
    assert entered.wait(10)
    try:
        status.inside[threading.get_ident()] = Entry("gather()")
        assert not status.report().free, "the other thread has taken part in nothing"
        assert status.goes_on() is False
        status.inside[thread.ident or 0] = None
        assert status.report().free
        assert status.goes_on() is True
    finally:
        leave.set()
        thread.join()
    assert not status.report().free, "it has ended"
    assert len(status.inside) == 1


def entry(name: str, *members: int) -> Entry:
    return Entry(name, members)


def test_status_counts_how_long_a_thread_has_been_in_the_same_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("accel_core.processes.watch.rank_status.time.monotonic", lambda: now[0])
    status = RankStatus(3)
    thread = threading.get_ident()
    assert status.report().calls == ()
    status.inside[thread] = entry("gather()", 0, 3)
    assert status.report().calls[0].seconds == 0
    now[0] += 1.5
    (call,) = status.report().calls
    assert (call.name, call.seconds, call.members) == ("gather()", 1.5, (0, 3))
    assert "test_stack_location.py" in call.line
    status.inside[thread] = entry("gather()", 0, 3)  # the next one, of the same name
    assert status.report().calls[0].seconds == 0
    status.inside[thread] = None
    report = status.report()
    assert (report.rank, report.number, report.calls) == (3, 5, ())


def test_a_fork_while_a_position_is_looked_up_begins() -> None:
    """Before Python 3.12 it did not, where garbage was collected in the look-up: a worker of a loader hung."""
    script = (
        "import gc, os, threading, time\n"
        "from accel_core.processes.watch.stack_location import position_of\n"
        "class Loader:\n"
        "    def __init__(self): self.cycle = self\n"
        "    def __del__(self): time.sleep(0.01)\n"  # as its workers are joined: other threads run
        "def patrol():\n"
        "    while True: position_of(0), time.sleep(0)\n"  # of nobody, which looks at all and does nothing more
        "def deep(levels):\n"
        "    if levels: return deep(levels - 1)\n"
        "    time.sleep(0.0005)\n"
        "threading.Thread(target=patrol, daemon=True).start()\n"
        "gc.freeze(), gc.set_threshold(40, 1, 1)\n"
        "for _ in range(60):\n"
        "    Loader(), deep(30)\n"
        "    if not (child := os.fork()): os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "print('all began', flush=True)\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.communicate(timeout=60)[0] == b"all began\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

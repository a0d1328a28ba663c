"""A device that works by itself is asked where it is: by an event behind each window, and by torch's flight recorder."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_core.processes.watch import device_mark
from accel_core.processes.watch.collective_scope import Entry
from accel_core.processes.watch.device_mark import DeviceMark
from accel_core.processes.watch.diagnosis import WAITING, Call
from accel_core.processes.watch.rank_status import RankStatus
from accel_testing import run_ranks


class Event:
    """Stands for an event of a device that works by itself; the test says what the device has reached."""

    queue = reached = asked = 0

    def __init__(self, device: object) -> None:
        self.place = 0

    def record(self) -> None:
        Event.queue += 1
        self.place = Event.queue

    def query(self) -> bool:
        Event.asked += 1
        return self.place <= Event.reached


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> DeviceMark:
    Event.queue = Event.reached = Event.asked = 0
    monkeypatch.setattr("accel_core.processes.watch.device_mark.torch.Event", Event)
    return DeviceMark(torch.device("cpu"), "unheard of")


def called(call: Call | None) -> tuple[str, float] | None:
    return None if call is None else (call.name, call.since)


def test_window_that_the_device_does_not_finish_is_seen_from_when_it_was_given(mark: DeviceMark) -> None:
    assert mark.look(0.0, "") is None, "nothing was given to it"
    mark.record()
    assert mark.look(1.0, "") is None
    assert mark.look(1.0 + WAITING / 2, "") is None, "others may be a little later"
    assert called(mark.look(1.0 + WAITING, "")) == ("backward()", 1.0)
    Event.reached = 1
    assert mark.look(2.0 + WAITING, "") is None
    assert mark.windows == 1


def test_device_that_goes_from_window_to_window_waits_for_nobody(mark: DeviceMark) -> None:
    for now in range(100):
        mark.record()  # the host is always ahead of what the device has reached
        Event.reached = now
        assert mark.look(float(now), "") is None


def test_windows_that_take_long_are_waited_for_as_long(mark: DeviceMark) -> None:
    now, step = 0.0, 10 * WAITING
    for number in range(3):
        mark.record()
        found = [mark.look(now + seconds, "") for seconds in range(int(step))]
        assert bool(found[-1]) is (number == 0), "of the first one it is not known how long it usually takes"
        now, Event.reached = now + step, number + 1
    mark.record()
    mark.look(now, "")
    assert mark.look(now + 3 * step, "") is not None, "but not for ever"


def test_event_is_asked_no_more_once_it_was_reached(mark: DeviceMark) -> None:
    mark.record()
    Event.reached = 1
    for now in range(5):
        mark.look(float(now), "")
    assert Event.asked == 1


def test_status_has_a_call_of_the_device_while_the_thread_waits_in_no_collective(
    mark: DeviceMark, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("accel_core.processes.watch.rank_status.time.monotonic", lambda: now[0])
    status = RankStatus(3, mark)
    status.report()
    mark.record()
    for _ in range(4):
        now[0] += 1.0
        report = status.report()
    (call,) = report.calls
    assert (call.name, call.seconds, call.on_device, report.windows) == ("backward()", 3.0, True, 1)
    assert "in test_status_has_a_call_of_the_device_while" in call.line
    assert report.waiting == (call,)
    assert not report.rests, "the thread may come to anything"
    monkeypatch.setattr(RankStatus, "_waits", lambda *_: True)
    status.inside[threading.get_ident()] = Entry("gather()")
    for _ in range(4):
        now[0] += 1.0
        report = status.report()
    assert [each.name for each in report.calls] == ["gather()"], "which says more"


def recorded(given: int, done: int) -> dict[str, Any]:
    """What the recorder of NCCL says of the default group: written by hand, after what that of gloo says."""
    status = {"last_enqueued_collective": str(given), "last_started_collective": "-1"}
    retired = {"collective_seq_id": 6, "profiling_name": "nccl:all_gather", "retired": True}
    entries = [retired, {"collective_seq_id": 7, "profiling_name": "nccl:all_reduce", "retired": False}]
    named = [{**entry, "process_group": ["0", "default_pg"], "time_created_ns": time.time_ns()} for entry in entries]
    return {"pg_status": {"0": {**status, "last_completed_collective": str(done)}}, "entries": named}


def test_flight_recorder_of_the_backend_says_whether_a_collective_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, mark: DeviceMark
) -> None:
    numbers = [9, 9]
    dump = lambda includeCollectives=True: json.dumps(recorded(*numbers)).encode()
    monkeypatch.setattr(device_mark._distributed_c10d, "_dump_heard_trace_json", dump, raising=False)
    mark = DeviceMark(torch.device("cpu"), "heard")
    numbers = [11, 11]
    mark.record()
    assert [mark.look(float(now), "") for now in range(9)] == [None] * 9, "the device computes"
    assert Event.asked == 0
    numbers = [12, 11]
    mark.look(10.0, "")
    assert called(mark.look(10.0 + WAITING, "")) == ("a collective", 10.0)
    later = DeviceMark(torch.device("cpu"), "heard")
    assert [later.look(float(now), "") for now in range(9)] == [None] * 9, "of a group that ended before this one began"
    numbers = [12, 12]
    assert mark.look(11.0 + WAITING, "") is None, "it goes on"
    assert mark.collective() == ("nccl:all_reduce", 7, "0")


def test_flight_recorder_of_torch_is_read_as_it_is() -> None:
    run_ranks(read_flight_recorder, 1, env={"TORCH_FR_BUFFER_SIZE": "2000"})  # which torch 2.9 has to be told


def read_flight_recorder() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        dist.barrier()
        mark = DeviceMark(torch.device("cpu"), "fr")  # whose name is that of the recorder itself
        assert mark.collective() == (), "of earlier groups in this process nothing is said"
        other = DeviceMark(torch.device("cpu"), "unheard of")
        dist.all_reduce(torch.ones(3))
        assert mark.collective()[0] == "gloo:all_reduce"
        group = dist.group.WORLD
        assert group is not None
        assert mark.collective()[2] == group.group_name
        assert mark.look(0.0, "") is None
        name, _, unnamed = other.collective()
        assert (name, unnamed) == ("gloo:all_reduce", "")
    finally:
        dist.destroy_process_group()

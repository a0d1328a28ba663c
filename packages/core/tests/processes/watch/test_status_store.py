"""What ranks say in the store: reports replace each other, one rank judges at a time, the first verdict holds."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from accel_core.processes.watch.diagnosis import Call, Report
from accel_core.processes.watch.stack_location import Process
from accel_core.processes.watch.status_store import StatusStore

SOON = timedelta(milliseconds=50)


def stores(count: int = 3) -> list[StatusStore]:
    store = dist.HashStore()
    return [StatusStore(store, rank) for rank in range(count)]


def test_last_report_of_a_rank_is_the_one_that_is_read() -> None:
    first, second, _ = stores()
    assert first.report(1) is None
    second.post(Report(1, 1, "here"))
    last = Report(1, 2, "there", (Call("gather()", 3.0, "there", (0, 1)),))
    second.post(last)
    assert first.report(1) == last


def test_questions_are_counted_and_looking_asks_nothing() -> None:
    first, second, _ = stores()
    assert first.ask(False) == (0, False)
    assert second.ask(True) == (1, False)
    assert first.ask(False) == (1, False)


def test_first_verdict_holds_and_everybody_hears_of_it() -> None:
    first, second, third = stores()
    assert second.judge("rank 0 has gone") == "rank 0 has gone"
    assert third.judge("rank 1 has gone") == "rank 0 has gone"
    assert first.ask(False) == (0, True)
    assert first.verdict() == "rank 0 has gone"


def test_rank_that_asked_first_judges_until_it_stops_renewing_that() -> None:
    first, second, third = stores()
    assert second.lead()
    assert not third.lead()
    assert second.lead()
    assert not third.lead(), "it was renewed since"
    assert third.lead(), "it was not"
    assert not second.lead()
    assert not first.lead()


def test_process_of_rank_0_is_waited_for_but_not_for_ever() -> None:
    first, second, _ = stores()
    assert second.process(0, SOON) is None
    mine = Process.current()
    first.introduce(mine)
    assert second.process(0, SOON) == mine
    assert second.process(2) is None


def test_rank_0_lingers_for_those_who_still_run_and_want_to_know() -> None:
    first, second, third = stores()
    started = time.monotonic()
    first.linger(3, SOON)
    assert time.monotonic() - started >= SOON.total_seconds()
    second.acknowledge()
    gone = Process.current()._replace(started="1")
    third.introduce(gone)
    first.linger(3, timedelta(seconds=30))
    assert time.monotonic() - started < 10

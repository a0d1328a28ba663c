"""Who waits in vain for whom: judged from what ranks say, and never from time alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accel_core.processes.watch.diagnosis import (
    ENDED,
    FAILED,
    Absent,
    Call,
    Report,
    broken_text,
    judged,
    table,
    verdict,
)
from accel_core.processes.watch.diagnosis import missing as missing_for

GATHER = Call("gather()", 4.0, "train.py, line 12, in main: accelerator.gather(loss)")
BACKWARD = Call("backward()", 4.0, "train.py, line 30, in main: accelerator.backward(loss)")


def report(rank: int, *calls: Call, left: str = "", line: str = "train.py, line 7, in load") -> Report:
    return Report(rank, 1, line, calls, left)


def by_rank(*reports: Report) -> dict[int, Report]:
    return {each.rank: each for each in reports}


def missing(mine: Report, *others: Report, absent: dict[int, Absent] | None = None) -> dict[int, str]:
    return missing_for(mine.rank, by_rank(mine, *others), absent or {})


def ranks_missed(mine: Report, *others: Report, absent: dict[int, Absent] | None = None) -> list[int]:
    return [*missing(mine, *others, absent=absent)]


def test_report_travels_as_text() -> None:
    inside = Call("reduce('mean')", 2.5, "x", members=(0, 2))
    original = Report(3, 9, "here", (GATHER, inside), ENDED, windows=4, collective=("nccl:all_reduce", 5, "0"))
    assert Report.from_json(json.dumps(original)) == original


def test_ranks_in_the_same_collective_will_come_together() -> None:
    assert ranks_missed(report(0, GATHER), report(1, GATHER), report(2, Call("gather()", 0.0, ""))) == []


def test_rank_that_computes_may_take_as_long_as_it_likes() -> None:
    assert ranks_missed(report(0, Call("gather()", 3600.0, "")), report(1)) == []


def test_two_that_wait_for_each_other_in_different_collectives_wait_in_vain() -> None:
    assert missing(report(0, GATHER), report(1, BACKWARD)) == {1: ""}


def test_rank_that_has_just_entered_another_collective_may_leave_it_again() -> None:
    assert ranks_missed(report(0, GATHER), report(1, Call("backward()", 0.5, ""))) == []


def test_nobody_is_missed_before_this_rank_has_waited() -> None:
    mine = report(0, Call("gather()", 1.0, ""))
    assert ranks_missed(mine, report(1, BACKWARD), report(2, left=ENDED)) == []
    assert ranks_missed(mine, absent={1: Absent(50.0, "gone", "process 7 on a")}) == []


def test_collective_of_some_ranks_waits_for_these_only() -> None:
    pair = Call("gather()", 4.0, "", members=(0, 2))
    assert ranks_missed(report(0, pair), report(1, BACKWARD), report(2, BACKWARD)) == [2]
    assert ranks_missed(report(0, pair), report(1, left=ENDED), report(2, pair)) == []


def test_rank_that_waits_for_others_than_this_one_may_still_come() -> None:
    others = Call("reduce('sum')", 9.0, "", members=(1, 2))
    assert ranks_missed(report(0, GATHER), report(1, others), report(2)) == []


def test_nothing_follows_from_different_collectives_while_a_rank_computes_that_may_come_to_any() -> None:
    in_the_tree = Call("torch.distributed.broadcast()", 9.0, "")
    assert ranks_missed(report(0, GATHER), report(1, GATHER), report(2), report(3, in_the_tree)) == []
    assert (
        ranks_missed(report(0, GATHER), report(1, GATHER), report(3, in_the_tree), absent={2: Absent(9, "running", "")})
        == []
    )
    assert ranks_missed(report(0, GATHER), report(1, GATHER), report(2, GATHER), report(3, in_the_tree)) == [3]


def test_rank_waits_in_vain_though_others_wait_for_one_that_computes() -> None:
    pair, other_pair = Call("gather()", 9.0, "", (0, 1)), Call("reduce('sum')", 9.0, "", (2, 3))
    elsewhere = Call("gather()", 9.0, "", (2, 3))
    waiting, found = judged(by_rank(report(0, pair), report(1), report(2, other_pair), report(3, elsewhere)), {})
    assert waiting is not None
    assert (waiting.rank, [*found]) == (2, [3])


def test_rank_that_waits_for_a_pair_may_come_when_the_pair_does() -> None:
    pair = Call("reduce('sum')", 9.0, "", (1, 2))
    assert ranks_missed(report(0, GATHER), report(1, pair), report(2)) == []


def test_rank_whose_other_thread_computes_may_still_come() -> None:
    busy = Report(1, 1, "", (BACKWARD,), free=True)
    assert ranks_missed(report(0, GATHER), busy) == []


def test_rank_that_has_ended_may_have_passed_a_collective_that_goes_out_from_one() -> None:
    root = Call("torch.distributed.gather()", 9.0, "")
    assert ranks_missed(report(0, root), report(1), report(2, left=ENDED)) == []
    assert ranks_missed(report(0, root), report(2, left=ENDED)) == [2]


def test_rank_with_two_threads_is_there_if_one_of_them_is() -> None:
    assert ranks_missed(report(0, GATHER), report(1, BACKWARD, GATHER)) == []


def test_rank_that_has_left_will_not_come() -> None:
    reason = "has ended its training, at train.py, line 7, in load"
    assert missing(report(0, GATHER), report(1, left=ENDED)) == {1: reason}


@pytest.mark.parametrize(
    ("absent", "reason"),
    [
        (Absent(5.0, "gone", "process 7 on a"), "process 7 on a ended without a word: killed from outside"),
        (Absent(5.0, "stopped", "process 7 on a"), "process 7 on a was stopped (SIGSTOP, or a debugger)"),
        (Absent(121.0, "unknown", "process 7 on b"), "process 7 on b has not answered for 121 s"),
    ],
)
def test_rank_that_does_not_answer_is_given_up_for_a_reason(absent: Absent, reason: str) -> None:
    assert reason in missing(report(0, GATHER), absent={1: absent})[1]


@pytest.mark.parametrize(
    "absent", [Absent(1.0, "gone", ""), Absent(100.0, "unknown", ""), Absent(900.0, "running", "")]
)
def test_rank_that_may_only_be_busy_is_not_given_up(absent: Absent) -> None:
    assert ranks_missed(report(0, GATHER), absent={1: absent}) == []


def test_verdict_shows_where_every_rank_stands_and_what_to_look_for() -> None:
    reports = by_rank(report(0, GATHER), report(1, BACKWARD), report(2, GATHER))
    assert verdict(reports[0], reports, missing_for(0, reports, {})).splitlines() == [
        "The ranks do not come together: rank 0 waits in gather() for rank 1, in vain.",
        "  rank 0: in gather() for 4 s, at train.py, line 12, in main: accelerator.gather(loss)",
        "  rank 1: in backward() for 4 s, at train.py, line 30, in main: accelerator.backward(loss)",
        "  rank 2: in gather() for 4 s, at train.py, line 12, in main: accelerator.gather(loss)",
        (
            "A collective is called by all ranks, in the same order: look for a call that stands under a condition which is "
            "not true on every rank, such as accelerator.is_main_process."
        ),
    ]


def test_verdict_on_ranks_that_ended_early_says_how_to_end_together() -> None:
    reports = by_rank(report(0, BACKWARD), report(1, left=ENDED), report(2, left=ENDED))
    text = verdict(reports[0], reports, missing_for(0, reports, {}))
    assert "rank 0 waits in backward() for rank 1 and 2, in vain" in text
    assert "equally many batches" in text
    assert "check_trigger()" in text


def test_verdict_on_a_lost_rank_sends_to_its_own_output() -> None:
    mine = report(0, BACKWARD)
    text = verdict(mine, {0: mine}, missing(mine, absent={1: Absent(5.0, "gone", "process 7 on a")}))
    assert "  rank 1: process 7 on a ended without a word" in text
    assert "Look into the output of that rank" in text


def test_broken_connection_is_told_with_a_line_for_each_rank() -> None:
    reports, reasons = by_rank(report(0), report(1, GATHER)), {2: "process 9 on a ended without a word"}
    text = broken_text(1, "gather()", False, reports, reasons)
    assert "The connections of rank 1 broke in gather()." in text
    assert text.count("  rank ") == 3
    assert "only follows" in text


def test_timeout_is_told_as_such_with_the_option_that_makes_it_longer() -> None:
    text = broken_text(1, "gather()", True, by_rank(report(0), report(1, GATHER)), {})
    assert "Rank 1 gave up in gather(), after the timeout of its process group. The ranks:" in text
    assert "InitProcessGroupKwargs(timeout=" in text


def test_table_is_in_rank_order() -> None:
    lines = table(by_rank(report(2), report(10), report(1)), {0: "gone"}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["  rank 0", "  rank 1", "  rank 2", "  rank 10"]


ON_DEVICE = Call("backward()", 9.0, "train.py, line 31, in main: loss.item()", on_device=True)


def queued(rank: int, *calls: Call, windows: int, left: str = "", last: tuple[Any, ...] = ()) -> Report:
    return report(rank, *calls, left=left)._replace(windows=windows, collective=last)


def test_device_waits_in_vain_for_a_rank_that_is_gone_or_ended_before() -> None:
    mine = queued(0, ON_DEVICE, windows=7)
    assert "ended without a word" in missing(mine, absent={1: Absent(5.0, "gone", "process 7 on a")})[1]
    assert missing(mine, queued(1, windows=6, left=ENDED)) == {
        1: "has ended its training, at train.py, line 7, in load"
    }
    assert missing(mine, queued(1, windows=7, left=ENDED)) == {}, "that one was there: this device computes"
    assert ranks_missed(mine, queued(1, windows=7, left=FAILED)) == [1]


def test_rank_that_is_slow_is_never_missed_by_a_device() -> None:
    mine = queued(0, ON_DEVICE, windows=7)
    assert missing(mine, queued(1, windows=6)) == {}
    assert missing(mine, queued(1, Call("gather()", 0.5, ""), windows=6)) == {}
    assert missing(mine, queued(1, ON_DEVICE, windows=7)) == {}
    assert missing(mine, queued(1, GATHER, windows=7)) == {}, "that one was there: this device computes"
    assert missing(queued(1, GATHER, windows=7), mine) == {}
    assert missing(mine, absent={1: Absent(900.0, "running", "")}) == {}


def test_device_waits_in_vain_for_a_rank_that_rests_in_what_this_one_has_passed() -> None:
    mine = queued(0, ON_DEVICE, windows=7)
    assert missing(mine, queued(1, GATHER, windows=6)) == {1: ""}
    coming = queued(0, ON_DEVICE, GATHER._replace(seconds=0.0), windows=7)
    assert missing(coming, queued(1, GATHER, windows=6)) == {}, "this one has just come"
    for name in ("backward()", "forward_backward()", "join_uneven_inputs()", "save_state()"):
        assert missing(mine, queued(1, Call(name, 9.0, ""), windows=6)) == {}, (
            "it may write, or wait for its own device"
        )
    pair, root = GATHER._replace(members=(1, 2)), Call("torch.distributed.broadcast()", 9.0, "")
    assert missing(mine, queued(1, pair, windows=6), queued(2, windows=6)) == {}, "that one waits for a third"
    assert missing(mine, queued(1, root, windows=6)) == {}


def test_collectives_of_one_number_in_one_group_have_one_name() -> None:
    mine = queued(0, ON_DEVICE, windows=9, last=("nccl:all_reduce", 8, "0"))
    assert missing(mine, queued(1, ON_DEVICE, windows=9, last=("nccl:all_gather", 8, "0"))) == {1: ""}
    assert missing(mine, queued(1, ON_DEVICE, windows=9, last=("nccl:all_gather", 7, "0"))) == {}, "it comes to 8"
    assert missing(mine, queued(1, ON_DEVICE, windows=9, last=("nccl:all_gather", 8, "3"))) == {}
    unnamed = mine._replace(collective=("gloo:all_reduce", 8, ""))
    assert missing(unnamed, queued(1, ON_DEVICE, windows=9, last=("gloo:all_gather", 8, ""))) == {}
    text = verdict(mine, by_rank(mine, queued(1, windows=9)), {1: ""})
    assert "rank 0 waits in backward() on its device for rank 1, in vain" in text
    assert "loss.item(); its device's collective: nccl:all_reduce, number 8 of group 0" in text

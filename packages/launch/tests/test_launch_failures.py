"""Launches that do not end well: all processes end within seconds, who failed first is said, signals reach everybody, nobody is left."""

from __future__ import annotations

import re
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from start_many import HERE, Launch, Result, run_together
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accel_launch.starting.failures import find_failures, from_torch, listed, summary
from accel_launch.starting.ranks import Ending, Ranks
from accel_launch.starting.signals import Ended, Signals

LIMIT = 15.0
TWO = {"num_processes": 2, "shutdown_timeout": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Ranks without torch: what the launcher does needs no collectives."""
    launches = [
        *(Launch(way, way, TWO) for way in ("raises", "exits", "is-killed", "reports", "once")),
        Launch("again", "once", {**TWO, "max_restarts": 2}),
        Launch("often", "is-killed", {**TWO, "max_restarts": 1}),
        Launch("redirected", "raises", {**TWO, "redirects": "3"}),
        Launch("filtered", "raises", {**TWO, "local_ranks_filter": [0], "max_restarts": 1}),
        *(Launch(name, "stays", TWO, [name]) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGKILL")),
        Launch("saves", "saves", TWO, ["SIGTERM"]),
        Launch("deaf", "deaf", TWO, ["SIGINT"]),
        Launch("deaf, twice", "deaf", {**TWO, "shutdown_timeout": 50}, ["SIGINT"] * 3),
        Launch("deaf, killed", "deaf", TWO, ["SIGKILL"]),
        Launch("children", "children", TWO, ["SIGINT"]),
        Launch("children, killed", "children-needed", TWO, ["SIGKILL"]),
        Launch("told", "told", TWO, ["SIGUSR1", "SIGINT", "SIGTERM"]),
    ]
    folder = tmp_path_factory.mktemp("failures")
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/flight_recorder_rank_"}
    dump = "$F=$TORCH_FR_DUMP_TEMP_FILE; touch $F$RANK; until [ -e ${F}0 ] && [ -e ${F}1 ]; do sleep 0.1; done; "
    dump += "exit $((2 - TORCHELASTIC_RESTART_COUNT))"
    launches.append(Launch("dumps", dump, {**TWO, "max_restarts": 2}, environment=dumps))
    script = f"trap : TERM; {sys.executable} {HERE / 'start_job.py'} told {folder / 'shell'}; exit 0"
    launches.append(Launch("shell", f"${script}", TWO, ["SIGTERM"]))
    for told, port in enumerate(unused_ports(2)):
        machines = {"num_machines": 2, "num_processes": 4, "main_process_ip": "127.0.0.1", "main_process_port": port}
        for rank in (0, 1):
            signals, takes = (["SIGTERM"], "0") if rank == told else ([], "1")
            options = {**machines, "machine_rank": rank}
            launches.append(Launch(f"{told} told, {rank}", "preempted", options, signals, {"TAKES": takes}))
    return run_together(launches, folder)


def unused_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@pytest.fixture(scope="module")
def collective(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Ranks that wait for each other in a collective, and a run that resumes: four launches side by side."""
    folder = tmp_path_factory.mktemp("collective")
    redirected = {"redirects": "3", "log_dir": str(folder / "logs")}
    ways = ("collective-raises", "collective-halts", "resumes", "collective")
    launches = [Launch(way, way, {"num_processes": 2, "max_restarts": int(way == "resumes")}) for way in ways]
    launches += [
        Launch(name, "collective-all-raise", {"num_processes": 3, **options})
        for name, options in (("all raise", {"max_restarts": 1}), ("all raise, redirected", redirected))
    ]
    launches += [
        Launch(f"loads-{name}", f"loads-{name}", {"num_processes": 2}, [name]) for name in ("SIGTERM", "SIGUSR1")
    ]
    return run_together(launches, folder, 90.0)


@pytest.mark.parametrize("way, status", [("raises", 1), ("exits", 3), ("is-killed", 137)])
def test_failing_rank_ends_all_and_gives_the_exit_status(results: dict[str, Result], way: str, status: int) -> None:
    result = results[way]
    assert (result.status, result.left) == (status, [])
    assert result.seconds < LIMIT
    assert "accel launch: rank 1 failed first (" in result.errors
    assert "\n  rank 0 was told to end, and did\n" in result.errors


def test_traceback_comes_first_and_the_summary_is_short(results: dict[str, Result]) -> None:
    errors = results["raises"].errors
    assert errors.startswith("Traceback")
    assert errors.index("ValueError: only I") < errors.index("accel launch:")
    assert len(errors[errors.index("accel launch:") :].splitlines()) == 3
    assert "--max-restarts N starts all ranks again" in errors


def test_rank_that_was_killed_is_told_with_its_signal_and_a_hint(results: dict[str, Result]) -> None:
    assert "killed by SIGKILL: the kernel does that when memory runs out" in results["is-killed"].errors


def test_rank_that_has_written_an_error_file_is_told_with_its_error(results: dict[str, Result]) -> None:
    """Rank 1 ends first, and says that it only follows from another's failure."""
    result = results["reports"]
    assert result.status == 1
    assert "accel launch: rank 0 failed first (" in result.errors
    assert "): ValueError: of rank 0\n" in result.errors
    assert "  rank 1 failed then: ValueError: of rank 1\n" in result.errors


def test_all_ranks_are_started_again_as_often_as_was_asked(results: dict[str, Result]) -> None:
    result = results["again"]
    assert result.status == 0
    assert [(result.folder / f"finished-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert "rank 1 failed (process " in result.errors
    assert "All are started again: ranks 0–1, restart 1 of 2." in result.errors
    assert results["once"].status == 137
    assert results["often"].status == 137
    assert "this was after 1 of 1 restarts" in results["often"].errors


def test_dumps_of_the_flight_recorder_of_each_attempt_are_kept(results: dict[str, Result]) -> None:
    result = results["dumps"]
    assert result.status == 0
    names = sorted(
        path.name.removeprefix("flight_recorder_") for path in result.folder.parent.glob("flight_recorder_*")
    )
    assert names == ["attempt_1_rank_0", "attempt_1_rank_1", "attempt_2_rank_0", "attempt_2_rank_1", "rank_0", "rank_1"]


def test_errors_that_went_to_a_file_are_shown(results: dict[str, Result]) -> None:
    errors = results["redirected"].errors
    assert "  | ValueError: only I\n" in errors
    assert "  output of all ranks: /" in errors


def test_errors_of_a_rank_that_is_not_shown_are_shown_when_it_fails(results: dict[str, Result]) -> None:
    errors = results["filtered"].errors
    shown = "  its errors, which were not shown:\n  | Traceback (most recent call last):\n"
    assert errors.count(shown) == errors.count("  | ValueError: only I\n") == 2, "before the restart, and at the end"
    assert errors.index(shown) < errors.index("rank 1 failed first")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_signal_reaches_all_ranks_and_nobody_is_left(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert (result.status, result.left) == (128 + signal.Signals[name], [])
    assert result.seconds < LIMIT
    assert "accel_launch" not in result.errors, "no traceback of the launcher"


def test_script_that_saves_when_it_is_told_to_end_has_its_time(results: dict[str, Result]) -> None:
    result = results["saves"]
    assert [(result.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM"] * 2
    assert result.status == 143


@pytest.mark.parametrize("name, status", [("SIGTERM", 143), ("SIGUSR1", 0)])
def test_rank_with_workers_of_a_loader_saves_when_its_launcher_alone_is_told(
    collective: dict[str, Result], name: str, status: int
) -> None:
    result = collective[f"loads-{name}"]
    assert (result.folder / "saved" / "manifest.json").exists(), result.errors
    assert (result.status, result.left) == (status, []), result.errors


def test_rank_of_a_launcher_that_was_killed_has_its_children_until_it_ends(results: dict[str, Result]) -> None:
    result = results["children, killed"]
    assert [(result.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["None"] * 2
    assert (result.status, result.left) == (-signal.SIGKILL, [])


def test_signal_reaches_what_a_shell_has_started(results: dict[str, Result]) -> None:
    result = results["shell"]
    assert [(result.folder / f"told-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM\n"] * 2
    assert (result.status, result.left) == (143, [])


@pytest.mark.parametrize("told", [0, 1])
def test_machine_that_is_told_to_stop_gives_all_its_exit_status(results: dict[str, Result], told: int) -> None:
    """So that who starts machines starts all of them again, and none counts as complete."""
    both = [results[f"{told} told, {rank}"] for rank in (0, 1)]
    assert [result.status for result in both] == [143, 143], both[0].errors + both[1].errors
    assert all(result.seconds < LIMIT for result in both)
    assert both[told].errors == ""
    assert re.fullmatch(
        rf"accel launch: machine {told} \(\S+, process \d+\) was told to stop by SIGTERM, which stopped the run\. This machine's "
        r"processes have finished; its exit status is 143, so that all machines are started again\.\n",
        both[1 - told].errors,
    )


def test_rank_that_does_not_end_is_killed_after_the_timeout(results: dict[str, Result]) -> None:
    result = results["deaf"]
    assert (result.status, result.left) == (130, [])
    assert TWO["shutdown_timeout"] <= result.seconds < LIMIT


def test_second_ctrl_c_kills_what_does_not_end(results: dict[str, Result]) -> None:
    result = results["deaf, twice"]
    assert len(list(result.folder.glob("child-*"))) == 2
    assert (result.status, result.left) == (130, [])
    assert result.seconds < LIMIT


def test_what_a_rank_has_started_ends_with_it(results: dict[str, Result]) -> None:
    result = results["children"]
    assert len(list(result.folder.glob("child-*"))) == 2
    assert (result.status, result.left) == (130, [])


def test_later_signals_are_passed_on_too_and_some_end_nothing(results: dict[str, Result]) -> None:
    result = results["told"]
    assert [(result.folder / f"told-{rank}").read_text().split() for rank in (0, 1)] == [
        ["SIGUSR1", "SIGINT", "SIGTERM"]
    ] * 2
    assert result.status == 130


@pytest.mark.parametrize("name", ["SIGKILL", "deaf, killed"])
def test_ranks_of_a_launcher_that_was_killed_do_not_live_on(results: dict[str, Result], name: str) -> None:
    assert (results[name].status, results[name].left) == (-signal.SIGKILL, [])


def test_traceback_of_a_rank_in_a_collective_comes_before_what_follows_from_it(collective: dict[str, Result]) -> None:
    result = collective["collective-raises"]
    assert (result.status, result.seconds < LIMIT) == (1, True)
    first = result.errors.index("ValueError: only I")
    assert first < result.errors.index("accel launch: rank 1 failed first")
    for consequence in ("Connection", "[rank0]"):
        assert consequence not in result.errors[:first]


def test_traceback_that_all_ranks_have_is_shown_once_in_each_attempt(collective: dict[str, Result]) -> None:
    errors = collective["all raise"].errors
    assert errors.count("Traceback") == 2
    later = re.findall(
        r"^Rank (\d) failed at the same lines as rank (\d): ValueError: all of us, rank (\d)$", errors, re.MULTILINE
    )
    assert later
    assert all(rank == told != first for rank, first, told in later)
    shown = set(re.findall(r"^(?:\[rank\d\]: )?ValueError: all of us, rank (\d)$", errors, re.MULTILINE))
    assert {first for _, first, _ in later} <= shown


def test_each_rank_has_its_whole_traceback_in_its_own_file(collective: dict[str, Result]) -> None:
    logs = collective["all raise, redirected"].folder.parent / "logs"
    files = [path.read_text() for path in logs.rglob("stderr.log")]
    assert len(files) == 3
    found = [text for text in files if "ValueError" in text]
    assert found
    assert all("Traceback" in text for text in found)


def test_rank_that_stops_answering_ends_all_and_is_named(collective: dict[str, Result]) -> None:
    result = collective["collective-halts"]
    assert result.status != 0
    assert result.seconds < LIMIT
    assert (
        "accel launch: rank 1 had been halted (SIGSTOP, or a debugger), and did not answer; then rank 0 failed first"
        in result.errors
    )
    last = result.errors[result.errors.index("accel launch:") :]
    assert re.search(r"\): The ranks do not come together: rank 0 waits in .* for rank 1, in vain\. …\n", last), last
    assert "gloo" not in last


def test_run_with_checkpoints_resumes_after_a_rank_was_killed(collective: dict[str, Result]) -> None:
    result = collective["resumes"]
    assert result.status == 0, result.errors
    assert re.findall(r"began at \d, ended with \d", result.output) == ["began at 2, ended with 4"] * 2


def test_launch_whose_ranks_come_together_is_not_disturbed_by_others_beside_it(collective: dict[str, Result]) -> None:
    assert (collective["collective"].status, collective["collective"].errors) == (0, "")
    assert re.findall(r"\d\.\d", collective["collective"].output) == ["2.0", "2.0"]


def test_listed_ranks_are_short() -> None:
    assert listed([3]) == "rank 3"
    assert listed([5, 0, 2, 1]) == "ranks 0–2, 5"


def test_rank_that_had_finished_or_had_to_be_killed_is_said(tmp_path: Path) -> None:
    ranks = Ranks({rank: 100 + rank for rank in range(4)})
    ranks.stopped_at, ranks.killed = 10.0, [2]
    ranks.endings = {0: Ending(0, 8.0), 1: Ending(5, 9.0), 2: Ending(-9, 12.0), 3: Ending(-15, 10.5)}
    failures = find_failures(
        ranks, {rank: rank for rank in range(4)}, {rank: tmp_path / str(rank) for rank in range(4)}
    )
    assert [(failure.rank, failure.exit_status) for failure in failures] == [(1, 5)]
    text = summary(failures, ranks, "here", " on this machine", tmp_path, None)
    assert text.startswith("accel launch: rank 1 failed first on this machine (here, local rank 1, process 101, ")
    assert "  rank 2 was told to end, did not, and was killed\n" in text
    assert "  rank 3 was told to end, and did\n" in text
    assert "  rank 0 had finished\n" in text
    assert text.endswith(f"  output of all ranks: {tmp_path}")


def test_signals_that_are_ignored_stay_so_and_handlers_come_back() -> None:
    """`nohup` lets a launcher live on without its terminal; torch's agent would put a handler of its own."""
    before = [signal.getsignal(number) for number in signal.Signals]
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.signal(signal.SIGHUP, lambda *_: None)
            signals.install()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(Ended):
                signal.raise_signal(signal.SIGTERM)
            assert signals.received == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, was)
    assert [signal.getsignal(number) for number in signal.Signals] == before


def test_signal_in_a_block_that_holds_is_raised_behind_it() -> None:
    passed: list[signal.Signals] = []
    with Signals() as signals:
        signals.pass_on = passed.append
        with pytest.raises(Ended), signals.held():
            signal.raise_signal(signal.SIGINT)
            assert passed == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    assert passed == [signal.SIGINT] * 2, "only the first one is raised"


def test_where_ends_cannot_be_looked_at_torch_says_who_failed() -> None:
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=-6, error_file="none")
    assert [(each.rank, each.exit_status) for each in from_torch({3: failure})] == [(3, 134)]

"""Launches that end well: N means N, many at once, output where it was asked for, and a single process is the script itself."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from start_many import HERE, Launch, Result, run_together

from accel_launch.errors import LaunchError
from accel_launch.starting.program import Program

SHOW = "$echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_PORT $OMP_NUM_THREADS"
MANY = [f"many-{number}" for number in range(20)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    two = {"num_processes": 2}
    folder = tmp_path_factory.mktemp("start")
    logs = {"log_dir": str(folder / "logs"), "log_line_prefix_template": "<${role_name} ${rank}> "}
    launches = [
        *(Launch(name, SHOW, two) for name in MANY),
        Launch("threads", SHOW, {**two, "num_cpu_threads_per_process": 3}),
        Launch("variable", SHOW, two, environment={"OMP_NUM_THREADS": "5"}),
        Launch("dollars", "$echo '$$' '${local_rank}'", two),
        Launch("agent of one", SHOW, {"role": "solo"}),
        Launch("tee", "finishes", {**two, **logs, "tee": "3", "role": "worker"}),
        Launch("redirect", "finishes", {**two, "redirects": "0:0,1:3"}),
        Launch("filter", "finishes", {**two, "local_ranks_filter": [1]}),
        Launch("no such rendezvous", "finishes", {**two, "rdzv_backend": "nonsense", "rdzv_endpoint": "localhost:0"}),
    ]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        launches.append(Launch("taken port", "finishes", {**two, "main_process_port": port}))
        return run_together(launches, folder)


@pytest.mark.full
def test_twenty_launches_at_once_all_start(results: dict[str, Result]) -> None:
    ports = set()
    for name in MANY:
        assert results[name].status == 0, results[name].errors
        lines = sorted(results[name].output.splitlines())
        assert [line.split()[:3] for line in lines] == [["0", "2", "0"], ["1", "2", "1"]]
        ports |= {line.split()[3] for line in lines}
    assert len(ports) == len(MANY)


def test_launch_that_goes_well_says_nothing_of_its_own(results: dict[str, Result]) -> None:
    assert [results[name].errors for name in (*MANY, "threads", "variable")] == [""] * (len(MANY) + 2)


def test_threads_are_what_was_asked_for_else_what_the_variable_says(results: dict[str, Result]) -> None:
    assert [line.split()[4] for line in results["threads"].output.splitlines()] == ["3", "3"]
    assert [line.split()[4] for line in results["variable"].output.splitlines()] == ["5", "5"]


def test_arguments_reach_the_ranks_as_they_are(results: dict[str, Result]) -> None:
    assert results["dollars"].output == "$$ ${local_rank}\n" * 2


def test_option_that_only_an_agent_can_honour_starts_one_for_a_single_process(results: dict[str, Result]) -> None:
    assert results["agent of one"].output.split()[:3] == ["0", "1", "0"]


def test_tee_writes_to_files_and_to_the_console_with_a_prefix(results: dict[str, Result]) -> None:
    result = results["tee"]
    assert "<worker 1> rank 1 of 2" in result.output
    assert "<worker 0> errors of rank 0" in result.errors
    logs = result.folder.parent / "logs"
    assert f"written to files under {logs}" in result.errors
    assert sorted(path.name for path in logs.rglob("1/*.log")) == ["stderr.log", "stdout.log"]


def test_redirect_without_a_folder_says_where_it_writes(results: dict[str, Result]) -> None:
    result = results["redirect"]
    assert "rank 0 of 2" in result.output
    assert "rank 1" not in result.output + result.errors
    found = re.search(r"written to files under (\S+)", result.errors)
    assert found
    (log,) = Path(found[1]).rglob("1/stdout.log")
    assert "rank 1 of 2" in log.read_text()


def test_only_the_ranks_of_the_filter_are_shown(results: dict[str, Result]) -> None:
    assert results["filter"].output.startswith("rank 1 of 2")
    assert "rank 0" not in results["filter"].output + results["filter"].errors


def test_rendezvous_that_torch_does_not_have_is_refused(results: dict[str, Result]) -> None:
    assert (
        "LaunchError: rdzv_backend=nonsense was asked for at localhost:0, and torch"
        in results["no such rendezvous"].errors
    )


def test_port_that_somebody_else_has_is_an_error_that_names_it(results: dict[str, Result]) -> None:
    result = results["taken port"]
    assert result.status == 1
    assert re.search(r"was to meet at localhost:\d+, and the meeting has failed: .*(EADDRINUSE|in use)", result.errors)
    assert "Traceback" not in result.errors


def test_one_process_on_one_machine_is_the_script_itself(tmp_path: Path) -> None:
    """The launcher becomes the script: its process, its exit status, its signals."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.getpid(), os.environ.get('RANK'), sys.argv[1:]); sys.exit(7)")
    with subprocess.Popen(
        [sys.executable, str(HERE / "start_driver.py"), "{}", str(script), "--epochs", "2"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{process.pid} None ['--epochs', '2']\n"
        assert process.wait(timeout=60) == 7


def test_missing_script_is_told_once_and_not_by_every_rank() -> None:
    with pytest.raises(
        LaunchError, match=r"^nothing.py was to be started, and there is no such file in .*Give the path of a"
    ):
        Program("script", "nothing.py").check({})
    with pytest.raises(LaunchError, match=r"^an empty path was to be started, and there is no such file"):
        Program("script", "").check({})


def test_missing_program_is_told_before_anything_is_started() -> None:
    with pytest.raises(LaunchError, match=r"no executable file of that name was found\. Give its path, such as \./no-"):
        Program("program", "no-such-program").check({"PATH": "/usr/bin"})
    with pytest.raises(LaunchError, match="an empty path was to be started as a program, and no executable file"):
        Program("program", "").check({"PATH": "/usr/bin"})
    Program("program", "sh").check({"PATH": "/usr/bin:/bin"})


def test_program_that_may_not_be_executed_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "my start.sh"
    script.touch(mode=0o644)
    with pytest.raises(
        LaunchError, match=r"my start\.sh was to be started as a program, .* chmod \+x for a file of your own; or leave"
    ):
        Program("program", str(script)).check({"PATH": "/usr/bin"})


def test_ranks_write_at_once_and_get_the_arguments() -> None:
    assert Program("script", "a.py", ("--x", "1")).argv() == [sys.executable, "-u", "a.py", "--x", "1"]
    assert Program("module", "a.b", ("y",)).argv() == [sys.executable, "-u", "-m", "a.b", "y"]
    assert Program("program", "sh", ("-c", "true")).argv() == ["sh", "-c", "true"]

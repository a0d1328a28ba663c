"""The script for people with accelerators runs on a CPU, and a check that fails, hangs or crashes is a line like another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
VERDICTS = """
import os, signal, time
from acceptance.registry import ALL, check, skip


@check()
def passes(run):
    return f"{run.size} on {run.device.type}"


@check(devices=ALL)
def raises_on_one(run):
    run.world()
    assert run.rank == 0, "as it should"


@check()
def crashes(run):
    os.kill(os.getpid(), signal.SIGSEGV)


@check(seconds=10)
def hangs(run):
    time.sleep(1000)


@check()
def cannot_be_decided(run):
    skip("no reason")


@check(package="nothing_of_this_name")
def lacks_a_package(run):
    pass


@check(stages=2)
def comes_again(run):
    marks = [path.name for path in run.folder.iterdir()]
    (run.folder / f"stage-{run.stage}").touch()
    assert len(marks) == run.stage
    return str(marks)


def judge(reports):
    assert reports[1].exit_code == -signal.SIGKILL, reports
    return "seen"


@check(devices=2, judge=judge)
def is_judged(run):
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(tmp_path: Path, *arguments: str, launch: tuple[str, ...] = ()) -> tuple[int, dict[str, str], dict]:
    """The exit status, the line of each check, and the report."""
    report = tmp_path / "report.json"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, str(TESTS / "gpu_acceptance.py"), "--report", str(report), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    lines = re.findall(
        r"^(PASS|FAIL|SKIP)  ([\w.]+)(?:\[\d+\])? +[\d.]+ s *(.*)$", ran.stdout.partition("\n\n")[0], re.MULTILINE
    )
    assert lines, ran.stdout + ran.stderr
    return ran.returncode, {name: f"{verdict} {text}" for verdict, name, text in lines}, json.loads(report.read_text())


@pytest.mark.timeout(300)
def test_every_check_that_needs_no_accelerator_passes(tmp_path):
    status, lines, report = run_script(tmp_path, "--cpu", "--quick")
    assert not {name: line for name, line in lines.items() if line.startswith("FAIL")}
    assert status == 0
    assert sum(line.startswith("PASS") for line in lines.values()) > 30
    assert {"torch", "host", "driver", "variables"} <= report["machines"][0].keys()


@pytest.mark.full  # of the session `toydevice`
@pytest.mark.timeout(300)
@pytest.mark.parametrize("devices", ["3", "8"])
def test_every_check_passes_with_other_numbers_of_devices(devices, tmp_path):
    """Sizes of batches, and sums in 8 bits, depend on it."""
    topics = "collectives,numerics,optimizers,checkpoints,loading,compiling"
    status, lines, _ = run_script(
        tmp_path, "--cpu", "--quick", "--devices", devices, "--only", topics, "--patience", "5"
    )
    assert not {name: line for name, line in lines.items() if line.startswith("FAIL")}
    assert status == 0


@pytest.mark.timeout(120)
def test_what_becomes_of_a_check_is_said(tmp_path):
    (tmp_path / "verdicts.py").write_text(VERDICTS)
    status, lines, report = run_script(tmp_path, "--cpu", "--checks", "verdicts", "--only", "verdicts")
    expected = {
        "passes": "PASS 1 on cpu",
        "raises_on_one": "FAIL rank 1 raised: AssertionError: as it should",
        "crashes": "FAIL rank 0 ended without returning: ended by SIGSEGV",
        "hangs": "FAIL rank 0 did not end: killed 10 s after the start",
        "cannot_be_decided": "SKIP no reason",
        "lacks_a_package": "SKIP nothing_of_this_name is not installed",
        "comes_again": "PASS ['stage-0']",
        "is_judged": "PASS seen",
    }
    assert lines == {f"verdicts.{name}": line for name, line in expected.items()}
    assert status == 3
    (hanging,) = (each for each in report["results"] if each["check"] == "verdicts.hangs")
    assert "time.sleep(1000)" in hanging["ranks"][0]["stacks"] or "in hangs" in hanging["ranks"][0]["stacks"]


@pytest.mark.timeout(120)
def test_a_launched_script_uses_the_processes_that_there_are(tmp_path):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    names = "collectives.gather,collectives.nested,checkpoints.resume,watch.failed"
    status, lines, _ = run_script(tmp_path, "--cpu", "--quick", "--only", names, launch=launch)
    assert status == 0
    assert {name: line[:4] for name, line in lines.items()} == dict.fromkeys(names.split(","), "PASS")


def test_an_unknown_name_is_refused(tmp_path):
    command = [sys.executable, str(TESTS / "gpu_acceptance.py"), "--only", "numerics,numeric"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode != 0
    assert "There is no check and no topic numeric: --list shows them." in ran.stderr

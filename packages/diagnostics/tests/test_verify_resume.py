"""`accel verify-resume` runs, kills and resumes real scripts: exact ones pass, each fault is found and named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from verify_resume_runs import execute_in_ranks

from accel_diagnostics.resume import launching
from accel_diagnostics.resume.command import DIFFERS, EXACT, NO_ANSWER, main

SCRIPT = str(Path(__file__).with_name("resumable_script.py"))
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.py"


@pytest.fixture(autouse=True)
def in_ranks(request, monkeypatch):
    if "launched" not in request.fixturenames:
        monkeypatch.setattr(launching, "execute", execute_in_ranks)


@pytest.fixture
def launched() -> None:
    """The test starts its runs by `accel launch`, as the command does."""


def verify(capsys: pytest.CaptureFixture[str], *options: str, fault: str = ""):
    """The exit status, and what was printed as JSON."""
    arguments = ["--json", "--resume-arguments=--resume", *options, SCRIPT, "--save", "{folder}", "--fault", fault]
    status = main(arguments)
    told = capsys.readouterr()
    assert told.out, told.err
    return status, json.loads(told.out)


def states(found) -> dict[str, str]:
    return {each["part"]: each["state"] for each in found["verdicts"]}


def test_a_scheduler_that_is_not_saved_is_named(capsys):
    status, found = verify(capsys, fault="scheduler")
    assert status == DIFFERS
    assert found["resumed"]["beginning"]["step"] == 4
    assert found["first"]["part"] == "scheduler"
    assert found["first"]["name"] == "unprepared scheduler.0['last_epoch']"
    assert (found["first"]["step"], found["first"]["expected"], found["first"]["found"]) == (5, "4", "0")
    assert found["not compared"] == ["object.0['seconds']"]
    assert states(found)["samples"] == "equal"


@pytest.mark.parametrize(
    ("fault", "first", "advice"),
    [
        (
            "optimizer",
            "optimizer\n  unprepared optimizer.0",
            "made this optimizer and did not prepare it.\nIts state was not",
        ),
        (
            "late schedule",
            "optimizer\n  optimizer.0['groups'][0]['lr']",
            "by a scheduler that is made or by a learning rate",
        ),
        (
            "augmentation",
            "samples\n  what the model saw",
            "the dataset draws random numbers, as for augmentation, in workers",
        ),
    ],
)
def test_the_advice_is_about_what_differs(capsys, fault, first, advice):
    assert main(["--resume-arguments=--resume", SCRIPT, "--save", "{folder}", "--fault", fault]) == DIFFERS
    told = capsys.readouterr().out
    assert f"First difference in step 5 on rank 0: {first}" in told
    assert advice in told


def test_statistics_of_batches_that_ddp_replaces_by_those_of_rank_0_are_no_difference(capsys):
    assert verify(capsys, "--processes", "2", fault="batch norm")[0] == EXACT


def test_statistics_that_each_rank_keeps_for_itself_are_a_difference(capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DDP__BROADCAST_BUFFERS", "no")
    given = ["--processes", "2", "--resume-arguments=--resume", SCRIPT, "--save", "{folder}", "--fault", "batch norm"]
    assert main(given) == DIFFERS
    told = capsys.readouterr().out
    assert "First difference in step 5 on rank 1: weights\n  model.0/1.running_mean" in told
    assert "Of buffers that is what rank 0 had: torch.nn.SyncBatchNorm keeps them equal." in told


def test_statistics_of_batches_that_another_world_divides_are_named_as_such(capsys):
    worlds = ["--processes", "2", "--resume-processes", "1", "--resume-arguments=--resume"]
    assert main([*worlds, SCRIPT, "--save", "{folder}", "--fault", "batch norm"]) == DIFFERS
    told = capsys.readouterr().out
    assert "First difference in step 5 on rank 0: losses" in told
    assert "depends on how the samples are divided among processes" in told


def test_a_run_resumed_in_a_smaller_world_is_the_same_but_for_rounding(capsys):
    status, found = verify(capsys, "--processes", "2", "--resume-processes", "1")
    assert status == EXACT
    assert (found["whole"]["processes"], found["resumed"]["processes"]) == (2, 1)
    told = states(found)
    assert told.pop("random streams") == "not compared"
    assert set(told.values()) <= {"equal", "close"}
    assert told["samples"] == "equal"
    assert {"samples", "losses", "weights", "optimizer", "scheduler"} <= set(told)
    assert all((each["largest"] or 0) < 1e-5 for each in found["verdicts"])


@pytest.mark.full
def test_runs_are_launched_as_a_user_would(capsys, launched):
    assert main(["--resume-arguments=--resume", SCRIPT, "--save", "{folder}"]) == EXACT
    assert "bit by bit" in capsys.readouterr().out


@pytest.mark.parametrize("options", [("--processes", "2"), ("--resume-processes", "2")])
def test_a_script_that_saves_all_resumes_exactly(capsys, options):
    status, found = verify(capsys, *options)
    assert status == EXACT
    assert found["first"] is None


def test_a_loader_that_begins_its_epoch_again_is_named(capsys):
    status, found = verify(capsys, fault="order")
    assert status == DIFFERS
    assert (found["first"]["part"], found["first"]["step"]) == ("samples", 5)
    assert states(found)["optimizer"] == "differs"  # as a consequence: the second step begins from another one


def test_a_script_that_saves_weights_alone_is_told_what_is_missing(capsys):
    status, found = verify(capsys, fault="weights only")
    assert status == DIFFERS
    assert found["resumed"]["beginning"] == {"step": 4, "how": "by its weights", "loaded": None}
    assert found["first"]["part"] == "optimizer"
    told = states(found)
    assert {told[part] for part in ("optimizer", "scheduler", "registered objects", "samples", "losses")} == {"differs"}


def test_a_script_that_begins_anew_is_found(capsys):
    assert main(["--resume-arguments=--resume", SCRIPT, "--save", "{folder}", "--fault", "fresh"]) == DIFFERS
    assert "it did not resume" in capsys.readouterr().out


def test_a_script_that_does_not_repeat_itself_is_not_blamed_for_resuming(capsys):
    assert main(["--resume-arguments=--resume", SCRIPT, "--save", "{folder}", "--fault", "unseeded"]) == NO_ANSWER
    error = capsys.readouterr().err
    assert "Two runs of the script that nothing interrupted differ, first in step 1 on rank 0: weights" in error
    assert "set_seed(1)" in error


def test_a_script_that_fails_when_it_resumes_is_shown(capsys):
    assert main(["--resume-arguments=--resume", SCRIPT, "--save", "{folder}", "--fault", "crash"]) == NO_ANSWER
    error = capsys.readouterr().err
    assert "ended with exit status 1 when it was to go on" in error
    assert "RuntimeError: the folder is of another run" in error


@pytest.mark.full
@pytest.mark.skipif(
    any(importlib.util.find_spec(needed) is None for needed in ("tqdm", "matplotlib")),
    reason="tqdm and matplotlib are missing: pip install -r examples/requirements.txt",
)
@pytest.mark.skipif(not QUICKSTART.exists(), reason="the quickstart is a file of the repository")
def test_the_quickstart_resumes_exactly(capsys, launched):
    script = ["--steps", "12", "--every", "4", "--seconds", "inf", "--save", "{folder}", "--out", "{folder}/out"]
    assert main(["--resume-arguments=--resume", str(QUICKSTART), *script]) == EXACT
    assert "bit by bit" in capsys.readouterr().out

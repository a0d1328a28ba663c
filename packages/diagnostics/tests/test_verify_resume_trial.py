"""What `accel verify-resume` says of runs that cannot be judged, and how it compares: over journals written here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_diagnostics.resume import trial
from accel_diagnostics.resume.command import NO_ANSWER, main
from accel_diagnostics.resume.comparison import compare
from accel_diagnostics.resume.digests import Unprepared, digest_state
from accel_diagnostics.resume.journal import RankJournal, Step, Writer, read
from accel_diagnostics.resume.launching import Run, Script
from accel_diagnostics.resume.other_world import compare_worlds
from accel_diagnostics.resume.recorder import row_hashes
from accel_diagnostics.resume.report import as_text
from accel_launch import run_command

SCRIPT = Script("script", "train.py", ("--save", "{folder}"))


def step(number: int, *, ids: list[int] | None = None, loss: float | None = None, **state: str) -> Step:
    """A step whose state and samples tell its number."""
    weights = {"model.0/weight": f"w{number}", "optimizer.0/weight/exp_avg": f"m{number}", **state}
    drawn = [2 * number, 2 * number + 1] if ids is None else ids
    return Step(
        weights, [1.0 / (number + 1) if loss is None else loss], [drawn], [[f"r{each}" for each in drawn]], closed=True
    )


def journal(first: int, last: int, *saves: tuple[int, str], **more) -> RankJournal:
    return RankJournal(
        [step(number) for number in range(first, last)], list(saves), end={"model.0/weight": "w"}, **more
    )


class Runs:
    """Stands for `start`: gives journals in the order of the runs, and no process is started."""

    def __init__(self, root: Path, *runs: tuple[int, list[RankJournal]], leaves: bool = True) -> None:
        self.root, self.runs, self.leaves = root, list(runs), leaves

    def __call__(self, script, root, name, processes, **options):
        status, journals = self.runs.pop(0)
        folder = self.root / name
        folder.mkdir()
        log = folder / "output.txt"
        log.write_text("line 1\nValueError: no such file\n")
        files = self.root / "files"
        files.mkdir(exist_ok=True)
        if self.leaves:
            (files / "model.pt").touch()
        return Run(status, processes, journals, log, files)


def run(monkeypatch, tmp_path, *runs, kill=None, leaves=True, resume_processes=1):
    monkeypatch.setattr(trial, "start", Runs(tmp_path, *runs, leaves=leaves))
    return trial.run_trial(SCRIPT, tmp_path, 1, resume_processes, kill, 1e-3, lambda _: None)


def saved(tmp_path, at: int) -> tuple[int, str]:
    return at, str(tmp_path / "files" / f"checkpoint_{at}")


def whole(tmp_path) -> tuple[int, list[RankJournal]]:
    return 0, [journal(0, 10, saved(tmp_path, 4), saved(tmp_path, 8))]


def killed(tmp_path) -> tuple[int, list[RankJournal]]:
    return 137, [journal(0, 5, saved(tmp_path, 4), killed=True)]


def resumed(tmp_path, *steps: Step) -> tuple[int, list[RankJournal]]:
    made = list(steps) or [step(number) for number in range(4, 10)]
    return 0, [RankJournal(made, loads=[(0, saved(tmp_path, 4)[1])], end={"model.0/weight": "w"})]


def test_equal_journals_are_exact(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, whole(tmp_path), killed(tmp_path), resumed(tmp_path))
    assert outcome.is_exact
    assert outcome.killed_in == 6
    assert "bit by bit" in as_text(outcome)
    assert "from step 5, 6 steps" in as_text(outcome)


@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        (lambda _: [(3, [])], {}, r"exit status 3 although nothing interrupted it:\n(.*\n)*.*no such file"),
        (lambda _: [(0, [])], {}, "built no Accelerator"),
        (lambda _: [(0, [RankJournal()])], {}, "made no step"),
        (
            lambda _: [(0, [journal(0, 3, (2, "/elsewhere/checkpoint_0"))])],
            {},
            "/elsewhere/checkpoint_0, which all runs share",
        ),
        (lambda _: [(0, [journal(0, 9)])], {"leaves": False}, "saved nothing in its 9 steps"),
        (lambda path: [(0, [journal(0, 9, saved(path, 9))])], {}, "saved after its last step only, number 9"),
        (lambda path: [whole(path)], {"kill": 11}, "killed in step 11, and the script ends after 10 steps"),
        (lambda path: [whole(path)], {"kill": 4}, "saves behind step 4 for the first time"),
        (lambda path: [whole(path), (0, [journal(0, 3)])], {}, "ended with exit status 0 before step 6"),
        (lambda path: [whole(path), killed(path), (1, [])], {}, "ended with exit status 1 when it was to go on"),
        (lambda path: [whole(path), killed(path), (0, [RankJournal()])], {}, "The resumed run made no step"),
    ],
)
def test_what_cannot_be_judged_is_said(monkeypatch, tmp_path, runs, options, words):
    with pytest.raises(trial.TrialError, match=words):
        run(monkeypatch, tmp_path, *runs(tmp_path), **options)


def test_a_killed_run_without_a_save_cannot_be_resumed(monkeypatch, tmp_path):
    early = (137, [journal(0, 5, killed=True)])
    with pytest.raises(trial.TrialError, match="killed in step 6 had saved nothing yet"):
        run(monkeypatch, tmp_path, whole(tmp_path), early, leaves=False)


def test_a_script_that_differs_by_itself_is_found_before_it_is_resumed(monkeypatch, tmp_path):
    other = (137, [replace(killed(tmp_path)[1][0], steps=[step(0), step(1, ids=[7, 7]), *map(step, range(2, 5))])])
    with pytest.raises(trial.TrialError, match="differ, first in step 2 on rank 0: samples"):
        run(monkeypatch, tmp_path, whole(tmp_path), other)


def test_a_script_that_differs_by_itself_later_is_found_by_a_fourth_run(monkeypatch, tmp_path):
    wrong = resumed(tmp_path, *map(step, range(4, 9)), step(9, loss=3.0))
    again = (0, [replace(whole(tmp_path)[1][0], steps=[*map(step, range(9)), step(9, loss=2.0)])])
    with pytest.raises(trial.TrialError, match="differ, first in step 10 on rank 0: losses"):
        run(monkeypatch, tmp_path, whole(tmp_path), killed(tmp_path), wrong, again)


def test_a_run_that_begins_anew_did_not_resume(monkeypatch, tmp_path):
    anew = (0, [journal(0, 10)])
    outcome = run(monkeypatch, tmp_path, whole(tmp_path), killed(tmp_path), anew)
    assert not outcome.is_exact
    assert "it did not resume" in as_text(outcome)
    assert "--resume-arguments='--resume'" in as_text(outcome)


@pytest.mark.parametrize(
    ("steps", "part", "words"),
    [
        (
            [step(4, ids=[1, 2]), *map(step, range(5, 10))],
            "samples",
            r"in step 5 on rank 0: samples\n  micro-batch 1: \[1, 2\]",
        ),
        ([step(4), step(5, loss=9.0), *map(step, range(6, 10))], "losses", "in step 6 on rank 0: losses"),
        ([step(4), *map(step, range(5, 9))], "steps", "in step 10 on rank 0: steps\n  the run had ended"),
        ([*map(step, range(4, 11))], "steps", "in step 11 on rank 0: steps\n  1 more steps"),
        (
            [step(4, **{"optimizer.0/weight/exp_avg": "zero"}), *map(step, range(5, 10))],
            "optimizer",
            "optimizer.0/weight/exp_avg: zero\n  uninterrupted: m4",
        ),
    ],
)
def test_the_first_difference_is_named(monkeypatch, tmp_path, steps, part, words):
    found = resumed(tmp_path, *steps)
    outcome = run(monkeypatch, tmp_path, whole(tmp_path), killed(tmp_path), found, whole(tmp_path))
    assert not outcome.is_exact
    assert outcome.comparison.first.part == part
    assert re.search(words, as_text(outcome))


@pytest.mark.parametrize("name", ["object.0['seconds']", "random['python']['state']"])
def test_values_that_differ_in_every_run_are_left_out(monkeypatch, tmp_path, name):
    def varied(run, value):
        for each in run[1][0].steps:
            each.state[name] = str(value)
        return run

    runs = [varied(whole(tmp_path), 1), varied(killed(tmp_path), 2), varied(resumed(tmp_path), 3)]
    outcome = run(monkeypatch, tmp_path, *runs)
    assert outcome.is_exact
    assert outcome.ignored == (name,)


def test_the_same_samples_with_other_contents_differ():
    mine, other = journal(0, 2), journal(0, 2)
    other.steps[1].rows[0][1] = "cropped elsewhere"
    first = compare([mine], [other], 0, frozenset()).first
    assert (first.part, first.step, first.name) == ("samples", 2, "what the model saw of micro-batch 1")


def in_two(number: int, *, first: list[int] | None = None, loss: float = 1.0) -> list[Step]:
    """A step of two ranks, a sample each."""
    ids = first or [2 * number]
    return [step(number, ids=ids, loss=loss), step(number, ids=[2 * number + 1], loss=loss)]


def by_rank(*steps: list[Step]) -> list[RankJournal]:
    return [RankJournal(list(each)) for each in zip(*steps, strict=True)]


def test_worlds_are_compared_by_samples_in_order_and_mean_losses():
    one = [RankJournal([step(number, loss=1.0 + 1e-6) for number in range(2)])]
    found = compare_worlds(by_rank(in_two(0), in_two(1)), one, 0, 1e-3, frozenset())
    told = {each.part: each for each in found.verdicts}
    assert (told["samples"].state, told["losses"].state) == ("equal", "close")
    assert told["losses"].largest == pytest.approx(1e-6, rel=1e-3)
    assert told["weights"].state == "not compared"  # no checkpoint at the end
    off = compare_worlds(by_rank(in_two(0), in_two(1, loss=1.1)), one, 0, 1e-3, frozenset())
    assert (off.first.part, off.first.step) == ("losses", 2)


def test_a_lost_sample_shows_in_another_world():
    one = [RankJournal([step(number) for number in range(2)])]
    found = compare_worlds(by_rank(in_two(0), in_two(1, first=[9])), one, 0, 1e-3, frozenset())
    assert (found.first.part, found.first.step, found.first.expected) == ("samples", 2, [9, 3])


def test_other_global_batches_are_said_to_be_incomparable():
    one = [RankJournal([step(0, ids=[0]), step(0, ids=[1]), step(1, ids=[2]), step(1, ids=[3])])]
    found = compare_worlds(by_rank(in_two(0), in_two(1)), one, 0, 1e-3, frozenset())
    told = {each.part: each for each in found.verdicts}
    assert found.is_exact
    assert told["samples"].state == "equal"
    assert "a step has 2 samples there and 1 here" in told["losses"].detail


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0", __file__], "--processes 0: expected a number of at least 1"),
        (["nothing.py"], "nothing.py was to be run, and there is no such file"),
    ],
)
def test_wrong_arguments_are_refused(capsys, arguments, words):
    assert main(arguments) == NO_ANSWER
    assert words in capsys.readouterr().err


def test_its_options_are_completed(capsys):
    assert run_command(["completion", "bash"]) == 0
    text = capsys.readouterr().out
    (options,) = [line for line in text.splitlines() if line.startswith("_shtab_accel_verify_resume_option_strings=")]
    assert "--kill-step" in options


@pytest.mark.parametrize("folder", ["{home}", "~"])
def test_a_folder_with_files_is_not_mixed_with_new_runs(tmp_path, capsys, monkeypatch, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    assert main([f"--keep={folder.format(home=tmp_path)}", __file__]) == NO_ANSWER
    assert "the folder is not empty" in capsys.readouterr().err


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    writer = Writer(tmp_path, 0)
    writer.write("start", world=1)
    writer.write("micro", closes=True, loss=1.0, ids=[1], rows=["a"])
    writer.close()
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "mic')
    (found,) = read(tmp_path)
    assert found.closed() == 1


def test_rows_are_hashed_by_their_contents():
    batch = {"x": torch.arange(6.0).view(3, 2), "length": torch.tensor([1, 2, 3])}
    moved = {name: each[[2, 0, 1]] for name, each in batch.items()}
    one, other = row_hashes(batch), row_hashes(moved)
    assert len(set(one)) == 3
    assert [one[2], one[0], one[1]] == other
    assert len(row_hashes(torch.tensor(3.0))) == 1


def test_the_digest_of_a_state_changes_with_one_element():
    from accel_core import Accelerator
    from accel_core.api.diagnostics import run_and_feed

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    run, _ = run_and_feed(accelerator)
    before = digest_state(run, Unprepared([], []))
    assert before == digest_state(run, Unprepared([], []))
    with torch.no_grad():
        optimizer.state[model.weight]["exp_avg"][0, 1] += 1e-7
    after = digest_state(run, Unprepared([], []))
    assert [name for name in before if before[name] != after[name]] == ["optimizer.0/0.weight/exp_avg"]

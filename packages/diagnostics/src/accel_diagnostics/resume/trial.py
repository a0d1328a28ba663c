"""The runs of `accel verify-resume`, in order: uninterrupted, killed, resumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel_diagnostics.resume.alignment import Beginning, find_beginning
from accel_diagnostics.resume.comparison import PARTS, Comparison, Difference, compare, differences, place
from accel_diagnostics.resume.launching import FOLDER, Run, Script, start
from accel_diagnostics.resume.other_world import compare_worlds

_MAY_VARY = {"registered objects", "random streams"}  # what is drawn from a stream shows in samples, weights and losses


class TrialError(ValueError):
    """Nothing can be said of resuming: what was found of the script, and what to type next."""


@dataclass(frozen=True)
class Outcome:
    """The three runs, and what was found. `beginning` None: the resumed run began as a new one does.

    `killed_in` is the step, from 1; `ignored` are names that differ between uninterrupted runs too.
    """

    whole: Run
    killed: Run
    resumed: Run
    killed_in: int
    beginning: Beginning | None
    comparison: Comparison | None
    ignored: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the resumed run was what the uninterrupted one is."""
        return self.comparison is not None and self.comparison.is_exact


def run_trial(
    script: Script,
    root: Path,
    processes: int,
    resume_processes: int,
    kill_in: int | None,
    tolerance: float,
    say: Callable[[str], None],
) -> Outcome:
    """Runs the script three times; a fourth time where what is found may be its own randomness."""
    moves = processes != resume_processes
    say(f"run 1 of 3: uninterrupted, processes: {processes}")
    whole = start(script, root, "whole", processes, saves_end=moves)
    _check_whole(whole)
    killed_in = _choose_step(whole) if kill_in is None else kill_in
    _check_step(whole, killed_in)
    say(f"run 2 of 3: killed in step {killed_in} of {whole.steps}")
    killed = start(script, root, "killed", processes, kill_at=killed_in - 1)
    _check_killed(killed, killed_in)
    ignored = _own_variation(whole, killed, killed_in - 1)
    say(f"run 3 of 3: resumed, processes: {resume_processes}")
    resumed = start(script, root, "resumed", resume_processes, resumes=killed.files, saves_end=moves)
    began = bool(resumed.journals) and bool(resumed.journals[0].steps)
    beginning = find_beginning(whole.journals, killed.journals, resumed.journals) if began else None
    if not began or beginning is not None:  # a run that began anew may fail where its checkpoints are there already
        _check_resumed(resumed)
    if beginning is None:
        return Outcome(whole, killed, resumed, killed_in, None, None, tuple(sorted(ignored)))

    def compared() -> Comparison:
        if moves:
            return compare_worlds(whole.journals, resumed.journals, beginning.step, tolerance, ignored)
        return compare(whole.journals, resumed.journals, beginning.step, ignored)

    comparison = compared()
    if not comparison.is_exact:
        say("a difference was found; one more run, uninterrupted, shows whether the script repeats itself")
        again = start(script, root, "again", processes)
        _check_whole(again)
        ignored |= _own_variation(whole, again, None)
        comparison = compared()
    return Outcome(whole, killed, resumed, killed_in, beginning, comparison, tuple(sorted(ignored)))


def _check_whole(run: Run) -> None:
    if run.status:
        raise TrialError(
            f"The script ended with exit status {run.status} although nothing interrupted it:\n{run.tail()}\n"
            f"Make it run with `accel launch` first, and then verify that it resumes."
        )
    if not run.journals:
        raise TrialError(
            f"The script built no Accelerator, so there is nothing to observe:\n{run.tail()}\nGive the script that trains."
        )
    if not run.steps:
        raise TrialError(
            "The script made no step: accelerator.backward(loss) was never called. Give it arguments with which it trains "
            "for some steps."
        )
    outside = [folder for _, folder in run.journals[0].saves if run.files.resolve() not in Path(folder).parents]
    if outside:
        raise TrialError(
            f"The script saved in {outside[0]}, which all runs share: the resumed run could go on from another run's checkpoint. "
            f"Write {FOLDER} for the folder among its arguments, or, if it saves relative to the working directory, add --own-directory."
        )
    if not run.left_files:
        raise TrialError(
            f"The script saved nothing in its {run.steps} steps: it did not call accelerator.save_state(), and left no file in "
            f"{FOLDER}. Give it the arguments with which it saves, with {FOLDER} for the folder, such as: --save {FOLDER} --every 5"
        )


def _choose_step(whole: Run) -> int:
    """A step, from 1, that is not directly behind a save, so that the resumed run repeats a step."""
    saves = [step for step in whole.saves if step < whole.steps]
    if not whole.saves:  # in a format of the script's own
        return max(2, 2 * whole.steps // 3)
    if not saves:
        raise TrialError(
            f"The script saved after its last step only, number {whole.steps}, so a run that is killed has nothing to go on "
            f"from. Have it save more often, or train for more steps."
        )
    middle = min(saves, key=lambda step: abs(step - whole.steps / 2))
    return min(middle + 2, whole.steps)


def _check_step(whole: Run, killed_in: int) -> None:
    if killed_in > whole.steps:
        raise TrialError(
            f"The run was to be killed in step {killed_in}, and the script ends after {whole.steps} steps. Give --kill-step a "
            f"smaller number, or have the script train for more steps."
        )
    if whole.saves and whole.saves[0] >= killed_in:
        raise TrialError(
            f"The run was to be killed in step {killed_in}, and the script saves behind step {whole.saves[0]} for the first time: "
            f"nothing would be there to go on from. Give --kill-step a larger number, or have it save more often."
        )


def _check_killed(run: Run, killed_in: int) -> None:
    if not any(each.killed for each in run.journals):
        raise TrialError(
            f"The second run ended with exit status {run.status} before step {killed_in}, in which it was to be killed. Either "
            f"the script does not repeat itself, or it ends by the clock: give it a number of steps.\n{run.tail()}"
        )
    if not run.left_files:
        raise TrialError(
            f"The run that was killed in step {killed_in} had saved nothing yet. Give --kill-step a larger number, or have the "
            f"script save more often."
        )


def _check_resumed(run: Run) -> None:
    if run.status:
        raise TrialError(
            f"The script ended with exit status {run.status} when it was to go on from what the killed run had saved:\n{run.tail()}"
        )
    if not run.steps:
        raise TrialError(
            f"The resumed run made no step: it took the killed run for one that had ended.\n{run.tail()}\nSee what it loads, "
            f"and which step it takes that for."
        )


def _own_variation(one: Run, other: Run, end: int | None) -> frozenset[str]:
    """The names of values that differ between two uninterrupted runs and change no training.

    They are registered values, such as times, and random streams that the script never seeded.
    TrialError if anything else does.
    """
    found = list(differences(one.journals, other.journals, 0, end))
    real = [each for each in found if each.part not in _MAY_VARY]
    if real:
        first = min(real, key=lambda each: (each.step or math.inf, PARTS.index(each.part), each.rank))
        raise TrialError(_not_deterministic(first))
    return frozenset(each.name for each in found)


def _not_deterministic(first: Difference) -> str:
    return (
        f"Two runs of the script that nothing interrupted differ, first {place(first)}: {first.part}, {first.name}: {first.expected} "
        f"and {first.found}. So nothing can be said of resuming. Call set_seed(1) before the model is built, take no step by the clock, "
        f"and on an accelerator ask for torch.use_deterministic_algorithms(True)."
    )

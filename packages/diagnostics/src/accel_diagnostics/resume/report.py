"""What `accel verify-resume` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accel_core.api.checkpoint import format_table
from accel_diagnostics.resume.comparison import SAW, Difference, place

if TYPE_CHECKING:
    from accel_diagnostics.resume.launching import Run
    from accel_diagnostics.resume.trial import Outcome

_SHOWN = 160  # characters of a value

_ADVICE = {
    "steps": "Let the loop count its steps from what was loaded: register the counter with accelerator.register_for_checkpointing(counter).",
    "weights": "Load them before the first step, and after prepare(): accelerator.load_state() restores all that save_state() saved.",
    "optimizer": "Its state was not saved, or not loaded: pass it to prepare(), and call accelerator.load_state() after that.",
    "scheduler": "It was not saved, or not loaded: pass it to prepare(), or to accelerator.register_for_checkpointing(scheduler).",
    "registered objects": "See what its state_dict() leaves out, and whether the script changes it after load_state().",
    "components": "See what its state_dict() leaves out.",
    "random streams": "accelerator.load_state() restores them; see what draws random numbers, or sets a seed, after it.",
    "samples": "Prepare the loader, so that its position is saved; and let the order depend on the seed and the epoch alone.",
    "losses": "State and samples are equal, so the forward depends on something that is not saved: another random source, a "
    "module's plain attribute, or an operation that does not repeat itself.",
}


def as_json(outcome: Outcome) -> dict[str, Any]:
    """All that was found."""
    comparison = outcome.comparison
    return {
        "exact": outcome.is_exact,
        "whole": _run(outcome.whole),
        "killed": {**_run(outcome.killed), "in step": outcome.killed_in},
        "resumed": {**_run(outcome.resumed), "beginning": outcome.beginning and outcome.beginning._asdict()},
        "verdicts": [] if comparison is None else [asdict(each) for each in comparison.verdicts],
        "first": comparison and comparison.first and asdict(comparison.first),
        "others": [] if comparison is None else [asdict(each) for each in comparison.others],
        "not compared": list(outcome.ignored),
    }


def as_text(outcome: Outcome) -> str:
    """What ran, what is equal, and where it first differs."""
    whole, killed, resumed = outcome.whole, outcome.killed, outcome.resumed
    lines = [
        f"uninterrupted  {_world(whole)}, {whole.steps} steps{_saves(whole)}",
        f"killed         {_world(killed)}, in step {outcome.killed_in}{_saves(killed)}",
    ]
    if outcome.beginning is None:
        return "\n".join([*lines, f"resumed        {_world(resumed)}, {resumed.steps} steps", "", *_not_resumed()])
    assert outcome.comparison is not None
    begin, how, _ = outcome.beginning
    how = "" if how == "loaded" else f" (known {how})"
    lines.append(f"resumed        {_world(resumed)}, from step {begin + 1}{how}, {resumed.steps} steps")
    rows = [(each.part, _state(each.state, each.largest), each.detail) for each in outcome.comparison.verdicts]
    lines += ["", format_table(("what", "", ""), rows), ""]
    if outcome.ignored:
        lines.append(f"Not compared, because they differ between uninterrupted runs too: {', '.join(outcome.ignored)}.")
    moves = whole.processes != resumed.processes
    lines += _first(outcome.comparison.first, moves) if outcome.comparison.first else [_exact(outcome)]
    if any(each.accelerators > 1 for each in whole.journals):
        lines.append("The script builds several Accelerators; the first alone was observed.")
    return "\n".join(lines)


def _exact(outcome: Outcome) -> str:
    assert outcome.comparison is not None
    if outcome.whole.processes == outcome.resumed.processes:
        return "The resumed run is the uninterrupted one, bit by bit."
    open_ = [each.part for each in outcome.comparison.verdicts if each.state == "not compared"]
    rest = [part for part in open_ if part != "random streams"]
    if rest:
        return f"Nothing differs of what could be compared between these worlds; not compared: {', '.join(rest)}."
    return "The resumed run is the uninterrupted one, but for the rounding of another world."


def _not_resumed() -> list[str]:
    return [
        "The resumed run began with the first step, from the weights of a new run: it did not resume.",
        "Say how the script is told to: --resume-arguments='--resume', say; or let it call accelerator.load_state().",
    ]


def _first(first: Difference, moves: bool) -> list[str]:
    about = f"{first.name}: " if first.name else ""
    lines = [
        f"First difference {place(first)}: {first.part}",
        f"  {about}{_short(first.found)}",
        f"  uninterrupted: {_short(first.expected)}",
    ]
    if first.name.startswith("unprepared"):
        lines.append(f"  The script made this {first.part} and did not prepare it.")
    return [*lines, _advice(first, moves)]


def _advice(first: Difference, moves: bool) -> str:
    if first.part == "losses" and moves:
        return (
            "Samples are equal, so the forward depends on how the samples are divided among processes, as dropout does, and BatchNorm "
            "without torch.nn.SyncBatchNorm; or on something that is not saved: with the same number of processes, that would differ, too."
        )
    if first.part == "optimizer" and "groups']" in first.name:
        return (
            "It was changed after accelerator.load_state(), by a scheduler that is made or by a learning rate that is set then. Make "
            "schedulers before load_state(), and pass them to prepare()."
        )
    if first.part == "samples" and first.name.startswith(SAW):
        return (
            "The samples are the same, and what was made of them is not: the dataset draws random numbers, as for augmentation, in workers "
            "of the loader or from a generator of its own, which no checkpoint has. Seed a generator from the epoch and the sample's index."
        )
    if first.part == "weights" and first.rank:
        return f"{_ADVICE['weights']} Of buffers that is what rank 0 had: torch.nn.SyncBatchNorm keeps them equal."
    return _ADVICE[first.part]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _state(state: str, largest: float | None) -> str:
    return f"{state}, at most {largest:.1e} apart" if largest and state == "close" else state


def _world(run: Run) -> str:
    return "1 process" if run.processes == 1 else f"{run.processes} processes"


def _saves(run: Run) -> str:
    return f", saved after {', '.join(map(str, run.saves))}" if run.saves else ""


def _run(run: Run) -> dict[str, Any]:
    return {
        "processes": run.processes,
        "steps": run.steps,
        "status": run.status,
        "saves": [[step, folder] for step, folder in run.journals[0].saves],
        "files": str(run.files),
        "output": str(run.log),
    }

"""examples/quickstart.py goes on: behind kills at random moments, on other numbers of processes, and when it is told to stop."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from quickstart_job import EVERY, SEQUENCES, STEPS, Life, live
from test_quickstart import SCRIPT, table
from test_resume import killed

from accel_testing import run_ranks

LIVES = (2, 2, 2, 4, 1, 2)
"""The processes of each life; all but the last are killed."""
EQUAL = 3
"""How many of the first lives have as many processes as the run that is not killed."""
EPOCH = SEQUENCES // 4
"""Micro-batches."""

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(needed) is None,
        reason=f"{needed} is missing: pip install -r examples/requirements.txt",
    )
    for needed in ("tqdm", "matplotlib")
]


def journal(folder: Path, life: int) -> dict[int, list[list[int]]]:
    """The micro-batches of each step that a life began, as the numbers of the sequences."""
    steps: dict[int, list[list[int]]] = {}
    for step, ids in map(json.loads, (folder / f"life-{life}.jsonl").read_text().splitlines()):
        steps.setdefault(step, []).append(ids)
    return steps


def curves(folder: Path, world: int) -> tuple[list[float], list[tuple[int, float]]]:
    result = json.loads((folder / "out" / f"quickstart-{world}.json").read_text())
    assert result["samples validated"] == 9
    return result["train"], [tuple(point) for point in result["valid"]]


@pytest.mark.timeout(240)
@pytest.mark.full
def test_killed_at_random_moments_it_trains_on_each_sequence_once_an_epoch(tmp_path: Path) -> None:
    """The issue's sentence. What counts is the timeline that survives: of each step, the last life that made it."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    run_ranks(live, 2, whole, Life(0, dies=False))
    for number, world in enumerate(LIVES[:-1]):
        killed(live, world, broken, Life(number, dies=True), timeout=60)
    run_ranks(live, LIVES[-1], broken, Life(len(LIVES) - 1, dies=False))

    lives = [journal(broken, number) for number in range(len(LIVES))]
    starts = [min(steps) for steps in lives]
    assert starts[0] == 0
    for before, start in zip(lives, starts[1:], strict=False):
        begun = max(before)  # what was to be saved before this step was; the kill may have come inside the next save
        assert start in (begun // EVERY * EVERY, (begun + 1) // EVERY * EVERY)
    assert len(set(starts)) > 3, "the kills left something to go on from"

    survivors = {step: micro_batches for steps in lives for step, micro_batches in steps.items()}
    timeline = [ids for step in range(STEPS) for ids in survivors[step]]
    uninterrupted = journal(whole, 0)
    # Of a micro-batch, the ranks of each world have read the same sequences, in another order.
    assert [sorted(ids) for ids in timeline] == [sorted(ids) for step in range(STEPS) for ids in uninterrupted[step]]
    for first in range(0, len(timeline), EPOCH):
        epoch = [sequence for ids in timeline[first : first + EPOCH] for sequence in ids]
        assert len(epoch) == len(set(epoch))
        assert len(epoch) == SEQUENCES or first + EPOCH > len(timeline)

    (train, valid), (expected_train, expected_valid) = curves(broken, LIVES[-1]), curves(whole, 2)
    equal = starts[EQUAL]
    assert equal > 0
    assert train[:equal] == expected_train[:equal]
    assert train == pytest.approx(expected_train, rel=1e-4)
    assert [step for step, _ in valid] == [step for step, _ in expected_valid]
    assert [bits for _, bits in valid] == pytest.approx([bits for _, bits in expected_valid], rel=1e-4)


def shown_until(process: subprocess.Popen[bytes], pattern: str) -> str:
    """What a process has written, as soon as the pattern is in it, or it has ended."""
    assert process.stdout is not None
    shown = ""
    while chunk := process.stdout.read1(4096):  # type: ignore[attr-defined]
        shown += chunk.decode(errors="replace")
        if re.search(pattern, shown):
            break
    return shown


@pytest.mark.timeout(240)
@pytest.mark.full
def test_told_to_stop_it_saves_and_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    """SIGTERM to the launcher, as a scheduler sends it; --resume in one process then has the rest of the budget."""
    script = [str(SCRIPT), "--seconds", "inf", "--save", "run", "--out", "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [sys.executable, *launcher, *script],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as stopped:
        shown = shown_until(stopped, "step 2,")
        stopped.send_signal(signal.SIGTERM)
        shown += shown_until(stopped, "$^")
    saved = re.findall(r"saved step (\d+) in (\S+)", shown)
    assert len(saved) == 1, shown
    step = int(saved[0][0])
    assert Path(saved[0][1]) == tmp_path / "run" / "checkpoints" / "checkpoint_0"
    assert "samples validated" not in shown
    assert not (tmp_path / "out").exists(), "the run is not over"

    ended = subprocess.run(
        [sys.executable, *script, "--resume", "--steps", str(step + 2)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"resumed at step {step}\n" in ended.stdout
    assert table(ended.stdout)["steps"] == str(step + 2)
    result = json.loads((tmp_path / "out" / "quickstart-1.json").read_text())
    assert len(result["train"]) == step + 2
    assert result["valid"][0][0] == 0


def test_going_on_needs_the_folder(tmp_path: Path) -> None:
    """An option that could not act is refused."""
    command = [sys.executable, str(SCRIPT), "--resume"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "--resume needs --save DIR" in ended.stderr

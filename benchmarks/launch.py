"""Starting measuring processes, and collecting their rounds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

Round = dict[str, dict[str, float]]
HERE = Path(__file__).parent


def measure(
    script: str,
    libraries: Sequence[str],
    *,
    world: int,
    repeats: int,
    rounds: int,
    batches: int,
    accumulation: int = 1,
    size: int = 0,
) -> list[Round]:
    """Runs a worker `repeats` times, for where memory happens to lie makes a process as such faster or slower.

    `size` is that of the state which is saved, in MiB. Returns all rounds of all processes; of several ranks, the mean.
    """
    arguments = ["--libraries", ",".join(libraries), "--rounds", rounds, "--batches", batches]
    arguments += ["--accumulation", accumulation, "--size", size]
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as out:
            _run([HERE / script, *arguments, "--out", out], world)
            ranks = [json.loads((Path(out) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]
        found += [_mean(rounds_of_ranks) for rounds_of_ranks in zip(*ranks, strict=True)]
    return found


def _run(command: Sequence[object], world: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world] if world > 1 else []
    full = [str(part) for part in (sys.executable, *launcher, *command)]
    ended = subprocess.run(
        full, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=300
    )
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(full)} failed:\n{ended.stdout}{ended.stderr}")


def _mean(ranks: Sequence[Round]) -> Round:
    return {
        name: {figure: statistics.fmean(rank[name][figure] for rank in ranks) for figure in figures}
        for name, figures in ranks[0].items()
    }

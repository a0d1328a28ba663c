"""Runs checks one after the other, each in processes of its own, and prints and keeps what came of them.

Started alone it starts a process for each device of this machine. Started by a launcher, each of these processes starts one for
itself, and they agree on a port and on the result: so the same checks run on several machines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from acceptance.rank import machine_facts, run_check
from acceptance.registry import Check

from accel_core.processes.launch_environment import Place, read_place
from accel_testing import RankReport, RanksFailed, run_ranks
from accel_testing.ranks import preload

LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "MV2_", "MPI_", "ROLE_", "GROUP_")
"""Beginnings of variables by which a launcher, or an option, would reach the processes of a check."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that ranks of tests are given to hide devices from them."""

GRACE = 20.0
"""Seconds that ranks have to be told of the one that has failed: the Watch looks for ten, where only a device waits."""

SHOWN = 4000
"""Characters of a rank's output that a report keeps."""


@dataclass(frozen=True)
class Result:
    """What came of a check."""

    check: str
    verdict: str  # PASS, FAIL or SKIP
    text: str  # figures, what failed, or why it was left out
    size: int  # processes
    seconds: float
    ranks: list[dict[str, Any]]  # how each ended, and what it wrote, where one failed

    def __str__(self) -> str:
        name = f"{self.check}[{self.size}]" if self.size else self.check
        return f"{self.verdict}  {name:<36}{self.seconds:6.1f} s  {self.text}".rstrip()


class Session:
    """The processes that take part, and the results so far."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.place = read_place(os.environ)
        self.results: list[Result] = []
        preload("accel_fsdp.strategy", "accel_precision", "accel_data", "torch.distributed.fsdp", "acceptance.rank")
        self.launched = self.place.size > 1
        (facts,) = run_ranks(
            machine_facts, 1, options.imports, options.cpu, timeout=120, env=self._cleared(), devices=True
        )
        if self.launched:
            from accel_core import World

            self._world = World.current(cpu=True, timeout=timedelta(hours=2))
        self.machines = self._of_all(facts)
        count = self.place.size if self.launched else facts["count"] or self.options.devices or 2
        self.machine = facts | {"devices": min(count, options.devices or count), "quick": options.quick}
        self.print(
            f"{self.machine['devices']} × {(facts['names'] or ['CPU'])[0]}, torch {facts['torch']}, on {facts['host']}"
        )

    def run(self, checks: Sequence[Check]) -> None:
        given = self.options.folder or Path(tempfile.mkdtemp(prefix="acceptance-"))
        (folder,) = self._of_all(str(given))[:1]
        try:
            for check in checks:
                self.results.append(self._result(check, Path(folder) / check.name))
                self.print(str(self.results[-1]))
        finally:
            if not self.options.folder:
                shutil.rmtree(given, ignore_errors=True)

    def conclude(self) -> int:
        """Prints the summary; the exit status."""
        counts = {
            verdict: sum(each.verdict == verdict for each in self.results) for verdict in ("PASS", "FAIL", "SKIP")
        }
        self.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
        for each in self.results:
            if each.verdict == "FAIL":
                self.print(f"\n{each}" + "".join(f"\n  rank {rank['rank']} {rank['state']}" for rank in each.ranks))
        return min(counts["FAIL"], 100)

    def write(self, path: Path) -> None:
        if self.place.rank == 0:
            versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
            kept = {
                name: versions[name]
                for name in sorted(versions)
                if name.startswith(("accel", "torch", "nvidia", "triton"))
            }
            found = {"machines": self.machines, "versions": kept, "results": [asdict(each) for each in self.results]}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
            self.print(f"The report stands in {path}.")

    def print(self, text: str) -> None:
        if self.place.rank == 0:
            print(text, flush=True)

    def _result(self, check: Check, folder: Path) -> Result:
        if reason := check.lacks(self.machine):
            return Result(check.name, "SKIP", reason, 0, 0.0, [])
        size, began = check.size(self.machine["devices"]), time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        verdict, text, ranks = "PASS", "", []
        for stage in range(check.stages):
            reports, values = self._started(check, size, folder, stage)
            verdict, text = judged(check, reports, values)
            if verdict != "PASS":
                ranks = [shortened(each) for each in reports] if verdict == "FAIL" else []
                break
        return Result(check.name, verdict, text, size, time.monotonic() - began, ranks)

    def _started(
        self, check: Check, size: int, folder: Path, stage: int
    ) -> tuple[list[RankReport], list[tuple[str, str]]]:
        """How the ranks of a check ended, and what those returned that did."""
        where = {"stage": stage, "folder": folder, "cpu": self.options.cpu, "quick": self.options.quick}
        arguments = (check.name, check.function.__module__, self.options.imports, self.machine["kind"])
        seconds = check.seconds * self.options.patience
        if not self.launched:
            env = self._cleared()
            return outcome(size, arguments, where, seconds, env)
        with self._port() as (address, port):
            found: tuple[list[RankReport], list[tuple[str, str]]] = ([], [])
            if self.place.rank < size:
                env = self._cleared() | variables(self.place, size, address, port)
                found = outcome(1, arguments, where, seconds, env)
            everybody = self._of_all(found)
        reports = [
            RankReport(**{**vars(report), "rank": rank})
            for rank, (reports, _) in enumerate(everybody)
            for report in reports
        ]
        return reports, [value for _, values in everybody for value in values]

    @staticmethod
    def _cleared() -> dict[str, Any]:
        """Without what launchers and options have left, which every check says for itself; with the devices that are to be seen."""
        seen = {name: os.environ.get(name) for name in VISIBLE}
        return {name: None for name in os.environ if name.startswith(LAUNCHERS)} | seen

    def _of_all(self, value: Any) -> list[Any]:
        if not self.launched:
            return [value]
        from accel_core import gather_object

        return list(gather_object([value]))

    @contextmanager
    def _port(self) -> Iterator[tuple[str, int]]:
        """Where the ranks of a check meet: at a port of the machine of rank 0 that is free."""
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            address = urlsplit(self.place.meeting_point()).hostname
            yield self._of_all((address, holder.getsockname()[1]))[0]


def variables(place: Place, size: int, address: str, port: int) -> dict[str, str]:
    """The variables of one rank of a launched world, or of its first ranks."""
    local = min(place.local_size, size)
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def outcome(
    size: int, arguments: tuple[Any, ...], where: Mapping[str, Any], seconds: float, env: Mapping[str, Any]
) -> tuple[list[RankReport], list[tuple[str, str]]]:
    try:
        with redirect_stdout(StringIO()):  # what passing ranks have written is not asked for
            values = run_ranks(
                run_check, size, *arguments, timeout=seconds, grace=GRACE, env=env, devices=True, **where
            )
    except RanksFailed as error:
        return error.reports, []
    return [RankReport(rank, "returned", False, 0, "", "", "") for rank in range(size)], values


def judged(check: Check, reports: Sequence[RankReport], values: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The verdict over all ranks, and what stands behind it."""
    if check.judge is not None and not any(verdict == "SKIP" for verdict, _ in values):
        try:
            return "PASS", check.judge(reports) or ""
        except AssertionError as error:
            return "FAIL", one_line(str(error))
    if failed := [each for each in reports if each.failed]:
        first = next((each for each in failed if each.traceback), failed[0])
        return "FAIL", one_line(f"rank {first.rank} {raised(first) or first.state}")
    return next((value for value in values if value[0] == "SKIP"), values[0])


def raised(report: RankReport) -> str:
    """The exception that ended a rank, from the line with its name on; empty if there is none."""
    lines = report.traceback.splitlines()
    named = [number for number, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(: |$)", line)]
    return "raised: " + "\n".join(lines[named[-1] :]) if named else ""


def one_line(text: str) -> str:
    found = " ".join(text.split())
    return found if len(found) <= 300 else f"{found[:300]} …"


def shortened(report: RankReport) -> dict[str, Any]:
    return {**asdict(report), "output": report.output[-SHOWN:], "stacks": report.stacks[-SHOWN:]}

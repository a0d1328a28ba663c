"""The board on which ranks post what they say of themselves, in the store at which they have met."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from accel_core.processes.watch.diagnosis import Report
from accel_core.processes.watch.stack_location import Process

if TYPE_CHECKING:
    from torch.distributed import Store

_JUDGED = 1 << 40  # added to the counter of questions once there is a verdict: one message tells both


class Board:
    """One rank's access to the board, over a connection of its own. Methods raise `DistError` if the store has gone."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._lease = ""

    def introduce(self, process: Process) -> None:
        """Says which process this rank is."""
        self._store.set(f"process/{self._rank}", json.dumps(process.to_dict()))

    def process(self, rank: int) -> Process | None:
        """The process of a rank; None if the rank has not announced it yet."""
        text = self._read(f"process/{rank}")
        return Process(**json.loads(text)) if text else None

    def host(self, patience: timedelta) -> Process | None:
        """The process of rank 0; None if not announced after `patience`: rank 0 may make no World at all."""
        try:
            self._store.wait(["process/0"], patience)
        except dist.DistStoreError:
            return None
        return self.process(0)

    def ask(self, asking: bool) -> tuple[int, bool]:
        """Asks the others to report, or only looks: a number that grows with each question, and whether there is a verdict."""
        count = self._store.add("asked", int(asking))
        return count % _JUDGED, count >= _JUDGED

    def post(self, report: Report) -> None:
        """Puts up this rank's report, in place of its last one."""
        self._store.set(f"report/{self._rank}", report.to_json())

    def report(self, rank: int) -> Report | None:
        """The last report of a rank; None if it has not made any."""
        text = self._read(f"report/{rank}")
        return Report.from_json(text) if text else None

    def lead(self) -> bool:
        """Whether this rank judges: the one that asked first, until it does so no more. Two for a moment see the same."""
        found = self._read("judge")
        holder, _, beat = found.partition(" ")
        mine = holder == str(self._rank)
        if not mine and found and found != self._lease:
            self._lease = found  # it was renewed since the last look
            return False
        self._store.set("judge", f"{self._rank} {int(beat or 0) + 1}")
        return True

    def judge(self, text: str) -> str:
        """Publishes a verdict. Returns the one that holds: the first."""
        held = str(self._store.compare_set("verdict", "", text).decode())
        if held == text:
            self._store.add("asked", _JUDGED)
        return held

    def verdict(self) -> str:
        """The verdict; empty if there is none."""
        return self._read("verdict")

    def acknowledge(self) -> None:
        """Says that this rank has read the verdict, or has got another answer, and needs the board no more."""
        self._store.set(f"read/{self._rank}", "")

    def linger(self, size: int, patience: timedelta) -> None:
        """Waits until all ranks that still run need the board no more; not for longer than `patience`."""
        deadline = time.monotonic() + patience.total_seconds()
        waited_for = set(range(size)) - {self._rank}
        while waited_for and time.monotonic() < deadline:
            waited_for = {rank for rank in waited_for if not self._is_done(rank)}
            time.sleep(0.02)

    def _is_done(self, rank: int) -> bool:
        if self._store.check([f"read/{rank}"]):
            return True
        process = self.process(rank)
        return process is not None and process.state() in ("gone", "stopped")

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

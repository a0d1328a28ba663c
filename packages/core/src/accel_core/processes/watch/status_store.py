"""What ranks say of themselves, in the store at which they have met."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta

import torch.distributed as dist

from accel_core.processes.failure_output import described
from accel_core.processes.watch.diagnosis import Report
from accel_core.processes.watch.stack_location import Process

_JUDGED = 1 << 40  # added to the counter of questions once there is a verdict: one message tells both


class StatusStore:
    """One rank's access, by its own connection. Unless said else, `DistError` without a store."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._lease = ""

    def introduce(self, process: Process) -> None:
        """Says which process this rank is."""
        self._store.set(f"process/{self._rank}", json.dumps(process))

    def process(self, rank: int, patience: timedelta = timedelta(0)) -> Process | None:
        """The process of a rank; None if not announced after `patience`, as without a World."""
        if patience:
            with contextlib.suppress(dist.DistStoreError):
                self._store.wait([f"process/{rank}"], patience)
        text = self._read(f"process/{rank}")
        return Process(*json.loads(text)) if text else None

    def ask(self, asking: bool) -> tuple[int, bool]:
        """Asks for reports, or only looks: the number of questions; whether there is a verdict."""
        count = self._store.add("asked", int(asking))
        return count % _JUDGED, count >= _JUDGED

    def post(self, report: Report) -> None:
        """Puts this rank's report in place of its last one."""
        self._store.set(f"report/{self._rank}", json.dumps(report))

    def report(self, rank: int) -> Report | None:
        """The last report of a rank; None if it has not made any."""
        text = self._read(f"report/{rank}")
        return Report.from_json(text) if text else None

    def lead(self) -> bool:
        """Whether this rank judges: the first to ask, while it does; for a moment two may."""
        found = self._read("judge")
        holder, _, beat = found.partition(" ")
        if found and holder != str(self._rank) and found != self._lease:
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

    def post_failure(self, error: BaseException) -> None:
        """Says which error ends this rank, if the store is still there."""
        with contextlib.suppress(dist.DistError):
            notice = json.dumps([self._rank, described(error)])
            self._store.set(f"failure/{self._store.add('failures', 1)}", notice)

    def failures(self) -> str:
        """Errors that have ended other ranks, as a paragraph; empty without any, or no store."""
        errors: dict[int, str] = {}
        with contextlib.suppress(dist.DistError):
            for number in range(1, self._store.add("failures", 0) + 1):
                if notice := self._read(f"failure/{number}"):  # else its rank was killed between counting and writing
                    rank, error = json.loads(notice)
                    errors[rank] = error
        errors.pop(self._rank, None)
        told = "; ".join(f"rank {rank} failed: {error}" for rank, error in sorted(errors.items()))
        mend = "Mend that one: the error of this rank only follows from it."
        return f"The connection broke because {told}\n{mend}" if errors else ""

    def acknowledge(self) -> None:
        """Says, if there is a store, that this rank has its answer, and needs the store no more."""
        with contextlib.suppress(dist.DistError):
            self._store.set(f"read/{self._rank}", "")

    def linger(self, size: int, patience: timedelta) -> None:
        """Waits until running ranks need the store no more, `patience` at most."""
        deadline = time.monotonic() + patience.total_seconds()
        waited_for = set(range(size)) - {self._rank}
        while waited_for and time.monotonic() < deadline:
            waited_for = {rank for rank in waited_for if not self._is_done(rank)}
            time.sleep(0.02)

    def _is_done(self, rank: int) -> bool:
        process = self.process(rank)
        return self._store.check([f"read/{rank}"]) or (process is not None and process.state() in ("gone", "stopped"))

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

"""What a device has not finished: an event behind each window, and torch's flight recorder."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
from torch._C import _distributed_c10d

from accel_core.processes.watch.diagnosis import WAITING, Call

_DUMP = "_dump_{}_trace_json"  # functions of torch, by backend; a build has those of its backends, and "fr" for gloo
_NUMBERS = ("last_enqueued_collective", "last_completed_collective")


class DeviceMark:
    """The training thread records where its windows end in the device's queue; the Watch looks.

    A `backend` with a flight recorder of its own says more: whether a collective waits for others.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self._windows, self._event = 0, torch.Event(device)
        self._recorder: Any = getattr(_distributed_c10d, _DUMP.format(backend), None)
        self.issued = 0  # the backend's collectives in the default group so far; windows where it does not count them
        self._seen: object = 0
        self._since = self._age = self._usual = 0.0
        self._reached = True

    def record(self) -> None:
        """All work of a window has been given to the device."""
        self._event.record()
        self._windows += 1

    def look(self, now: float, line: str) -> Call | None:
        """What takes twice as long as what was there before it; None without. By one thread."""
        found = json.loads(self._recorder(includeCollectives=False)).get("pg_status") if self._recorder else None
        counted = {group: [int(each[name]) for name in _NUMBERS] for group, each in (found or {}).items()}
        seen = counted or self._windows
        if seen != self._seen:
            self._seen, self._since, self._reached = seen, now, False
            self._usual, self._age = self._age, 0.0
        self.issued = counted.get("0", [0])[0] if counted else self._windows
        if counted:
            self._reached = all(given <= done for given, done in counted.values())
        elif not self._reached:  # asked no more afterwards: CUDA forbids it, to any thread, while a graph is captured
            with contextlib.suppress(RuntimeError):  # the device has failed, which the next call of the script says
                self._reached = self._event.query()
        if self._reached:
            return None
        self._age = now - self._since
        name = "a collective" if counted else "backward()"
        call = Call(name, self._age, line, since=self._since, issued=max(1, self.issued))
        return call if self._age >= max(WAITING, 2 * self._usual) else None

    def collective(self) -> tuple[str, int, str]:
        """The oldest collective that is not done, else the last: name, number, its group."""
        dump: Any = self._recorder or getattr(_distributed_c10d, _DUMP.format("fr"))
        entries = json.loads(dump()).get("entries") or [{}]
        last = next((each for each in entries if not each.get("retired")), entries[-1])
        # The recorder of another backend, below ours, does not know the names of our groups.
        group = last.get("process_group", [""])[0] if self._recorder else ""
        return last.get("profiling_name", ""), int(last.get("collective_seq_id", 0)), group

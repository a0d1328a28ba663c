"""What a device has not finished: an event behind each window, and torch's flight recorder."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import torch
from torch._C import _distributed_c10d

from accel_core.processes.watch.diagnosis import WAITING, Call

_DUMP = "_dump_{}_trace_json"  # functions of torch: a build has those of its backends, and "fr" of gloo
_NUMBERS = ("last_enqueued_collective", "last_completed_collective")


class DeviceMark:
    """The training thread records where its windows end in the device's queue; the Watch looks.

    A `backend` with a flight recorder of its own says more: whether a collective waits for others.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self.windows, self._event = 0, torch.Event(device)
        self._recorder: Any = getattr(_distributed_c10d, _DUMP.format(backend), None)
        self._before, self._began = self._counted(), time.time_ns()  # groups that ended may have been left unfinished
        self._seen: object = 0
        self._since, self._age, self._usual, self._reached = 0.0, 0.0, 0.0, True

    def record(self) -> None:
        """All work of a window has been given to the device."""
        self._event.record()
        self.windows += 1

    def look(self, now: float, line: str) -> Call | None:
        """What takes twice as long as what was there before it; None without. By one thread."""
        counted = {each: found for each, found in self._counted().items() if found != self._before.get(each)}
        seen = counted or self.windows
        if seen != self._seen:
            self._seen, self._since, self._reached = seen, now, False
            self._usual, self._age = self._age, 0.0
        if counted:
            self._reached = all(given <= done for given, done in counted.values())
        elif not self._reached:  # asked no more afterwards: CUDA forbids it, to any thread, while a graph is captured
            with contextlib.suppress(RuntimeError):  # the device has failed, which the next call of the script says
                self._reached = self._event.query()
        if self._reached:
            return None
        self._age, name = now - self._since, "a collective" if counted else "backward()"
        call = Call(name, self._age, line, None, self._since, "", True)
        return call if self._age >= max(WAITING, 2 * self._usual) else None

    def collective(self) -> tuple[Any, ...]:
        """The oldest collective that is not done, else the last: name, number, its group."""
        dump: Any = self._recorder or getattr(_distributed_c10d, _DUMP.format("fr"))
        found = [each for each in json.loads(dump()).get("entries", ()) if each["time_created_ns"] >= self._began]
        for each in [each for each in found if not each["retired"]][:1] or found[-1:]:
            group = each["process_group"][0] if self._recorder else ""  # gloo, below, has groups of its own
            return each["profiling_name"], int(each["collective_seq_id"]), group
        return ()

    def _counted(self) -> dict[str, list[int]]:
        """By group: the last collective that the device was given, and the last that is done."""
        found = json.loads(self._recorder(includeCollectives=False)).get("pg_status") if self._recorder else None
        return {group: [int(each[name]) for name in _NUMBERS] for group, each in (found or {}).items()}

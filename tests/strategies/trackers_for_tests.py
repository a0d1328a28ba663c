"""Trackers that behave, and others that do everything wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accel_core import Accelerator, GeneralTracker, TrackedRun, Tracker, TrackingKwargs


class Listing(Tracker):
    """Notes whatever happens to it."""

    name = "listing"

    def __init__(self, name: str = "listing") -> None:
        self.name = name
        self.calls: list[tuple[Any, ...]] = []
        self.runs: list[TrackedRun] = []
        self.threads: set[str] = set()

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.calls

    def start(self, run: TrackedRun) -> None:
        self._note("start")
        self.runs.append(run)

    def state(self) -> dict[str, Any]:
        return {"run_id": self.runs[-1].run_id, "mine": [1, None]}

    def log(self, values: Any, step: int, **options: Any) -> None:
        self._note("log", values, step, *([options] if options else []))

    def log_images(self, values: Any, step: int, **options: Any) -> None:
        shapes = {name: [tuple(each.shape) for each in several] for name, several in values.items()}
        self._note("images", shapes, step, *([options] if options else []))

    def log_table(self, name: str, table: Any, step: int, **options: Any) -> None:
        self._note("table", name, table, step, *([options] if options else []))

    def log_histograms(self, values: Any, step: int, **options: Any) -> None:
        self._note("histograms", values, step)

    def finish(self, failed: bool) -> None:
        self._note("finish", failed)

    def logged(self) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == "log"]

    def _note(self, *call: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)


class Older(GeneralTracker):
    """As classes were written before."""

    name = "older"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.seen

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.seen.append(("log", values, step))

    def finish(self) -> None:
        self.seen.append(("finish",))


class Wrong(Listing):
    """Does what it is told in one of its methods, and nothing else that a tracker should not.

    Args:
        method: which.
        act: what is done there.
    """

    def __init__(self, method: str, act: Callable[[], Any]) -> None:
        super().__init__("wrong")
        self.method, self.act = method, act

    def _do(self, method: str) -> None:
        if method == self.method:
            self.act()

    def start(self, run: TrackedRun) -> None:
        self._do("start")
        super().start(run)

    def state(self) -> Any:
        return self.act() if self.method == "state" else super().state()

    def log(self, values: Any, step: int, **options: Any) -> None:
        self._do("log")
        super().log(values, step, **options)

    def flush(self) -> None:
        self._do("flush")

    def finish(self, failed: bool) -> None:
        self._do("finish")
        super().finish(failed)


def draws() -> None:
    """Uses the random streams of the program, as services do that invent names."""
    random.random()
    torch.rand(3)


def give_nothing_usable() -> Any:
    return ["not", "a", "dict"]


def give_what_no_file_holds() -> Any:
    return {"run": object()}


def begun(*trackers: Any, rules: TrackingKwargs | None = None, config: Any = None, **options: Any) -> Accelerator:
    """An Accelerator whose run may be recorded."""
    accelerator = Accelerator(cpu=True, log_with=list(trackers), kwargs_handlers=None if rules is None else [rules])
    accelerator.init_trackers("project", config, **options)
    return accelerator


def said(work: Callable[[], Any]) -> str:
    """What some work warns of."""
    with pytest.warns(RuntimeWarning) as warned:
        work()
    return "\n".join(str(each.message) for each in warned)


@contextmanager
def opened_at_the_end() -> Iterator[threading.Event]:
    """What trackers wait for that block; it is set at the end, and their threads end."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("accel tracker"):
            thread.join(5)

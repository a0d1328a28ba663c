"""The calls of a tracker in a thread of its own, as the core has it, and the observed facts.

See `accel_testing.tracker_suite`.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

from accel_core import TrackedRun, Tracker
from accel_testing import tracker_observations as given
from accel_testing.leaks import changes, left_running, running_now, settings_of_process
from accel_testing.shared_launch import Raised
from accel_testing.tracker_observations import Facts, Recorded, Written


@dataclass
class Session:
    """A tracker that records one run in a thread of its own."""

    tracker: Tracker
    run: TrackedRun
    folder: Path
    facts: Facts
    state: Any = None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def call(self, moment: str, *calls: Callable[[Tracker], Any]) -> Any:
        """Calls in the thread, notes what changed under a moment's name, returns the last."""
        before = _process_state()
        try:
            return self.thread.submit(lambda: [each(self.tracker) for each in calls][-1]).result()
        finally:
            self.facts.changed.setdefault(moment, []).extend(
                f"{name} ({old} → {new})"
                for name, old, new in changes(before, _process_state())
                if name in before or not name.startswith(_LEVEL)
            )

    def attempt(self, moment: str, *calls: Callable[[Tracker], Any]) -> Any:
        """Runs `call`, but notes an exception instead of raising it: other calls follow."""
        try:
            return self.call(moment, *calls)
        except Exception as error:  # noqa: BLE001  (whatever a tracker raises is the fact)
            self.facts.raised[moment] = Raised.by(error)

    def finish(self, moment: str, failed: bool) -> None:
        """The end of the run and of the thread."""
        self.attempt(f"finish ({moment})", methodcaller("finish", failed))
        self.thread.shutdown()


@dataclass
class Scene:
    """Whom a tracker meets."""

    make: Callable[[], Tracker]
    read: Callable[[Written], Recorded]
    options: Callable[[Path], Mapping[str, Any]]  # of a run, by a folder that they may name
    pair: bool = True  # whether a second run is recorded beside the resumed one
    facts: Facts = field(default_factory=Facts)

    def observe(self) -> Facts:
        """Records the runs. Raises what the first `start` raises."""
        running = running_now()
        with _stage() as (root, printed):
            run = TrackedRun("suite", "first-run", given.CONFIG)
            self._record_all(first := self._begin("start", root, run))
            state = json.loads(json.dumps(first.state, default=str))
            again = replace(run, resumed=state, step=given.RESUMED_AT)
            resumed = self._begin_or_note("start (resumed)", root, again)
            other = TrackedRun("suite", "second-run", {"layers": 24})
            beside = self._begin_or_note("start (beside)", root, other) if self.pair else None
            for mine, theirs in zip(given.LOGGED_RESUMED, given.LOGGED_BESIDE, strict=True):
                for session, (step, values) in ((resumed, mine), (beside, theirs)):
                    if session is not None:
                        session.attempt("log (resumed or beside)", methodcaller("log", values, step))
            if resumed is not None:
                self._end("resumed", resumed, failed=True)
            if beside is not None:
                self._end("beside", beside, failed=False)
            self._record_odd(root)
            self.facts.changed["the end of all runs"] = left_running(running, grace=2.0)
            self.facts.printed, self.facts.strays = printed.getvalue(), _strays(root)
        return self.facts

    def refusal(self) -> Raised | None:
        """The error of `start` for an option that no service has; None if it raises none."""
        with _stage() as (root, _):
            try:
                session = self._begin("start", root, TrackedRun("suite", "third-run", options={given.UNKNOWN: 1}))
            except Exception as error:  # noqa: BLE001  (the fact)
                return Raised.by(error)
            session.finish("refusal", failed=False)
        return None

    def _begin(self, moment: str, root: Path, run: TrackedRun) -> Session:
        tracker, folder = self.make(), root / "given" / run.run_id
        folder.mkdir(parents=True, exist_ok=True)
        directory = root / "runs" / run.run_id if tracker.requires_logging_directory else None
        run = replace(run, directory=directory, options={**self.options(folder), **run.options})
        session = Session(tracker, run, folder, self.facts)
        try:
            session.call(moment, methodcaller("start", run))
        except BaseException:
            session.thread.shutdown()
            raise
        session.state = session.attempt("state", methodcaller("state"))
        return session

    def _begin_or_note(self, moment: str, root: Path, run: TrackedRun) -> Session | None:
        try:
            return self._begin(moment, root, run)
        except Exception as error:  # noqa: BLE001  (a fact of this run alone)
            self.facts.raised[moment] = Raised.by(error)
            return None

    def _record_all(self, session: Session) -> None:
        """The whole of the first run."""
        self.facts.state = session.state
        self.facts.service = session.attempt("tracker", attrgetter("tracker"))
        for part in given.ORDER:
            session.attempt(part, *given.CALLS[part])
        session.attempt("flush", methodcaller("flush"))
        self._read("flushed", session, is_open=True)
        unknown = methodcaller("log", {given.UNKNOWN: 1.0}, given.LAST + 1, **{given.UNKNOWN: 1})
        session.attempt("unknown option", unknown)
        session.attempt("late", *given.CALLS["late"])
        self._end("ended", session, failed=False)

    def _record_odd(self, root: Path) -> None:
        """The run whose names are odd. What is refused is left out, as the core does it."""
        with _heard(self.facts.said):
            run = TrackedRun("suite", "odd-run", given.ODD_CONFIG)
            if (session := self._begin_or_note("start (odd)", root, run)) is None:
                return
            for moment, call in given.ODD_CALLS.items():
                session.attempt(moment, call)
                if (raised := self.facts.raised.get(moment)) is not None:
                    self.facts.said.append(raised.message)
            for part in ("large", "after"):
                session.attempt(part, *given.CALLS[part])
            self._end("odd", session, failed=False)

    def _end(self, moment: str, session: Session, *, failed: bool) -> None:
        session.finish(moment, failed)
        self._read(moment, session, is_open=False)

    def _read(self, moment: str, session: Session, *, is_open: bool) -> None:
        try:
            self.facts.read[moment] = self.read(Written(session.run, session.state or {}, session.folder, is_open))
        except Exception as error:  # noqa: BLE001  (a reader that fails is a fact of this moment alone)
            self.facts.read[moment] = Raised.by(error)


@contextlib.contextmanager
def _stage() -> Iterator[tuple[Path, io.StringIO]]:
    """A folder, in which another one is the working directory, and what is printed meanwhile."""
    before, printed = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="trackers-") as folder, contextlib.redirect_stdout(printed):
        root = Path(folder).resolve()
        (root / "elsewhere").mkdir()
        os.chdir(root / "elsewhere")
        try:
            yield root, printed
        finally:
            os.chdir(before)


_LEVEL = "the level of the logger "
_OTHERS = ("asyncio", "concurrent.futures", "requests", "urllib3")  # loggers that no service has for itself


def _process_state() -> dict[str, Any]:
    """The settings of the process that are compared, by their names in messages."""
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")  # its stream has to be there before a service brings it along
    loggers = {name: logging.getLogger(name) for name in _OTHERS} | logging.root.manager.loggerDict
    levels = {f"{_LEVEL}{name!r}": each.level for name, each in loggers.items() if isinstance(each, logging.Logger)}
    return {
        **settings_of_process(rng=True),
        **levels,
        "builtins.__import__": builtins.__import__,
        "the start method of multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "sys.excepthook": sys.excepthook,
        "sys.exit": sys.exit,
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "warnings.filters": list(warnings.filters),
    }


@contextlib.contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Notes the warnings that are logged meanwhile."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


def _strays(root: Path) -> list[str]:
    """Files outside of the folders of the runs, and of those that options may name."""
    own = [root / "given", *(root / "runs" / run for run in ("first-run", "second-run", "odd-run"))]
    files = (path for path in root.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(root)) for path in files if not any(each in path.parents for each in own))


_REPORTING = "import accel_testing.tracker_jobs; accel_testing.tracker_jobs.report_imports()"


def report_imports() -> None:
    """Prints the packages imported with the classes that this process's argument names."""
    found = []
    for module, name in json.loads(sys.argv[1]):
        before = set(sys.modules)
        kind: type[Tracker] = attrgetter(name)(importlib.import_module(module))
        kind.unusable()
        with contextlib.suppress(TypeError):  # of an argument that is required, which has a test of its own
            kind()
        packages = {each.partition(".")[0] for each in set(sys.modules) - before}
        found.append(sorted(packages - sys.stdlib_module_names - {module.partition(".")[0], "accel_core"}))
    sys.stdout.write(f"imported: {json.dumps(found)}")


def imports(*kinds: type[Tracker], timeout: float = 100) -> list[list[str]]:
    """Packages that are imported with each class and by making one, in a fresh process.

    RuntimeError is raised if that process fails, with what it printed, or could not find a class.
    """
    for kind in kinds:
        if "<locals>" in kind.__qualname__:
            raise RuntimeError(
                f"{kind.__qualname__} is defined inside a function, where a fresh process cannot find it. Define it at the level of a "
                f"module."
            )
    names = json.dumps([(kind.__module__, kind.__qualname__) for kind in kinds])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _REPORTING, names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=timeout)
    if ended.returncode:
        raise RuntimeError(f"A fresh process was to import {names}, and make one of each:\n{ended.stderr}")
    imported: list[list[str]] = json.loads(ended.stdout.rpartition("imported:")[2])
    return imported

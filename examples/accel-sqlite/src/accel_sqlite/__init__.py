"""A tracker in a distribution of its own: runs recorded in SQLite files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accel_core import TrackedRun, Tracker

if TYPE_CHECKING:
    import sqlite3

__all__ = ["SQLite"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (project TEXT, id TEXT PRIMARY KEY, config TEXT, ended TEXT);
CREATE TABLE IF NOT EXISTS records (step INTEGER, name TEXT, value, superseded INTEGER DEFAULT 0);
"""
LARGEST = 2**63 - 1  # integers of SQLite have 64 bits


class SQLite(Tracker):
    """Records numbers and texts into `run.sqlite`, in the folder of the run.

    Args:
        commit_every: so many records are written together, at least 1. A process that is killed loses those that were not.
    """

    name = "sqlite"
    requires_logging_directory = True

    def __init__(self, commit_every: int = 100) -> None:
        if commit_every < 1:
            raise ValueError(
                f"SQLite(commit_every={commit_every}): expected at least 1, the records of one transaction."
            )
        self._commit_every = commit_every
        self._pending = 0
        self._run_id = ""
        self._database: sqlite3.Connection | None = None

    @classmethod
    def unusable(cls) -> str | None:
        """Python can be built without SQLite."""
        return None if find_spec("_sqlite3") else "this Python was built without SQLite. Install another one."

    @property
    def tracker(self) -> sqlite3.Connection:
        """The connection to the file."""
        assert self._database is not None, "start() comes first"
        return self._database

    def start(self, run: TrackedRun) -> None:
        """Makes the file, or goes on with it."""
        import sqlite3

        self._override(run.options)
        assert run.directory is not None, "requires_logging_directory"
        path = run.directory / "run.sqlite"
        if run.resumed is None and path.exists():
            raise FileExistsError(f"A new run was to be recorded in {path}, which exists. Give it another folder.")
        run.directory.mkdir(parents=True, exist_ok=True)
        self._run_id = run.run_id
        self._database = sqlite3.connect(path, check_same_thread=False)  # the user may ask for it, in another thread
        self._database.executescript(SCHEMA)
        row = (run.project, run.run_id, json.dumps(run.config, ensure_ascii=False))
        self._database.execute("REPLACE INTO run (project, id, config) VALUES (?, ?, ?)", row)
        if run.resumed is not None:
            self._database.execute("UPDATE records SET superseded = 1 WHERE step >= ?", (run.step,))
        self.flush()

    def state(self) -> dict[str, Any]:
        """Nothing: the file is found by the folder of the run."""
        return {}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Adds a row for each value."""
        if options:
            raise TypeError(f"sqlite was given {', '.join(options)} in log_kwargs, and has no options there.")
        rows = [(step, name, _storable(value)) for name, value in values.items()]
        self.tracker.executemany("INSERT INTO records (step, name, value) VALUES (?, ?, ?)", rows)
        self._pending += 1
        if self._pending >= self._commit_every:
            self.flush()

    def flush(self) -> None:
        """Commits, so that others see what was recorded."""
        self.tracker.commit()
        self._pending = 0

    def finish(self, failed: bool) -> None:
        """Notes how the run ended, and closes the file."""
        ended = "failed" if failed else "finished"
        self.tracker.execute("UPDATE run SET ended = ? WHERE id = ?", (ended, self._run_id))
        self.flush()
        self.tracker.close()

    def _override(self, options: Mapping[str, Any]) -> None:
        """Takes what the code says in `init_kwargs` before what the constructor was given."""
        unknown = sorted(set(options) - {"commit_every"})
        if unknown:
            raise TypeError(f"sqlite was given {', '.join(unknown)} in init_kwargs. Its only option is commit_every.")
        self._commit_every = SQLite(**options)._commit_every if options else self._commit_every


def _storable(value: Any) -> Any:
    """SQLite's numbers are those of Python, but for integers of more than 64 bits. It keeps NaN as NULL."""
    return float(value) if isinstance(value, int) and abs(value) > LARGEST else value

"""Reads Trackio's database with its own storage."""

from __future__ import annotations

from typing import Any

from reading import flat, pixels

from accel_core import Bins, Table
from accel_testing import Recorded

OWN = ("timestamp", "step")


def rows(project: str, name: str) -> list[tuple[int, dict[str, Any]]]:
    """All records of a run in their order, each with its step."""
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(project, name)
    return [(row["step"], {key: value for key, value in row.items() if key not in OWN}) for row in logs]


def configuration(project: str, name: str) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    config = SQLiteStorage.get_run_config(project, name) or {}
    return {key: value for key, value in config.items() if not key.startswith("_")}


def runs(project: str) -> list[str]:
    import trackio

    return [run.name for run in trackio.Api().runs(project)]


def recorded(project: str, name: str) -> Recorded:
    kinds: dict[str, dict[str, list[tuple[int, Any]]]] = {}
    for step, values in rows(project, name):
        for key, value in values.items():
            kind, found = readable(value)
            kinds.setdefault(kind, {}).setdefault(key, []).append((step, found))
    return Recorded(**kinds, config=flat(configuration(project, name)), runs=runs(project).count(name))


def readable(value: Any) -> tuple[str, Any]:
    """The kind of a logged value, and it as the suite has it."""
    from trackio.utils import MEDIA_DIR

    kind = value.get("_type") if isinstance(value, dict) else None
    if kind == "trackio.histogram":
        return "histograms", Bins(tuple(value["values"]), tuple(value["bins"]), 0.0, 0.0)
    if kind == "trackio.table":
        lines = value["_value"]
        columns = tuple(lines[0]) if lines else ()
        return "tables", Table(columns, tuple(tuple(line[column] for column in columns) for line in lines))
    if kind == "trackio.image":
        return "images", pixels(MEDIA_DIR / value["file_path"])
    return "texts" if isinstance(value, str) else "numbers", value

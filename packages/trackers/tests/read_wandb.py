"""Reads what wandb wrote on this machine: a log in leveldb's format, whose records are the messages of wandb's own protocol."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reading import flat, pixels

from accel_core import Bins, Table
from accel_testing import Recorded

AXIS = "trainer/global_step"
OWN = ("_step", "_runtime", "_timestamp", AXIS)
BLOCK, HEADER, START = 32768, 7, 7  # bytes: of a block, before each piece of a record, and before the first one


@dataclass
class RunOnDisk:
    """One folder of a run: `history` has a dict per row, in the order of logging."""

    folder: Path
    run_id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    axes: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    record: Any = None

    def values(self, name: str, axis: str = AXIS) -> list[tuple[int, Any]]:
        """All values of a name, each with its step."""
        return [(row[axis], row[name]) for row in self.history if name in row]

    def logged(self, axis: str = AXIS) -> list[tuple[int, dict[str, Any]]]:
        """All rows without what wandb adds, each with its step."""
        return [(row[axis], {name: row[name] for name in row if name not in (*OWN, axis)}) for row in self.history]


def recorded(directory: Path, run_id: str) -> Recorded:
    """What all folders of a run hold together, as `wandb sync` makes one run of them."""
    everything = [read_run(path) for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"))]
    parts = [run for run in everything if run.run_id == run_id]
    kinds: dict[str, dict[str, list[tuple[int, Any]]]] = {}
    for run in parts:
        for step, values in run.logged():
            for name, value in values.items():
                for kind, found in readable(run, value):
                    kinds.setdefault(kind, {}).setdefault(name, []).append((step, found))
    end = {None: None, 0: "finished"}.get(parts[-1].exit_code, "failed")
    return Recorded(**kinds, config=flat(parts[-1].config), ended=end, runs=len({run.run_id for run in everything}))


def readable(run: RunOnDisk, value: Any) -> list[tuple[str, Any]]:
    """The kind of a logged value, and it as the suite has it; several for a list of images."""
    kind = value.get("_type") if isinstance(value, dict) else None
    if kind == "histogram":
        counts = tuple(value["values"])
        return [("histograms", Bins(counts, tuple(value["bins"]), 0.0, 0.0))]
    if kind == "table-file":
        stored = json.loads((run.folder / "files" / value["path"]).read_text())
        return [("tables", Table(tuple(stored["columns"]), tuple(map(tuple, stored["data"]))))]
    if kind == "images/separated":
        return [("images", pixels(run.folder / "files" / name)) for name in value["filenames"]]
    return [("texts" if isinstance(value, str) else "numbers", value)]


def read_runs(directory: Path) -> list[RunOnDisk]:
    """The finished runs under a folder that was given as `dir`, in the order of their start."""
    return [read_finished(path) for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"))]


def read_finished(path: Path) -> RunOnDisk:
    """`Run.finish` returns some milliseconds before wandb's process has written the end of the file."""
    deadline = time.monotonic() + 10
    while (run := read_run(path)).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return run


def read_run(path: Path) -> RunOnDisk:
    found = RunOnDisk(path.parent)
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.record = record.run
            found.run_id, found.project = record.run.run_id, record.run.project
            found.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            found.config.pop("_wandb", None)
        elif kind == "metric" and record.metric.step_metric:
            found.axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "history":
            found.history.append(row(record.history))
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def row(history: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in history.item:
        *parents, last = list(item.nested_key) or [item.key]
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = json.loads(item.value_json)
    return values


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), START, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""

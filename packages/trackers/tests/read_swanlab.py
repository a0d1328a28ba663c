"""Reads the folders that SwanLab writes when it is not online, with the scanner that `swanlab sync` has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from reading import Lists, flat, pixels

from accel_core import Bins, Table
from accel_testing import Recorded

ENDS: dict[str, Any] = {"RUN_STATE_FINISHED": "finished", "RUN_STATE_CRASHED": "failed"}


def read_run(log_dir: Path, run_id: str) -> Recorded:
    """A run, and those that were to go on with it, in the order of their start."""
    folders = [folder for folder in sorted(log_dir.glob("run-*")) if next(records(folder)).start.id == run_id]
    numbers, texts, images, tables, histograms = (Lists() for _ in range(5))
    ended = None
    for folder in folders:
        for record in records(folder):
            match record.WhichOneof("record_type"):
                case "scalar":
                    numbers[plain(record.scalar.key)].append((record.scalar.step, record.scalar.value.number))
                case "media":
                    place = {"Text": texts, "Image": images, "Table": tables, "Bar": histograms}
                    for kind, value in media(folder, record.media):
                        place[kind][plain(record.media.key)].append((record.media.step, value))
                case "finish":
                    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

                    ended = ENDS[RunState.Name(record.finish.state)]
    return Recorded(numbers, texts, config(folders[0]), images, tables, histograms, ended, len(folders))


def records(folder: Path) -> Iterator[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("run-*.swanlab")
    with closing(DataStoreReader()) as reader:  # also where `open` refuses a file that is not complete
        reader.open(file)
        yield from map(Record.FromString, reader)


def media(folder: Path, record: Any) -> Iterator[tuple[str, Any]]:
    for item in record.value.items:
        (file,) = folder.glob(f"media/*/{item.filename}")
        if file.suffix == ".txt":
            yield "Text", file.read_bytes().decode()
        elif file.suffix == ".png":
            yield "Image", pixels(file)
        else:
            yield chart(json.loads(file.read_text(encoding="utf-8")))


def chart(options: dict[str, Any]) -> tuple[str, Any]:
    if options.get("_swanLab") == "table":
        columns = tuple(column["field"] for column in options["colDefs"])
        return "Table", Table(columns, tuple(tuple(map(row.get, columns)) for row in options["rowData"]))
    ends = [tuple(map(float, label.split(" to "))) for label in options["xAxis"][0]["data"]]
    edges = (ends[0][0], *(upper for _, upper in ends))
    return "Bar", Bins(tuple(options["series"][0]["data"]), edges, 0.0, 0.0)


def plain(name: str) -> str:
    """Without the mark of a further series."""
    return re.sub(r" ⟨\d+⟩$", "", name)


def config(folder: Path) -> dict[str, Any]:
    import yaml

    stored = yaml.safe_load((folder / "files" / "config.yaml").read_text(encoding="utf-8"))
    return flat({name: entry["value"] for name, entry in stored.items()})

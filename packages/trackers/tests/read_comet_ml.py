"""Reads the archives that Comet writes offline: what `comet upload` would send."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from reading import flat, pixels

from accel_core import Table
from accel_testing import Recorded

KINDS = {"metric_msg": "metric", "parameter_msg": "param", "log_other": "other", "file_upload": "file"}


@dataclass
class Archive:
    """One archive: metrics as (name, step, value), parameters and others by name, files as (kind, name, step, content)."""

    meta: dict[str, Any]
    metrics: list[tuple[str, int, Any]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    files: list[tuple[str, str, int, bytes]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def key(self) -> str:
        return self.meta["offline_id"]


def archives(directory: Path) -> list[Archive]:
    """In the order in which they were started, so that the upload makes one experiment of those with one key."""
    return sorted((archive(path) for path in directory.glob("*.zip")), key=lambda each: each.meta["start_time"])


def archive(path: Path) -> Archive:
    with ZipFile(path) as file:
        found = Archive(json.loads(file.read("experiment.json")))
        for line in file.read("messages.json").decode().splitlines():
            message = json.loads(line)
            found.kinds.add(message["type"])
            take(found, message["type"], message["payload"], file)
    return found


def take(found: Archive, kind: str, payload: dict[str, Any], file: ZipFile) -> None:
    if kind == "metric_msg":
        metric = payload["metric"]
        found.metrics.append((metric["metricName"], metric["step"], metric["metricValue"]))
    elif kind == "parameter_msg":
        parameter = payload.get("param") or payload["params"]
        found.parameters[parameter["paramName"]] = parameter["paramValue"]
    elif kind == "log_other":
        found.others[payload["key"]] = payload["value"]
    elif kind == "file_upload":
        about = payload["additional_params"]
        name = payload["metadata"].get("name") or about.get("fileName") or about["figName"]
        found.files.append((payload["upload_type"], name, about["step"], file.read(payload["file_path"])))


def recorded(directory: Path, key: str) -> Recorded:
    """What all archives of an experiment hold together."""
    everything = archives(directory)
    parts = [each for each in everything if each.key == key]
    kinds: dict[str, dict[str, list[tuple[int, Any]]]] = {}
    for part in parts:
        for kind, name, step, value in readable(part):
            kinds.setdefault(kind, {}).setdefault(name, []).append((step, value))
    configs = [json.loads(content) for part in parts for _, name, _, content in part.files if name == "config.json"]
    return Recorded(
        **kinds,
        config=flat(configs[-1]),
        ended="failed" if parts[-1].others.get("failed") else "finished",
        runs=len({part.key for part in everything}),
    )


def readable(part: Archive) -> Iterator[tuple[str, str, int, Any]]:
    """Values as the suite has them."""
    for name, step, value in part.metrics:
        yield "numbers", name, step, float(value) if isinstance(value, str) else value
    for kind, name, step, content in part.files:
        if kind == "text-sample":
            yield "texts", name, step, content.decode()
        elif kind == "visualization":
            yield "images", name, step, pixels(io.BytesIO(content))
        elif name.endswith(".csv"):
            columns, *rows = csv.reader(io.StringIO(content.decode(), newline=""))
            yield "tables", name.removesuffix(".csv"), step, Table(tuple(columns), tuple(map(tuple, rows)))

"""Reads the session that ClearML keeps offline: the folder while it is open, and what was made of it at the end."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reading import Lists, flat, pixels

from accel_core import Bins, Table
from accel_testing import Recorded

TEXT = re.compile(r'^(.*) at step (\d+): (".*")$', re.MULTILINE)
CONTENT = ("metrics.jsonl", "task.json", "log.jsonl")


def read_run(sessions: Path, task_id: str, *, is_open: bool) -> Recorded:
    folder = sessions / task_id
    archive = None if is_open else zipfile.ZipFile(sessions / f"{task_id}.zip")
    files = {
        name: archive.read(name).decode() if archive else (folder / name).read_text(encoding="utf-8")
        for name in CONTENT
    }
    numbers, texts, images, tables, histograms = (Lists() for _ in range(5))
    for event in events(files["metrics.jsonl"]):
        name, step = named(event["metric"], event["variant"]), event["iter"]
        if event["type"] == "training_stats_scalar":
            numbers[name].append((step, event["value"]))
        elif event["type"] == "training_debug_image":
            images[re.sub(r" ⟨image \d+⟩$", "", name)].append((step, pixels(Path(event["url"]))))
        else:
            plot = json.loads(event["plot_str"])["data"][0]
            place, value = (tables, table(plot)) if plot["type"] == "table" else (histograms, bins(plot))
            place[name].append((step, value))
    for event in events(files["log.jsonl"]):
        for name, step, text in TEXT.findall(event["msg"]):
            texts[name].append((int(step), json.loads(text)))
    stored = json.loads(files["task.json"])
    config = json.loads(stored["configuration"]["config"]["value"])
    return Recorded(numbers, texts, flat(config), images, tables, histograms)


def events(lines: str) -> Iterator[dict[str, Any]]:
    for line in filter(None, lines.splitlines()):
        yield from json.loads(line)


def named(title: str, series: str) -> str:
    return title if title == series else f"{title}/{series}"


def table(plot: dict[str, Any]) -> Table:
    columns = [text.replace("<b>", "").replace("</b>", "") for text in plot["header"]["values"]]
    cells = plot["cells"]["values"]
    return Table(tuple(columns), tuple(zip(*cells, strict=True)))


def bins(plot: dict[str, Any]) -> Bins:
    ends = [tuple(map(float, label.split(" to "))) for label in plot["x"]]
    return Bins(tuple(plot["y"]), (ends[0][0], *(upper for _, upper in ends)), 0.0, 0.0)

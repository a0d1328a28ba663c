"""Reads the files of DVCLive: rows and YAML with its own functions, images and plots as the files that they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from reading import Lists, flat, pixels

from accel_core import Bins, Table
from accel_testing import Recorded


def read_run(folder: Path) -> Recorded:
    from dvclive.serialize import load_yaml
    from dvclive.utils import parse_json, parse_tsv

    plots = folder / "plots"
    numbers, texts, images, tables, histograms = (Lists() for _ in range(5))
    for file in (plots / "metrics").rglob("*.tsv"):
        name = file.relative_to(plots / "metrics").with_suffix("").as_posix()
        for row in parse_tsv(file):
            value = number(row[file.stem])
            (texts if isinstance(value, str) else numbers)[name].append((int(row["step"]), value))
    for file in sorted((plots / "images").rglob("*.png")):
        name = re.sub(r" ⟨image \d+⟩$", "", file.parent.relative_to(plots / "images").as_posix())
        images[name].append((int(file.stem), pixels(file)))
    for file in (plots / "custom").rglob("*.json"):
        rows = parse_json(file)
        name, step = file.parent.relative_to(plots / "custom").as_posix(), int(file.stem)
        if list(rows[0]) == ["from", "to", "count"]:
            edges = (rows[0]["from"], *(row["to"] for row in rows))
            histograms[name].append((step, Bins(tuple(row["count"] for row in rows), edges, 0.0, 0.0)))
        else:
            full = [row for row in rows if set(row.values()) != {None}]
            tables[name].append((step, Table(tuple(rows[0]), tuple(tuple(row.values()) for row in full))))
    config = flat(load_yaml(folder / "params.yaml"))
    return Recorded(numbers, texts, config, images, tables, histograms)


def number(text: str) -> Any:
    """The number that a cell spells, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))

"""Reads a run with Aim itself."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from reading import Lists, flat, pixels

from accel_core import Bins, Table
from accel_testing import Recorded


@cache
def empty_repository() -> dict[str, bytes]:
    """Its files: making one takes Aim seconds."""
    from aim import Repo

    with tempfile.TemporaryDirectory() as folder:
        Repo.from_path(folder, init=True)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def make_repository(folder: Path) -> None:
    for name, content in empty_repository().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_run(repo: Path, run_hash: str) -> Recorded:
    """Aim gives a run that is in no index to its writer alone, so a copy is opened, as if to go on with it."""
    runs = len(list((repo / ".aim" / "meta" / "chunks").iterdir()))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(repo, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.softlock"))
        # In a function of its own: Aim writes until nobody holds the run, and the folder is gone soon.
        return recorded(folder, run_hash, ending(repo, run_hash), runs)


def recorded(folder: str, run_hash: str, ended: Any, runs: int) -> Recorded:
    import aim

    quiet = {"log_system_params": False, "capture_terminal_logs": False, "system_tracking_interval": None}
    run = aim.Run(run_hash, repo=folder, **quiet)
    numbers, images, histograms = Lists(), Lists(), Lists()
    for metric in run.metrics():
        steps, (values, *_) = metric.data.items_list()
        numbers[metric.name] += zip(steps, values, strict=True)
    texts, tables = Lists(), Lists()
    for name, step, value, kind in objects(run, "texts", "get_text_sequence"):
        if kind == "table":
            columns, *rows = map(json.loads, value.data.splitlines())
            tables[name].append((step, Table(tuple(columns), tuple(map(tuple, rows)))))
        else:
            texts[name].append((step, value.data))
    for name, step, values, _ in objects(run, "images", "get_image_sequence"):
        images[name] += ((step, pixels(value.to_pil_image())) for value in values)
    for name, step, value, _ in objects(run, "distributions", "get_distribution_sequence"):
        counts, edges = value.to_np_histogram()
        histograms[name].append((step, Bins(tuple(counts.tolist()), tuple(edges.tolist()), 0.0, 0.0)))
    config = flat(run["config"])
    run.close()
    return Recorded(numbers, texts, config, images, tables, histograms, ended, runs)


def ending(repo: Path, run_hash: str) -> Any:
    """By the names of the files of its check-ins, which have a number and a flag: whether "finished" came after the last "starting"."""
    names = sorted(path.name.split("-") for path in (repo / ".aim" / "check_ins").glob(f"{run_hash}-*"))
    flags = [flag for _, _, flag, *_ in names]
    since = flags[len(flags) - flags[::-1].index("starting") :] if "starting" in flags else flags
    return "finished" if "finished" in since else "failed"


def objects(run: Any, kind: str, getter: str) -> Iterator[tuple[str, int, Any, Any]]:
    from aim.storage.context import Context

    for each in run.collect_sequence_info((kind,))[kind]:
        sequence = getattr(run, getter)(each["name"], Context(each["context"]))
        steps, (values, *_) = sequence.data.items_list()
        for step, value in zip(steps, values, strict=True):
            yield each["name"], step, value, each["context"].get("kind", "")

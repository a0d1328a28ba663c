"""A run in a folder of plain files, for those who have no service and want none.

    <folder>/metrics.jsonl    one line per record, in the order in which they were made
    <folder>/config.json      the configuration, that of the last start if the run was resumed
    <folder>/images/…         PNG files, which lines of metrics.jsonl name

A line has the step, the time in seconds since 1970, and what was recorded by name:

    {"step": 3, "time": 1767225600.5, "values": {"loss": 0.25, "norm": "NaN"}, "texts": {"note": "…"}}
    {"step": 3, "time": 1767225600.6, "images": {"samples": ["images/samples/3_0.png"]}}
    {"step": 3, "time": 1767225600.7, "tables": {"answers": {"columns": ["input", "score"], "rows": [["a", 0.5]]}}}
    {"step": 3, "time": 1767225600.8, "histograms": {"weights": {"counts": [1, 3], "edges": [-1.0, 0.0, 1.0], …}}}
    {"resumed": {"step": 4}, "time": 1767225700.0, "attempt": "9f1c2e70"}

All of it is strict JSON: numbers that are not finite are the texts "NaN", "Infinity" and
"-Infinity", as in the JSON of protocol buffers, and texts stand apart from numbers so that the two
cannot be mistaken. In a cell of a table, which may be either, such a number is `{"number": "NaN"}`.

Tables are lines, not files of their own: their cells keep their types, and their order among the
other records is told.

Where a run was resumed, what the broken one had recorded from that step on stays in the file;
`read` leaves it out. All lines behind have the "attempt" of the program that resumed it: if two go
on from one checkpoint, `read` has the lines of the one that began last, and warns.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core import Bins, Table, TrackedRun, Tracker
from accel_trackers.png import encode
from accel_trackers.process_guard import check_options
from accel_trackers.waiting_file import WaitingFile

if TYPE_CHECKING:
    import torch

METRICS = "metrics.jsonl"
CONFIG = "config.json"
IMAGES = "images"

_LONGEST, _DEEPEST = 100, 8  # bytes of a part of a file's name, and parts: file systems have limits

logger = logging.getLogger(__name__)


class JSONL(Tracker):
    """Records into the file metrics.jsonl, one line for each record.

    `accel_trackers.jsonl.read` reads it. Each line is with the operating system when `log` returns: a process that is killed loses the
    line that it is writing at most. A resumed run is appended to. While the disk is full, records wait.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self) -> None:
        self._directory = Path()
        self._file: WaitingFile | None = None
        self._attempt: dict[str, str] = {}  # what the lines of a resumed run have more

    @property
    def tracker(self) -> Path:
        """The file of lines."""
        return self._directory / METRICS

    def start(self, run: TrackedRun) -> None:
        """Makes the folder, or opens it again."""
        _refuse(run.options, "init_kwargs={'jsonl': ...}")
        assert run.directory is not None, "requires_logging_directory"
        self._directory = run.directory
        self._directory.mkdir(parents=True, exist_ok=True)
        if run.resumed is None and self.tracker.exists():
            raise FileExistsError(f"{self.tracker} of another run is there: give this one another folder")
        if run.resumed is not None:
            _repair(self.tracker)
        text = json.dumps(_strict(run.config), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
        whole = self._directory / f"{CONFIG}.new"  # a kill leaves the old one or the new one
        whole.write_text(text, encoding="utf-8", errors="backslashreplace")
        whole.replace(self._directory / CONFIG)
        self._file = WaitingFile(self.tracker, "ab")
        if run.resumed is not None:
            self._attempt = {"attempt": secrets.token_hex(4)}
            self._write({"resumed": {"step": run.step}, "time": time.time(), **self._attempt})

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Writes a line, with numbers and texts apart."""
        _refuse(options)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        numbers = {name: value for name, value in values.items() if name not in texts}
        self._record(
            step, **({"values": numbers} if numbers or not texts else {}), **({"texts": texts} if texts else {})
        )

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """Writes a file for each image, and a line that names them."""
        _refuse(options)
        self._record(
            step,
            images={
                name: [self._save(image, name, f"{step}_{number}") for number, image in enumerate(images)]
                for name, images in values.items()
            },
        )

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """Writes a line with all of it."""
        _refuse(options)
        rows = [[_cell(cell) for cell in row] for row in table.rows]
        self._record(step, tables={name: {"columns": table.columns, "rows": rows}})

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        """Writes a line with counts and edges."""
        _refuse(options)
        self._record(step, histograms={name: vars(bins) for name, bins in values.items()})

    def finish(self, failed: bool) -> None:  # noqa: ARG002 - every line is written already
        """Closes the file, if `start` has opened it."""
        if self._file is not None:
            self._file.close()

    def _record(self, step: int, **content: Any) -> None:
        self._write({"step": step, "time": time.time(), **self._attempt, **content})

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None, "start() comes first"
        line = json.dumps(_strict(record), ensure_ascii=False, allow_nan=False) + "\n"
        # Half of a surrogate pair, which a text may hold and UTF-8 may not, becomes the escape that JSON has for it.
        self._file.write(line.encode("utf-8", "backslashreplace"))

    def _save(self, image: torch.Tensor, name: str, stem: str) -> str:
        """Writes an image to a new file, and returns its path inside the folder."""
        folder = self._directory / IMAGES / safe_path(name)
        folder.mkdir(parents=True, exist_ok=True)
        content = encode(image)
        for again in itertools.count():
            path = folder / f"{stem}{f'_again{again}' if again else ''}.png"
            try:
                with WaitingFile(path, "xb") as file:
                    file.write(content)
            except FileExistsError:  # the step came again, or a name that a file system finds the same
                continue
            return path.relative_to(self._directory).as_posix()
        raise AssertionError("counting ends nowhere")


def read(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records in the folder of one run, in their order, without those superseded on resuming.

    Where several programs have resumed the run at once, these are the records of the one that began
    last, and a warning is logged.

    Each is a dict: "step", "time" in seconds since 1970, and one of "values", numbers and texts by
    name, as they were logged; "images", lists of paths of PNG files; "tables", `accel_core.Table`;
    "histograms", `accel_core.Bins`. FileNotFoundError is raised if nothing was recorded there, and
    ValueError for a line that is no record; an unfinished last line, after a kill, is no error.
    """
    path = Path(directory) / METRICS
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    records: list[dict[str, Any]] = []
    attempt, others = None, 0
    for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            content = json.loads(line)
            record = None if "resumed" in content else _decoded(content, path.parent)
            if record is None:
                attempt = content.get("attempt")
                records = [each for each in records if each["step"] < content["resumed"]["step"]]
            elif content.get("attempt") == attempt:
                records.append(record)
            else:
                others += 1
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no record: {line[:100]!r}") from error
    if others:
        logger.warning(
            "%s: %d lines are left out, of a program that recorded this run when another one had resumed it. Lines of one "
            'program have one "attempt". With init_trackers(..., resume=False) the second is a run of its own.',
            path,
            others,
        )
    return records


def safe_path(name: str) -> Path:
    """A relative path for a name, in folders by its slashes; several names may share one."""
    parts = [re.sub(r"[^\w .+=@-]", "_", part).strip(" .") for part in name.split("/")]
    short = [part.encode()[:_LONGEST].decode(errors="ignore").rstrip(" .") for part in parts]
    return Path(*[part for part in short if part][:_DEEPEST] or ["_"])


def _repair(path: Path) -> None:
    """Cuts off the unfinished line of a killed process: the next one begins a line."""
    if not path.exists():
        logger.warning("A run goes on, and %s is not there: what was recorded of it before lies elsewhere.", path)
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        logger.warning("%s ends in the middle of a line, %d bytes of which are cut off.", path, len(content) - complete)
        os.truncate(path, complete)


def _strict(value: Any) -> Any:
    """The value with nan and infinities as protocol buffers name them: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return value


def _cell(value: Any) -> Any:
    """A cell, which may be a number or a text: a number that JSON has not says that it is one."""
    return {"number": value} if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value


def _decoded(content: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A record as `read` gives it."""
    record: dict[str, Any] = {"step": content["step"], "time": content["time"]}
    if "values" in content or "texts" in content:
        numbers = {name: _number(value) for name, value in content.get("values", {}).items()}
        record["values"] = numbers | content.get("texts", {})
    if "images" in content:
        record["images"] = {name: [directory / path for path in paths] for name, paths in content["images"].items()}
    if "tables" in content:
        record["tables"] = {name: _table(**table) for name, table in content["tables"].items()}
    if "histograms" in content:
        record["histograms"] = {name: _bins(**bins) for name, bins in content["histograms"].items()}
    return record


def _table(columns: list[str], rows: list[list[Any]]) -> Table:
    cells = [tuple(_number(cell["number"]) if isinstance(cell, dict) else cell for cell in row) for row in rows]
    return Table(tuple(columns), tuple(cells))


def _bins(counts: list[int], edges: list[Any], total: Any, total_of_squares: Any, nonfinite: int) -> Bins:
    return Bins(tuple(counts), tuple(map(_number, edges)), _number(total), _number(total_of_squares), nonfinite)


def _refuse(options: Mapping[str, Any], where: str = "log_kwargs={'jsonl': ...}") -> None:
    check_options(options, (), where, "jsonl")

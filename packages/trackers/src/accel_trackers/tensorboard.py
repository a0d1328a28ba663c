"""TensorBoard: runs as event files in a folder, which `tensorboard --logdir` shows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trackers.name_limits import flat
from accel_trackers.png import encode
from accel_trackers.process_guard import check_options
from accel_trackers.service import Service
from accel_trackers.waiting_file import WaitingFile

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table, TrackedRun

_MARKUP = str.maketrans({mark: f"&#{ord(mark)};" for mark in "\\`*_[]<>|&~"} | {"\n": "<br>"})


class TensorBoard(Service):
    """Records with TensorBoard: event files in the run's folder, for `tensorboard --logdir FOLDER`.

    The configuration is in the file hparams.json of the folder, among the texts, and in the table
    of hyperparameters. How a run ended is not told: TensorBoard believes the first word on that,
    and a run may be resumed. Tables become texts. TensorBoard has one kind of data per tag: where
    values of several kinds are logged under one name, the later ones get their kind added to it, as
    "name/images".

    TensorBoard's numbers are float32: about seven digits, and what is larger than 3.4e38 is
    infinite. `double_precision` keeps all digits, but then they are shown by
    `tensorboard --load_fast=false` alone.

    While the disk is full, records wait.

    Where a step comes again, the default reader of `tensorboard` shows for each tag only what was
    written after its steps last went back; `--load_fast=false` shows all.

    Options of `SummaryWriter` go on top of these:
    `init_kwargs={"tensorboard": {"max_queue": 100}}`. `log` takes `walltime`.

    Args:
        flush_secs: seconds until others can read a value.
        double_precision: store numbers with all digits (float64).
    """

    name, client, extra = "tensorboard", "tensorboard", "tensorboard"
    writer = Service.tracker  # a `torch.utils.tensorboard.SummaryWriter`, by the name that scripts may know
    requires_logging_directory = True

    def __init__(self, flush_secs: float = 10.0, double_precision: bool = False) -> None:
        self.flush_secs = flush_secs
        self.double_precision = double_precision
        self._kinds: dict[str, str] = {}

    def start(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        assert run.directory is not None
        if run.resumed:
            self._kinds = dict(run.resumed["kinds"])
            _await_new_name(run.directory)
        # Readers take the first mark of a start for that of the run, and only the following ones for restarts, which hide what came
        # after them: hence one in every file.
        options = {"flush_secs": self.flush_secs, **run.options, "purge_step": run.step}
        self._run = SummaryWriter(str(run.directory), **options)
        _wait_for_space(self._run)
        self._store(run.config, run.directory, run.step)

    def state(self) -> dict[str, Any]:
        """The kinds of values that names stand for; the folder says the rest."""
        return {"kinds": dict(self._kinds)}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        walltime, double = _walltime(options), self.double_precision
        for name, value in values.items():
            if isinstance(value, str):
                self._run.add_text(name, value, step, walltime)  # under the tag "name/text_summary"
            else:
                tag = self._tag(name, "number")
                self._run.add_scalar(tag, float(value), step, walltime, new_style=double, double_precision=double)

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """See `Tracker.log_images`. PNG in their own sizes; those of a step share one tag."""
        walltime = _walltime(options)
        for name, images in values.items():
            self._run.file_writer.add_summary(_image_summary(self._tag(name, "images"), images), step, walltime)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """See `Tracker.log_table`. It becomes a text, as a table of Markdown."""
        self._run.add_text(name, _markdown(table), step, _walltime(options))

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        walltime = _walltime(options)
        for name, bins in values.items():
            self._run.add_histogram_raw(
                self._tag(name, "histogram"),
                min=bins.edges[0],
                max=bins.edges[-1],
                num=sum(bins.counts),
                sum=bins.total,
                sum_squares=bins.total_of_squares,
                bucket_limits=list(bins.edges[1:]),
                bucket_counts=list(bins.counts),
                global_step=step,
                walltime=walltime,
            )

    def flush(self) -> None:
        self._run.flush()

    def finish(self, failed: bool) -> None:  # noqa: ARG002
        self._run.close()

    def _store(self, config: Mapping[str, Any], directory: Path, step: int) -> None:
        """The configuration, in all forms."""
        readable = json.dumps(dict(config), indent=2, ensure_ascii=False)
        part = directory / "hparams.json.part"
        part.write_text(readable + "\n", encoding="utf-8")
        os.replace(part, directory / "hparams.json")
        self._run.add_text("config", f"~~~~json\n{readable}\n~~~~", step)
        self._run.file_writer.add_summary(_hparams(config), step)
        self._run.flush()

    def _tag(self, name: str, kind: str) -> str:
        return name if self._kinds.setdefault(name, kind) == kind else f"{name}/{kind}"


def _walltime(options: Mapping[str, Any]) -> float | None:
    """The one option of records, in seconds since 1970."""
    check_options(options, ["walltime"], "log_kwargs={'tensorboard': ...}", "a record")
    return options.get("walltime")


def _wait_for_space(writer: Any) -> None:
    """Has the writer's thread wait while the disk is full; it would end, and half a record hide those after it."""
    writer.flush()
    events = writer.file_writer.event_writer
    records = events._async_writer._writer
    records.close()
    records._writer = WaitingFile(events._file_name, "ab")


def _await_new_name(directory: Path) -> None:
    """Waits until a new file's name, which begins with seconds, sorts behind those there."""
    names = (path.name.split(".") for path in directory.glob("events.out.tfevents.*"))
    newest = max((int(name[3]) for name in names if len(name) > 3 and name[3].isdigit()), default=0)
    deadline = time.monotonic() + 1.5  # no longer where clocks differ
    while time.time() < newest + 1 and time.monotonic() < deadline:
        time.sleep(0.02)


def _hparams(config: Mapping[str, Any]) -> Any:
    """The summary for the run's row in TensorBoard's table of hyperparameters."""
    from torch.utils.tensorboard.summary import hparams

    # As texts, what it would leave out, and what it would make 1.0 of.
    values = {name: str(value) if value is None or isinstance(value, bool) else value for name, value in flat(config)}
    _, begin, _ = hparams(values, {})
    return begin


def _image_summary(tag: str, images: Sequence[torch.Tensor]) -> Any:
    """Several images under one tag: `SummaryWriter.add_images` would put them together to one."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from tensorboard.plugins.image.metadata import create_summary_metadata  # type: ignore[import-not-found, import-untyped, unused-ignore]

    height, width = images[0].shape[:2] if images else (0, 0)
    items = [str(width).encode(), str(height).encode(), *map(encode, images)]
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=len(items))])
    tensor = tensor_pb2.TensorProto(dtype="DT_STRING", string_val=items, tensor_shape=shape)
    metadata = create_summary_metadata(display_name=None, description=None)
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _markdown(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    first, rule, *rest = ("| " + " | ".join(cells) + " |" for cells in ([_cell(cell) for cell in row] for row in rows))
    return "\n".join([first, rule, *rest])


def _cell(value: object) -> str:
    """A cell of a table of Markdown which shows the value as it is."""
    return str(value).translate(_MARKUP)

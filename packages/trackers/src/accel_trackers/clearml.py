"""Runs recorded with ClearML: tasks of its server, or sessions on disk to be imported there."""

from __future__ import annotations

import builtins
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_trackers.name_limits import Names
from accel_trackers.png import encode
from accel_trackers.process_guard import process_kept, shared_options
from accel_trackers.service import Service
from accel_trackers.step_series import Series, marked, unmarked

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table, TrackedRun

_log = logging.getLogger(__name__)
_PLACE = ("title", "series", "iteration")  # what this tracker says of each image, plot and table
# Each has to be named: what is not in the dict is on. "detect_repository" reads git, its differences, and every package.
_FRAMEWORKS = (
    "catboost", "detect_repository", "fastai", "gradio", "hydra", "joblib", "lightgbm", "matplotlib", "megengine", "pytorch", "scikit",
    "tensorboard", "tensorflow", "tfdefines", "xgboost",
)  # fmt: skip


class ClearML(Service):
    """Records with ClearML: numbers, texts as lines of the log, images, plots of other records.

    "train/loss" is the series "loss" of the graph "train". A number that is nan or infinite is a
    line of the log, since ClearML would record a 0 instead. An image or a plot at a step that its
    name has passed goes to the series "name ⟨2⟩", and so on. ClearML sends in threads of its own,
    and says in its own log what it could not send.

    A process has one task in ClearML. Where the program has called `Task.init` itself, that task is
    recorded into, and not ended.

    What ClearML does to the process around it is off: it neither takes over frameworks, arguments,
    output and random seeds, nor reads git and packages, nor watches the machine's load; and it
    reports from threads, unless its configuration says so, for its subprocess is a fork of a
    process with threads.
    `init_kwargs={"clearml": {"auto_connect_frameworks": True, "auto_resource_monitoring": True}}`
    turns such things on, frameworks only in the first run of a process; it takes what `Task.init`
    does. The start method of `multiprocessing` is settled once records are sent, so set another one
    before.

    Args:
        task_name: name shown for the run, which is a task of ClearML; None: the id of the run.
        tags: tags of the run.
        task_type: kind of task, such as "training" or "testing".
        output_uri: place for models that are saved by way of ClearML, such as s3://bucket/folder;
            None: nowhere.
        offline: record on this machine: in a folder, and at the end in a file beside it, for
            ClearML's `Task.import_offline_session`; the process stays offline then. False: as
            ClearML is configured, or the variable CLEARML_OFFLINE_MODE says.
    """

    name, client, extra = "clearml", "clearml", "clearml"
    task = Service.tracker  # a `clearml.Task`, by the name that scripts may know

    def __init__(
        self,
        task_name: str | None = None,
        tags: list[str] | None = None,
        task_type: str = "training",
        output_uri: str | None = None,
        offline: bool = False,
    ) -> None:
        self.task_name = task_name
        self.tags = tags
        self.task_type = task_type
        self.output_uri = output_uri
        self.offline = offline
        self._is_ours = False
        self._series = Series()
        self._names = Names("ClearML", lambda name: unmarked(name) or "_")

    def start(self, run: TrackedRun) -> None:
        # ClearML patches imports to find frameworks.
        wanted = [(builtins, "__import__")] if run.options.get("auto_connect_frameworks") else []
        with process_kept(wanted):
            self._begin(self._module, run)

    def state(self) -> dict[str, Any]:
        """The id of the task, and which series of images and plots there are."""
        return {"task_id": self._run.id, "series": self._series.state()}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """See `Tracker.log`; `log_kwargs={"clearml": {"level": 30}}` goes to `report_text`.

        Options of `report_histogram` go to histograms of the same record.
        """
        logger = self._run.get_logger()
        own, _ = self._options_of_record(options)
        for name, value in values.items():
            if isinstance(value, str) or not math.isfinite(value):
                text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value
                logger.report_text(f"{name} at step {step}: {text}", **{"print_console": False, **own})
            else:
                logger.report_scalar(*_title_and_series(name), value=value, iteration=step)

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """See `Tracker.log_images`. Stored as PNG; the second is the series "name ⟨image 1⟩"."""
        logger = self._run.get_logger()
        shared_options(options, "clearml", {logger.report_media: (*_PLACE, "stream")})
        for name, images in values.items():
            title, series = self._place(name, "image", step)
            for index, image in enumerate(images):
                place = (title, marked(series, f"image {index}") if index else series)
                # It would keep the last 100 files.
                media = {"stream": io.BytesIO(encode(image)), "file_extension": "png", "max_history": -1}
                logger.report_media(*place, iteration=step, **{**media, **options})

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        logger = self._run.get_logger()
        shared_options(options, "clearml", {logger.report_table: (*_PLACE, "table_plot")})
        title, series = self._place(name, "table", step)
        rows = [list(table.columns), *map(list, table.rows)]
        logger.report_table(title, series, iteration=step, table_plot=rows, **options)

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        """See `Tracker.log_histograms`; takes options of `report_histogram` and `report_text`."""
        _, own = self._options_of_record(options)
        for name, bins in values.items():
            title, series = self._place(name, "histogram", step)
            ends = [f"{lower} to {upper}" for lower, upper in zip(bins.edges[:-1], bins.edges[1:], strict=True)]
            bars = {"values": list(bins.counts), "xlabels": ends}
            self._run.get_logger().report_histogram(title, series, iteration=step, **{**bars, **own})

    def flush(self) -> None:
        """Hands over what waits; offline, until it is in the files."""
        for _ in range(2):  # the first wait may end with a round that had begun before the last records
            self._run.flush(wait_for_uploads=self._run.is_offline())

    def finish(self, failed: bool) -> None:
        if not self._is_ours:
            self._run.flush(wait_for_uploads=True)
            return
        with process_kept():
            self._run.close()
        if failed:
            self._run.mark_failed(status_reason="The training failed.", force=True)  # closing has called it completed

    def _begin(self, clearml: Any, run: TrackedRun) -> None:
        self._run = clearml.Task.current_task()
        self._is_ours = self._run is None
        if self._is_ours:
            self._run = self._started(clearml, run)
            self._run.accel_run_id = run.run_id
        elif getattr(self._run, "accel_run_id", None) is not None:
            raise RuntimeError(f"ClearML has one task per process: end the run {self._run.accel_run_id!r} before")
        elif run.options:
            _log.warning(
                "The program's own task of ClearML is used, and these init_kwargs are not: %s.", [*run.options]
            )
        if run.resumed:
            self._series = Series(run.resumed["series"])
        self._run.connect(dict(run.config))
        text = json.dumps(run.config, indent=2, ensure_ascii=False)
        self._run.set_configuration_object("config", config_text=text, config_type="json")

    def _started(self, clearml: Any, run: TrackedRun) -> Any:
        """A task of our own, the one again that is resumed if so."""
        if self.offline:
            clearml.Task.set_offline(offline_mode=True)
        _report_from_threads()
        clearml.Task.set_random_seed(None)  # else every generator starts from 1337
        options: dict[str, Any] = {
            "project_name": run.project,
            "task_name": self.task_name or run.run_id,
            "task_type": self.task_type,
            "tags": self.tags,
            "output_uri": self.output_uri or False,
            "reuse_last_task_id": False,
            "auto_connect_arg_parser": False,
            "auto_connect_frameworks": dict.fromkeys(_FRAMEWORKS, False),
            "auto_resource_monitoring": False,
            "auto_connect_streams": False,
        }
        if run.resumed:
            # 0 is added to the steps that are reported; True would add those that the task has had.
            options.update(reuse_last_task_id=run.resumed["task_id"], continue_last_task=0)
        task = clearml.Task.init(**{**options, **run.options})
        if run.resumed and task.id != run.resumed["task_id"]:
            _log.warning("ClearML could not go on with the task %s, and began %s.", run.resumed["task_id"], task.id)
        return task

    def _place(self, name: str, kind: str, step: int) -> tuple[str, str]:
        name = self._names.of(name)
        title, series = _title_and_series(name)
        return title, marked(series, *self._series.place(f"{kind}:{name}", kind, step))

    def _options_of_record(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        logger = self._run.get_logger()
        calls = {logger.report_text: ("msg",), logger.report_histogram: (*_PLACE, "values", "xlabels")}
        return shared_options(options, "clearml", calls)


def _title_and_series(name: str) -> tuple[str, str]:
    """The graph and the line in it."""
    title, _, series = name.partition("/")
    return (title, series) if title and series and title != series else (name, name)


def _report_from_threads() -> None:
    """Unless the configuration of ClearML says otherwise."""
    from clearml.config import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        config,
        config_obj,
    )

    if config.get("development.report_use_subprocess", None) is None:
        config_obj.set_overrides({"sdk": {"development": {"report_use_subprocess": False}}})
        config.clear_config_impl()

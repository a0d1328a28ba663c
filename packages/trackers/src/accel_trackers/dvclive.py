"""Runs recorded with DVCLive: plain files that DVC, its VS Code extension and DVC Studio show."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trackers.name_limits import Names, short
from accel_trackers.process_guard import process_kept, shared_options
from accel_trackers.service import Service
from accel_trackers.step_series import Series, marked, unmarked
from accel_trackers.waiting_file import when_there_is_space

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table, TrackedRun

_log = logging.getLogger(__name__)
_LONGEST = 200  # bytes of a part of a name: file systems take 255, of which endings and marks need some
_LONGEST_NAME = 1000
_STARTING = threading.Lock()  # while DVCLive finds another repository than by itself


class DVCLive(Service):
    """Records with DVCLive: numbers, texts, PNG images, and plots of tables and histograms.

    Numbers and texts are rows of one file per name.
    DVCLive writes to one folder, and a new run takes the place of the one before, which git or DVC
    is to have kept. An image or a plot at a step that its name has passed goes to the folder
    "name ⟨2⟩", and so on.

    What DVCLive does to the project around it is off: neither an experiment of DVC nor a dvc.yaml
    is made, and the machine's load is not watched.
    `init_kwargs={"dvclive": {"save_dvc_exp": True, "dvcyaml": "dvc.yaml", "monitor_system": True}}`
    turns them on; it takes what `dvclive.Live` does. A git repository is left as it is, where
    DVCLive by itself would make one of DVC of it, and stage files. Where this is needed, it still
    does: for `save_dvc_exp`, which needs a commit to begin with, and for `cache_images`. A
    repository that is one of DVC is read. Where DVC fails, DVCLive says so in its own log and goes
    on. Put back is what importing DVC sets: the level of the logger "asyncio", which it silences,
    and a filter for colours around the output.

    Args:
        dir: folder to write to, such as "dvclive" where DVC is to compare it from commit to commit;
            None: the folder of the run, in the folder for logs.
        save_dvc_exp: make the run an experiment of DVC at its end.
        dvcyaml: file dvc.yaml in which DVC is to find the plots; None: none is written.
        exp_name: name of the experiment; None: DVC's own.
    """

    name, client, extra = "dvclive", "dvclive", "dvclive"
    live = Service.tracker  # a `dvclive.Live`, by the name that scripts may know

    def __init__(
        self,
        dir: Path | None = None,
        save_dvc_exp: bool = False,
        dvcyaml: Path | None = None,
        exp_name: str | None = None,
    ) -> None:
        self.dir = dir
        self.save_dvc_exp = save_dvc_exp
        self.dvcyaml = dvcyaml
        self.exp_name = exp_name
        self._series = Series()
        self._names = Names("DVCLive", _file, _LONGEST_NAME)

    @property
    def requires_logging_directory(self) -> bool:
        """Unless it is told where to write."""
        return self.dir is None

    def start(self, run: TrackedRun) -> None:
        with process_kept(streams=True):  # which importing DVC wraps a filter for colours around
            from dvclive import Live  # type: ignore[import-not-found, import-untyped, unused-ignore]
            from dvclive.studio import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
                get_dvc_studio_config,
            )
        options: dict[str, Any] = {
            "dir": str(run.directory if self.dir is None else self.dir),
            "save_dvc_exp": self.save_dvc_exp,
            "dvcyaml": None if self.dvcyaml is None else str(self.dvcyaml),
            "exp_name": self.exp_name,
            "resume": run.resumed is not None,
        }
        options.update(run.options)
        if run.resumed:
            self._series = Series(run.resumed["series"])
            if not Path(options["dir"], "metrics.json").exists():
                _log.warning("DVCLive goes on in %s, where no run is: what came before is missing.", options["dir"])
        with _repository(is_made=bool(options["save_dvc_exp"] or options.get("cache_images"))):
            self._run = Live(**options)
        if not get_dvc_studio_config(self._run):
            # DVCLive would read all its files for DVC Studio at every flush, and keep a thread for ever, to send them nowhere.
            self._run.post_data_to_studio = lambda: None
        self._run.log_params(dict(run.config))

    def state(self) -> dict[str, Any]:
        """The series of images and plots, without the folder, which options give."""
        return {"series": self._series.state()}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """See `Tracker.log`; `log_kwargs={"dvclive": {"timestamp": True}}` goes to `log_metric`.

        Options of `Live.log_plot` go to histograms of the same record.
        """
        own, _ = self._options_of_record(options)
        self._run.step = step
        for name, value in values.items():
            self._log(self._names.of(name), value, own)

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """See `Tracker.log_images`. The first is `name/step.png`, shown with a slider.

        Others are `name ⟨image 1⟩/step.png`, and so on.
        """
        shared_options(options, "dvclive", {self._run.log_image: ("name", "val")})
        self._run.step = step
        for name, images in values.items():
            folder = self._folder(name, "images", step)
            for index, image in enumerate(images):
                place = marked(folder, f"image {index}") if index else folder
                self._write(partial(self._run.log_image, f"{place}/{step}.png", image.squeeze(2).numpy()))

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """See `Tracker.log_table`. The data of a plot: by default the first column is the x axis.

        Each row has the names of its columns, so one without rows gets a row of nulls, and one
        without columns is nothing to DVCLive.
        """
        shared_options(options, "dvclive", {self._run.log_plot: ("name", "datapoints")})
        if not table.columns:
            return
        rows = table.rows or [(None,) * len(table.columns)]
        axes = {"x": table.columns[0], "y": list(table.columns[1:]) or table.columns[0]}
        self._plot(name, step, [dict(zip(table.columns, row, strict=True)) for row in rows], {**axes, **options})

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        """See `Tracker.log_histograms`. Each becomes the data of a plot of bars."""
        _, own = self._options_of_record(options)
        axes = {"x": "count", "y": "from", "template": "bar_horizontal"}
        for name, bins in values.items():
            ends = zip(bins.edges[:-1], bins.edges[1:], bins.counts, strict=True)
            rows = [{"from": lower, "to": upper, "count": count} for lower, upper, count in ends]
            self._plot(name, step, rows, {**axes, **own})

    def flush(self) -> None:
        """Brings the summary of the latest values up to date; all else is in the files at once."""
        self._write(self._run.sync)

    def finish(self, failed: bool) -> None:  # noqa: ARG002 - DVC knows no failed experiments
        self._write(self._run.end)

    def _write(self, write: Callable[[], None]) -> None:
        when_there_is_space(write, self._run.dir)

    def _options_of_record(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        calls = {self._run.log_metric: ("name", "val"), self._run.log_plot: ("name", "datapoints")}
        return shared_options(options, "dvclive", calls)

    def _plot(self, name: str, step: int, rows: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
        self._run.step = step
        self._write(partial(self._run.log_plot, f"{self._folder(name, 'plot', step)}/{step}", rows, **options))

    def _folder(self, name: str, kind: str, step: int) -> str:
        file = self._names.of(name)
        return marked(file, *self._series.place(f"{kind}:{file}", kind, step))

    def _log(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        summary = self._run.summary
        if _fits(summary, name.split("/")):
            self._append(name, value, options)
            return
        # The summary is a nested dict, where "a" and "a/b" exclude each other. The files do not.
        self._run.summary = {}
        try:
            self._append(name, value, options)
        finally:
            self._run.summary = {**summary, name + "/" * (name in summary): value}

    def _append(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Has a row written, whole: DVCLive would leave a part of it where the disk is full, and add to that."""
        file = Path(self._run.plots_dir, "metrics", f"{name}.tsv")
        size = file.stat().st_size if file.exists() else 0
        undo = partial(os.truncate, file, size) if size else partial(file.unlink, missing_ok=True)
        when_there_is_space(partial(self._run.log_metric, name, value, **options), file, undo)


@contextlib.contextmanager
def _repository(is_made: bool) -> Iterator[None]:
    """Has `Live` find the repository of DVC that there is, or as it does by itself make one."""
    from dvclive import live  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if is_made:
        yield
        return
    with _STARTING:
        before = live.get_dvc_repo
        live.get_dvc_repo = _existing_repository
        try:
            yield
        finally:
            live.get_dvc_repo = before


def _existing_repository() -> Any:
    """DVC's repository around the working directory; None without one, or without a commit."""
    from dvc.exceptions import NotDvcRepoError  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from dvc.repo import Repo  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from dvc.scm import SCMError  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        found = Repo()
    except (NotDvcRepoError, SCMError):
        return None
    return None if getattr(found.scm, "no_commits", False) else found


def _fits(summary: Mapping[str, Any], parts: Sequence[str]) -> bool:
    inner: Any = summary
    for part in parts:
        if not isinstance(inner, Mapping):
            return False
        inner = inner.get(part, {})
    return not isinstance(inner, Mapping) or not inner


def _file(name: str) -> str:
    """A path inside its folder, near to the name. "step" is the name of the other column."""
    *folders, last = [unmarked(part) for part in name.split("/") if part not in {"", ".", ".."}] or ["_"]
    return "/".join(map(_short, [*folders, f"{last}_" if last == "step" else last]))


def _short(part: str) -> str:
    """The part without what no file has in its name, and as short as it has to be there."""
    return short(part.replace("\0", "_"), _LONGEST)

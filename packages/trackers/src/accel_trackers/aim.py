"""Runs recorded with Aim, in a repository on disk or on an Aim server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core import RecordRefusedError, TrackedRun
from accel_trackers.name_limits import Names
from accel_trackers.process_guard import shared_options
from accel_trackers.service import Service
from accel_trackers.step_series import Series, kind_of

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table

_QUIET = {"log_system_params": False, "capture_terminal_logs": False, "system_tracking_interval": None}


class Aim(Service):
    """Records with Aim: numbers, texts, images, histograms, and tables as texts of JSON lists.

    Aim's records of the terminal, of the machine's load, and of packages, environment variables and
    git are off.
    `init_kwargs={"aim": {"capture_terminal_logs": True, "system_tracking_interval": 10, "log_system_params": True}}`
    turns them on; it takes what `aim.Run` does.
    `log_kwargs={"aim": {"context": {"subset": "train"}, "epoch": 3}}` goes to its `track`.

    A name has one value per step in Aim, and one kind of value. What is recorded at a step that the
    name has passed goes to the context `{"series": 2}`, and so on; what is of another kind than
    before to `{"kind": "text"}`. Histograms have bins of equal width in Aim; others are refused.

    Args:
        repo: folder that holds, or is to hold, the folder .aim of all runs; or the address of a
            server, as aim://host:53800. None: a folder of the project, in the folder for logs.
        experiment: name of the experiment, which is Aim's word for a project; None: the project's.
        name: name shown for the run; None: Aim's own.
        tags: tags of the run.
    """

    name, client, extra = "aim", "aim", "aim"
    writer = Service.tracker  # an `aim.Run`, by the name that scripts may know

    def __init__(
        self,
        repo: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        self.repo = repo
        self.experiment = experiment
        self.run_name = name
        self.tags = tags
        self._series = Series()
        self._names = Names("Aim", lambda name: name or "_")  # an empty one ruins the whole run

    @property
    def requires_logging_directory(self) -> bool:
        """Unless the repository is somewhere else."""
        return self.repo is None

    def start(self, run: TrackedRun) -> None:
        repo = self.repo
        if repo is None and run.directory is not None and "repo" not in run.options:
            repo = str(run.directory.parent)  # that of the project, for all its runs
            run.directory.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"repo": repo, "experiment": self.experiment or run.project, **_QUIET}
        if run.resumed:
            options["run_hash"] = run.resumed["run_hash"]
            self._series = Series(run.resumed["series"])
        self._run = self._module.Run(**{**options, **run.options})
        if self.run_name is not None:
            self._run.name = self.run_name
        for tag in set(self.tags or ()) - set(self._run.tags):
            self._run.add_tag(tag)
        self._run["config"] = self._names.of_all(run.config)

    def state(self) -> dict[str, Any]:
        """The hash of the run, and which series there are."""
        return {"run_hash": self._run.hash, "series": self._series.state()}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        for name, value in values.items():
            stored = self._module.Text(value) if isinstance(value, str) else value
            self._track(stored, name, kind_of(value), step, options)

    def records(self, value: object) -> bool:
        """Whether it is one of Aim's own objects, such as `aim.Figure`."""
        return type(value).__module__.startswith("aim.")

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """See `Tracker.log_images`. They are stored as PNG."""
        for name, images in values.items():
            self._track([self._module.Image(image.numpy()) for image in images], name, "images", step, options)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """See `Tracker.log_table`. A text: the columns in its first line, then a row per line."""
        lines = [json.dumps(cells, ensure_ascii=False) for cells in (table.columns, *table.rows)]
        context = {"kind": "table", **(options.get("context") or {})}
        self._track(self._module.Text("\n".join(lines)), name, "table", step, {**options, "context": context})

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        for name, bins in values.items():
            _check_bins(name, bins)
            distribution = self._module.Distribution(hist=bins.counts, bin_range=(bins.edges[0], bins.edges[-1]))
            self._track(distribution, name, "histogram", step, options)

    def finish(self, failed: bool) -> None:
        """See `Tracker.finish`. Aim counts a run as failed that has not reported its success."""
        if not failed:
            self._run.report_successful_finish()
        containers = [one for one in self._run.repo.container_pool.values() if self._run.hash in str(one.path)]
        self._run.close()
        # Aim completes the files of a run when nobody holds it any more; and where they are gone by then, the process never ends.
        for one in containers:
            one.close()

    def _track(self, value: Any, name: str, kind: str, step: int, options: Mapping[str, Any]) -> None:
        shared_options(options, "aim", {self._run.track: ("value", "name", "step")})
        name, context = self._names.of(name), dict(options.get("context") or {})
        series = json.dumps([name, context], sort_keys=True) if context else name
        for mark in self._series.place(series, kind, step):
            context["series" if mark.isdigit() else "kind"] = int(mark) if mark.isdigit() else mark
        self._run.track(value, name=name, step=step, **{**options, "context": context})


def _check_bins(name: str, bins: Bins) -> None:
    """Aim stores the two ends and the counts, from which its readers divide the range evenly."""
    count, width = len(bins.counts), bins.edges[-1] - bins.edges[0]
    even = [bins.edges[0] + width * index / count for index in range(count + 1)]
    if count > 512 or any(abs(one - other) > 1e-6 * width for one, other in zip(bins.edges, even, strict=True)):
        raise RecordRefusedError(
            f"The histogram {name!r} has {count} bins of widths from {min(map(float.__sub__, bins.edges[1:], bins.edges[:-1])):g}; Aim "
            f"takes at most 512, all of one width. Log the values instead of bins, or leave Aim out of log_with."
        )

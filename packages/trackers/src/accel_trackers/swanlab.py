"""Runs recorded with SwanLab: on its server, or in files that `swanlab sync` sends there."""

from __future__ import annotations

import inspect
import logging
import math
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel_core import RecordRefusedError, TrackedRun
from accel_trackers.name_limits import Names
from accel_trackers.process_guard import check_options, process_kept
from accel_trackers.service import Service
from accel_trackers.step_series import Series, kind_of, marked, unmarked

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table

_log = logging.getLogger(__name__)
_PROBES = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")
_LONGEST_NAME, _LAST_STEP = 480, 2**48  # SwanLab takes 512 letters, of which marks need some
_OLDER_NAMES = {"experiment_name", "notes", "logdir"}  # which `swanlab.init` still takes, beside those of its signature


class SwanLab(Service):
    """Records with SwanLab: numbers, texts, images, histograms as bar charts, and tables.

    What SwanLab finds out about the machine, the packages and git, its watch over the machine's
    load, and its copy of the terminal are off.
    `init_kwargs={"swanlab": {"settings": swanlab.Settings(probe={"git": True, "monitor": True}, terminal={"proxy_type": "all"})}}`
    turns them on; other keys are those of `swanlab.init`. It never asks for a key at the terminal.
    SwanLab prints where the run is.

    SwanLab holds one value per name and step, one kind of value per name, and has one run per
    process. What is recorded at a step that the name has passed goes to "name ⟨2⟩", and so on; what
    is of another kind than before to "name ⟨text⟩". A name that SwanLab would change or refuse
    (blanks, dots or slashes around it, tabs, more than 480 letters) has a checksum at its end, and
    is told; so has that of a project with other characters than letters, digits and _-+., or more
    than 100. Numbers are stored as float64. Online, a resumed run goes on in the same run; of the
    steps after the checkpoint SwanLab keeps what it has and ignores what it gets. In the other
    modes it goes on in a folder of its own, to be sent with `swanlab sync --id`. SwanLab reports
    errors of its own on the terminal, and raises few; what it has not written is lost if the
    process is killed.

    Args:
        mode: way to record: "online", "offline", "local" for SwanLab's own dashboard, or
            "disabled"; None: what SwanLab is configured to, or "online".
        workspace: workspace of a team; None: the user's own.
        name: name shown for the run; None: SwanLab's own.
        description: description of the run.
        group: name of the group that the run belongs to.
        job_type: what the run does within its group, such as "train".
        tags: tags of the run.
        log_dir: folder for the files of all runs; None: swanlog in the working directory.
    """

    name, client, extra = "swanlab", "swanlab", "swanlab"
    run = Service.tracker  # a `swanlab.Run`, by the name that scripts may know

    def __init__(
        self,
        mode: Literal["online", "offline", "local", "disabled"] | None = None,
        workspace: str | None = None,
        name: str | None = None,
        description: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: list[str] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.options = {
            "mode": mode,
            "workspace": workspace,
            "name": name,
            "description": description,
            "group": group,
            "job_type": job_type,
            "tags": tags,
            "log_dir": None if log_dir is None else str(log_dir),
        }
        self._series = Series()
        self._names = Names("SwanLab", _fitting, _LONGEST_NAME)
        self._watches: list[Any] = []

    def start(self, run: TrackedRun) -> None:
        swanlab = self._module
        # It takes any keyword, and ignores those that it does not know.
        init = inspect.signature(swanlab.init).parameters.items()
        known = {name for name, one in init if one.kind is one.KEYWORD_ONLY} | _OLDER_NAMES
        check_options(run.options, known, "init_kwargs={'swanlab': ...}", "swanlab.init")
        if swanlab.has_run():
            raise RuntimeError(
                f"SwanLab has one run per process: end {swanlab.get_run().id!r} before, as by swanlab.finish()"
            )
        settings = swanlab.Settings(
            interactive=False, probe=dict.fromkeys(_PROBES, False), terminal={"proxy_type": "none"}
        )
        if "settings" in run.options:
            settings.merge_settings(run.options["settings"])
        options = {
            "project": Names("SwanLab", lambda name: re.sub(r"[^A-Za-z0-9_\-+.]", "_", name), 100).of(run.project),
            "config": _spelled(run.config),
            "id": run.run_id,
            "resume": "allow",
            **self.options,
        }
        if run.resumed:
            options.update(id=run.resumed["id"], resume="must")
        before = set(threading.enumerate())
        with process_kept():  # without SwanLab's hooks on the end of the process
            self._run = swanlab.init(**{**options, **run.options, "settings": settings})
        self._watches = [each for each in set(threading.enumerate()) - before if type(each).__name__ == "InotifyFD"]
        if run.resumed:
            self._go_on(run)

    def state(self) -> dict[str, Any]:
        """The id of the run, and which series there are."""
        return {"id": self._run.id, "mode": self._run.mode, "series": self._series.state()}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        _refuse(options)
        placed = {
            self._place(name, kind_of(value), step): self._module.Text(value) if isinstance(value, str) else value
            for name, value in values.items()
        }
        self._run.log(placed, step=step)

    def records(self, value: object) -> bool:
        """Whether it is one of SwanLab's own objects, such as `swanlab.Audio`."""
        return type(value).__module__.startswith("swanlab.")

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """See `Tracker.log_images`. They are stored as PNG."""
        _refuse(options)
        placed = {
            self._place(name, "image", step): [self._module.Image(image.squeeze(2).numpy()) for image in images]
            for name, images in values.items()
        }
        self._run.log(placed, step=step)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        _refuse(options)
        chart = self._module.echarts.Table()
        chart.add(list(table.columns), [list(row) for row in table.rows])
        self._run.log({self._place(name, "echarts", step): self._module.ECharts(chart)}, step=step)

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        _refuse(options)
        placed = {}
        for name, bins in values.items():
            chart = self._module.echarts.Bar()
            chart.add_xaxis([f"{lower} to {upper}" for lower, upper in zip(bins.edges, bins.edges[1:], strict=False)])
            chart.add_yaxis("count", list(bins.counts))
            placed[self._place(name, "echarts", step)] = self._module.ECharts(chart)
        self._run.log(placed, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish(**{"state": "crashed", "error": "The training failed."} if failed else {})
        for each in self._watches:  # over files that are saved with the run: SwanLab stops them only if there were any
            each.stop()
            each.join(5)

    def _place(self, name: str, kind: str, step: int) -> str:
        if step > _LAST_STEP:
            raise RecordRefusedError(f"Values were logged at step {step}, and SwanLab has none beyond {_LAST_STEP}.")
        name = self._names.of(name)
        return marked(name, *self._series.place(name, kind, step))

    def _go_on(self, run: TrackedRun) -> None:
        """Warns of what resuming cannot do, and goes on with the series of an online run."""
        assert run.resumed
        if self._run.mode == "online":
            self._series = Series(run.resumed["series"])
        elif self._run.mode != "disabled":
            _log.warning(
                "SwanLab does not go on in a run that is not online: from step %d on it is recorded in %s. To join them: swanlab sync --id",
                run.step,
                self._run.dir,
            )


def _fitting(name: str) -> str:
    """A name as SwanLab takes it, with nothing that looks like the mark of a series."""
    return re.sub(r"[\x00-\x1f\x7f]", "_", unmarked(name)).strip(" ./") or "_"


def _refuse(options: Mapping[str, Any]) -> None:
    check_options(options, (), "log_kwargs={'swanlab': ...}", "a record")


def _spelled(value: Any) -> Any:
    """The value with None in dicts and -inf as texts: SwanLab drops None, and calls -inf "Inf"."""
    if value == -math.inf:
        return "-Inf"
    if isinstance(value, Mapping):
        return {name: "None" if inner is None else _spelled(inner) for name, inner in value.items()}
    return [_spelled(inner) for inner in value] if isinstance(value, list) else value

"""Weights & Biases: runs on its server, or in local folders that `wandb sync` uploads later."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel_core import RecordRefusedError, TrackedRun
from accel_trackers.name_limits import Names, short
from accel_trackers.png import pillow
from accel_trackers.process_guard import process_kept, variables
from accel_trackers.service import Service

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table

logger = logging.getLogger(__name__)

WRITES_EVERY = 0.2  # seconds between writes to wandb's file; what is not in it is lost where the program is killed

# What wandb does at the start of a run unless one of its variables, such as WANDB_CONSOLE, or `settings` says otherwise.
QUIET_SETTINGS = {
    "console": "off",  # captures what the program prints
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "x_save_requirements": False,  # lists every installed package
    "x_transaction_log_flush_interval": WRITES_EVERY,
}
LONGEST_PROJECT = 128  # characters that wandb takes
OWN_NAMES = frozenset({"", "_step", "_runtime"})  # values under these are dropped by wandb, or replaced by its own
LONGEST_FILE = 180  # bytes of a name: file systems take 255, of which the checksum, the step and wandb's hash need some
LONGEST_ARTIFACT = 128  # letters of the name of one, which every table is
LOCAL_MODES = ("offline", "dryrun", "disabled")  # in which nobody has to be logged in


class WandB(Service):
    """Records with Weights & Biases. Log in once before the first run: type `wandb login`.

    A step is recorded as a value beside the others, which every chart has as its x axis. The
    service's own count of steps only goes up, and it drops what comes with an earlier one; here a
    step may come again, and nothing is lost.

    Options of `wandb.init` go on top of these: `init_kwargs={"wandb": {"save_code": True}}`. Off
    unless asked for there: capturing what the program prints, what wandb itself prints, the state
    of git, copies of the code, and the list of installed packages.
    (`{"settings": {"console": "wrap", "silent": False, "disable_git": False, "disable_code": False}}`.)
    Offline, wandb's reports of its own errors are off too, since they go to its server even then.

    The folder of a run resumed offline is uploaded whole, its records after the checkpoint too.
    `wandb.teardown()` ends wandb's process and threads before the program ends.

    Args:
        entity: user or team whose run it is; None: the one that WANDB_ENTITY or the login says.
        mode: way to record: "online", "offline" (files only), "disabled" (nothing is recorded) or
            "shared"; None: what WANDB_MODE says, else online.
        name: name shown for the run; None: the service invents one.
        group: name of the group that the run belongs to.
        job_type: what the run does within its group, such as "train".
        tags: labels of the run.
        notes: description of the run.
        dir: folder in which the folder wandb is made; None: what WANDB_DIR says, else the working
            directory.
        step_metric: name under which steps are recorded.
        system_metrics: let wandb measure processor, memory and accelerators every 15 seconds,
            from a process of its own.
    """

    name, client, extra = "wandb", "wandb", "wandb"
    run = Service.tracker  # a `wandb.Run`, by the name that scripts may know

    def __init__(
        self,
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        dir: Path | None = None,
        step_metric: str = "trainer/global_step",
        system_metrics: bool = False,
    ) -> None:
        self._options = {
            "entity": entity,
            "mode": mode,
            "name": name,
            "group": group,
            "job_type": job_type,
            "tags": tags,
            "notes": notes,
            "dir": dir,
        }
        self._step_metric = step_metric
        self._system_metrics = system_metrics
        self._names_of_images = Names("wandb", _short)
        self._names_of_tables = Names("wandb", _path)

    def start(self, run: TrackedRun) -> None:
        wandb = self._module
        options = self._options_of(run)
        options["settings"] = self._settings_of(wandb, options)
        mode = options["mode"] or (options["settings"].mode if _given(options["settings"], "mode") else None)
        # Its variable for child processes is put back; offline it sends no reports, which it decides once, by another variable.
        quiet = {"WANDB_SERVICE": None, **({"WANDB_ERROR_REPORTING": "false"} if mode in LOCAL_MODES else {})}
        with process_kept(), variables(quiet):
            if _asks_for_a_key(wandb, mode, options["settings"]):
                raise RuntimeError(
                    "wandb is to record online, and found no API key in WANDB_API_KEY, its settings or ~/.netrc. Type `wandb login` in a "
                    "terminal, or record on this machine only: WandB(mode='offline'), or WANDB_MODE=offline in the environment."
                )
            self._run = wandb.init(**options)
        self._names_of_tables = Names("wandb", _path, longest=LONGEST_ARTIFACT - len(f"run-{self._run.id}-"))
        self._run.define_metric(self._step_metric, hidden=True)
        self._run.define_metric("*", step_metric=self._step_metric, step_sync=False)
        if run.resumed is not None and not self._run.resumed:
            logger.warning(_NOT_CONTINUED, self._run.id, self._run.settings.sync_dir)

    def state(self) -> dict[str, Any]:
        """The id of the run."""
        return {"id": self._run.id}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """See `Tracker.log`; the options are those of `Run.log`."""
        rest = {name: value for name, value in values.items() if name not in OWN_NAMES}
        self._run.log({**rest, self._step_metric: step}, **options)
        if len(rest) < len(values):
            raise RecordRefusedError(
                f"Values named {sorted(OWN_NAMES.intersection(values))} were logged, and wandb keeps none under these names. Name them otherwise."
            )
        if values.get(self._step_metric, step) != step:
            raise RecordRefusedError(
                f"A value named {self._step_metric!r} was logged at step {step}, and it is {values[self._step_metric]!r}: this name is that "
                f"of the steps in wandb. Name the value otherwise, or the steps: WandB(step_metric=...)."
            )

    def records(self, value: object) -> bool:
        """Whether a value, or all of a list, is an image, table or other type of wandb."""
        values = value if isinstance(value, (list, tuple)) else [value]
        return bool(values) and all(isinstance(each, self._module.data_types.WBValue) for each in values)

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        # As a finished image, for wandb guesses from the values of an array whether they are to be scaled.
        images = {
            self._names_of_images.of(name): [self._module.Image(pillow(image)) for image in group]
            for name, group in values.items()
        }
        self.log(images, step, **options)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        kind = self._module.Table
        if len(table.rows) > kind.MAX_ROWS:
            raise RecordRefusedError(
                f"The table {name!r} has {len(table.rows)} rows, and wandb cuts tables off after {kind.MAX_ROWS}. Log fewer, or set "
                f"wandb.Table.MAX_ROWS before."
            )
        name = self._names_of_tables.of(name)
        rows = [list(row) for row in table.rows]
        self.log({name: kind(columns=list(table.columns), data=rows, allow_mixed_types=True)}, step, **options)

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        import numpy as np  # type: ignore[import-not-found, import-untyped, unused-ignore]

        histograms = {
            name: self._module.Histogram(np_histogram=(np.array(bins.counts), np.array(bins.edges)))
            for name, bins in values.items()
        }
        self.log(histograms, step, **options)

    def flush(self) -> None:
        """See `Tracker.flush`. wandb has no such call: waits until its file no longer grows."""
        file = Path(self._run.settings.sync_file)
        deadline = time.monotonic() + 10
        size, now = -2, -1
        while size != now and time.monotonic() < deadline:
            size = now
            time.sleep(1.5 * WRITES_EVERY)
            now = file.stat().st_size if file.exists() else -1

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    def _options_of(self, run: TrackedRun) -> dict[str, Any]:
        """The arguments of `wandb.init`: of this tracker, of the run; the user's options win."""
        options: dict[str, Any] = {
            **self._options,
            "project": Names("wandb", lambda name: re.sub(r"[/\\#?%:]", "_", name), LONGEST_PROJECT).of(run.project),
            "config": dict(run.config),
            "reinit": "create_new",
        }
        options["id"] = os.environ.get("WANDB_RUN_ID", run.run_id)
        if run.resumed is not None:
            options.update(id=run.resumed["id"], resume="allow", allow_val_change=True)
        options.update(run.options)
        return options

    def _settings_of(self, wandb: Any, options: Mapping[str, Any]) -> Any:
        """The user's `settings`, completed by ours where they and the environment set none."""
        given = options.get("settings") or {}
        settings = wandb.Settings(**given) if isinstance(given, Mapping) else given.model_copy()
        for name, value in {**QUIET_SETTINGS, "x_disable_stats": not self._system_metrics}.items():
            # Names with x_ are experimental: a later wandb may have no such setting, and then none is needed.
            if name in type(settings).model_fields and not _given(settings, name) and _variable(name) not in os.environ:
                setattr(settings, name, value)
        return settings


_NOT_CONTINUED = (
    "wandb knows no earlier part of run %s here, and records this one on its own, in %s. If the earlier part was written offline, "
    "`wandb sync` uploads both as one run."
)


def _short(name: str) -> str:
    """The name with parts short enough for folders and files, to which wandb adds a step."""
    return "/".join(short(part, LONGEST_FILE) for part in name.split("/"))


def _path(name: str) -> str:
    """The name as wandb takes it for an artifact: a path inside a folder on every system."""
    if ".." in re.split(r"[/\\]", name):
        name = re.sub(r"[/\\]", "_", name.replace("..", "__"))
    return re.sub(r"^(.):", r"\1_", name).lstrip("/\\") or "_"


def _given(settings: Any, name: str) -> bool:
    return name in settings.model_fields_set


def _variable(setting: str) -> str:
    """The environment variable that sets it."""
    return f"WANDB_{setting.removeprefix('x') if setting.startswith('x_') else setting}".upper()


def _asks_for_a_key(wandb: Any, mode: str | None, settings: Any) -> bool:
    """Whether `wandb.init` would ask for an API key in a terminal."""
    if (mode or wandb.setup().settings.mode) in LOCAL_MODES:
        return False
    # Keys for other servers, and those of a session that somebody has opened, are not looked up here.
    if _given(settings, "api_key") or _given(settings, "base_url") or wandb.run is not None:
        return False
    return not wandb.login(prompt=False)

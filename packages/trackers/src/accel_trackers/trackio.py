"""Trackio: runs in a database of this machine, or in a Hugging Face Space."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trackers.name_limits import Names, short
from accel_trackers.png import encode
from accel_trackers.process_guard import variables
from accel_trackers.service import Service

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table, TrackedRun

logger = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds that flush waits for Trackio's own thread, which writes twice a second
LONGEST_PROJECT = 180  # bytes: it is the name of a file, with endings
ELSEWHERE = {"space_id": "TRACKIO_SPACE_ID", "server_url": "TRACKIO_SERVER_URL"}  # where runs go if not to this machine


class Trackio(Service):
    """Records with Trackio, on this machine unless told otherwise: `trackio show` shows the runs.

    Options of `trackio.init` go on top of these: `init_kwargs={"trackio": {"server_url": "..."}}`.
    Off unless asked for there: the measuring of the machine, the dashboard in a notebook, and what
    Trackio prints when a run begins and ends. The Hugging Face Hub is not asked for anything, the
    name of the user neither, unless a Space or a server is to record.

    Trackio's own names, "project", "run", "timestamp", "step", "time", "metrics", are recorded as
    "__step" and so on. Several images under one name are several records of one step.

    Args:
        name: name shown for the run, by which it is found again; None: its id.
        group: name of the group that the run belongs to.
        dir: folder of the databases; None: what TRACKIO_DIR says, else that of Trackio in the
            cache of Hugging Face. It is one for the whole program, because Trackio decides it when
            it is imported.
        space_id: Hugging Face Space that is to record the run, as user/name; None: what
            TRACKIO_SPACE_ID says, else this machine.
        system_metrics: let Trackio measure processor, memory and accelerators every 10
            seconds, in threads of this process.
    """

    name, client, extra = "trackio", "trackio", "trackio"
    run = Service.tracker  # a `trackio.Run`, by the name that scripts may know

    def __init__(
        self,
        name: str | None = None,
        group: str | None = None,
        dir: Path | None = None,
        space_id: str | None = None,
        system_metrics: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "name": name,
            "group": group,
            "space_id": space_id,
            "auto_log_cpu": None if system_metrics else False,
            "auto_log_gpu": None if system_metrics else False,
            "embed": False,
        }
        self._dir = dir
        self._records = self._missing = 0

    def start(self, run: TrackedRun) -> None:
        trackio = _imported(self._dir)
        project = Names("Trackio", lambda name: short(name, LONGEST_PROJECT)).of(run.project)
        options: dict[str, Any] = {**self._options, "project": project}
        names = Names("Trackio", lambda name: name.lstrip("_"))
        options["config"] = {names.of(name): value for name, value in run.config.items()}
        options["name"] = options["name"] or run.run_id
        if run.resumed is not None:
            options.update(name=run.resumed["name"], resume="must")
        options.update(run.options)
        here = not any(options.get(name) or os.environ.get(variable) for name, variable in ELSEWHERE.items())
        with _silent(), _without_hub() if here else contextlib.nullcontext():
            # In a context of its own, because Trackio ends the run that was begun before in the same one.
            self._run = contextvars.Context().run(trackio.init, **options)
        self._records = self._stored() or 0

    def state(self) -> dict[str, Any]:
        """The name of the run."""
        return {"name": self._run.name}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        self._run.log(dict(values), step=step, **options)
        self._records += 1

    def records(self, value: object) -> bool:
        """Whether a value is an image, video, sound, page, table or other type of Trackio."""
        names = ("Image", "Video", "Audio", "Html", "Object3D", "Table", "Trace", "Histogram", "Markdown")
        return isinstance(value, tuple(getattr(self._module, name) for name in names))

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # As a file, which Trackio copies; of anything else it makes four channels.
            file = Path(folder) / "image.png"
            for name, images in values.items():
                for image in images:
                    file.write_bytes(encode(image))
                    self.log({name: self._module.Image(file)}, step, **options)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """See `Tracker.log_table`. Rows have the names of columns: without rows there are none."""
        self.log({name: self._module.Table(list(table.columns), [list(row) for row in table.rows])}, step, **options)

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        histograms = {
            name: self._module.Histogram(np_histogram=(list(bins.counts), list(bins.edges)))
            for name, bins in values.items()
        }
        self.log(histograms, step, **options)

    def flush(self) -> None:
        """See `Tracker.flush`. Trackio has no call for it: this waits for its thread."""
        deadline = time.monotonic() + PATIENCE
        # Of a full disk Trackio has warned, and it records again when there is space.
        with contextlib.suppress(sqlite3.OperationalError):
            while (stored := self._stored()) is not None and stored + self._missing < self._records:
                if time.monotonic() > deadline:
                    self._missing = self._records - stored  # it may have dropped them: they are waited for once
                    return
                time.sleep(0.05)
            if stored is not None:
                self._missing = min(self._missing, self._records - stored)  # what came late was not dropped

    def finish(self, failed: bool) -> None:  # noqa: ARG002  (Trackio does not tell how a run ended)
        with _silent():
            self._run.finish()
        stored = self._stored()
        if stored is not None and stored < self._records:
            raise RuntimeError(
                f"of {self._records} records {stored} are in Trackio's database; it warned of the reason"
            )

    def _stored(self) -> int | None:
        """The number of this run's records in the database; None if this machine has none."""
        from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from trackio.utils import get_storage_mode  # type: ignore[import-not-found, import-untyped, unused-ignore]

        if self._run.url is not None or get_storage_mode() == "jsonl":
            return None
        return int(SQLiteStorage.get_log_count(self._run.project, self._run.name, run_id=self._run.id))


def _imported(folder: Path | None) -> Any:
    """trackio, which reads where its databases are while it is imported."""
    wanted = {} if folder is None else {"TRACKIO_DIR": os.fspath(folder)}
    with variables(wanted, override=True):
        import trackio  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from trackio.utils import TRACKIO_DIR  # type: ignore[import-not-found, import-untyped, unused-ignore]
    if folder is not None and Path(folder).absolute() != Path(TRACKIO_DIR).absolute():
        raise ValueError(
            f"Trackio(dir={os.fspath(folder)!r}) was asked for, and a program has one folder, here {os.fspath(TRACKIO_DIR)!r}, since trackio "
            f"was imported. Set TRACKIO_DIR in the environment before the program starts."
        )
    return trackio


@contextlib.contextmanager
def _without_hub() -> Iterator[None]:
    """Keeps Trackio from asking the Hugging Face Hub for the user, which is slow offline."""
    from huggingface_hub import constants  # type: ignore[import-not-found, import-untyped, unused-ignore]

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps Trackio's modules from printing, in a context.

    Others still print, unlike with `redirect_stdout`: the training goes on in its own thread while
    Trackio waits for a server.
    """
    named = {name: vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "trackio"}
    modules = [names for names in named.values() if "print" not in names]
    for names in modules:
        names["print"] = lambda *_, **__: None
    try:
        yield
    finally:
        for names in modules:
            names.pop("print", None)

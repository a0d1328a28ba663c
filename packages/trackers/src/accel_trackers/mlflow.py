"""MLflow: runs on a tracking server, or in a database in the project's folder for `mlflow ui`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import posixpath
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core import RecordRefusedError
from accel_trackers.name_limits import flat, spelled
from accel_trackers.process_guard import check_options, variables
from accel_trackers.recording.values import said
from accel_trackers.service import Service

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from accel_core import Table, TrackedRun

_log = logging.getLogger(__name__)
_OPTIONS = ("tracking_uri", "experiment_name", "run_name", "tags", "description", "artifact_location", "flush_secs")
_OPTIONS_OF_A_RUN = (*_OPTIONS, "run_id", "parent_run_id", "experiment_id", "log_system_metrics")
_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
_NAMES = re.compile(r"[^\w\-. /]")  # what names of metrics, parameters and tags cannot have everywhere
_NAMES_OF_FILES = re.compile(r"[^A-Za-z0-9_\-. /]")
_LONGEST_NAME, _LONGEST_VALUE, _LONGEST_TAG = 250, 6000, 5000  # characters that a server takes
_METRICS, _PARAMS = 1000, 50  # that a request has at most: MLflow takes 1000 and 100, and no more than 1 MB


class MLflow(Service):
    """Records with MLflow, on a server or in a database in the project's folder.

    Without a server, this shows the runs:
    `mlflow ui --backend-store-uri sqlite:///LOGGING_DIR/PROJECT/mlflow.db`.

    The configuration is in the parameters of the run, cut at 6000 characters, and whole in its
    artifact config.json. Texts are artifacts, texts/NAME/STEP.txt, and so are tables,
    tables/NAME/STEP.json; where one comes again for a step, "-2" and so on is added. If artifacts
    cannot be written, parameters and numbers are recorded, and what is missing is told. MLflow's
    databases have no infinity: that is recorded as the largest float64, 1.797...e308. What a name
    was that had to be changed is in the tag "name.NAME". MLflow does not change the parameters of a
    run.

    Nothing global is touched: neither MLflow's active run, nor its tracking URI. Of the git state
    and the source code nothing is recorded, of the machine's load only on request, and the address
    of the run is not printed. MLflow's reports on its own use are switched off, because they draw
    from Python's random stream; set MLFLOW_DISABLE_TELEMETRY=false to have them.

    `init_kwargs={"mlflow": {...}}` takes the same options as below, and `run_id` of a run of MLflow
    to go on with, which gets the name, the tags and the description that are asked for;
    `parent_run_id` of one below which the run is shown; `experiment_id` in place of
    `experiment_name`; and `log_system_metrics=True`, which needs psutil: MLflow measures the
    machine every 10 seconds, in a thread of this process. `log` takes `timestamp`, in milliseconds
    since 1970. Folders of files (`file://`) are no databases any more for MLflow.

    Args:
        tracking_uri: address of the server or database, as http://host:5000. None: what
            MLFLOW_TRACKING_URI or the script (`mlflow.set_tracking_uri`) says, else a database in
            the folder of the project.
        experiment_name: name of the experiment that the run belongs to, which is made if there is
            none. None: what MLFLOW_EXPERIMENT_NAME says, else the project.
        run_name: name shown for the run; None: its id.
        tags: tags of the run, with their values.
        description: description of the run, in Markdown.
        artifact_location: address (URI) under which a new experiment keeps its files; None: the
            server's choice, and for the database of the project a folder beside it.
        flush_secs: seconds for which numbers are collected, to be recorded together.
    """

    name, client, extra = "mlflow", "mlflow", "mlflow"
    active_run = Service.tracker  # a `mlflow.entities.Run`, by the name that scripts may know

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
        description: str | None = None,
        artifact_location: str | None = None,
        flush_secs: float = 2.0,
    ) -> None:
        self.tracking_uri = tracking_uri
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.tags = tags
        self.description = description
        self.artifact_location = artifact_location
        self.flush_secs = flush_secs
        self._client: Any = None
        self._gathered: list[Any] = []
        self._sent_at = -float("inf")
        self._stamp = 0
        self._files: Counter[str] = Counter()
        self._there: dict[str, set[str]] = {}
        self._is_continued = False
        self._renamed: set[str] = set()
        self._monitor: Any = None
        self._config: Mapping[str, Any] | None = None  # until it is an artifact

    @property
    def requires_logging_directory(self) -> bool:
        """Whether no server is named. (`mlflow.set_tracking_uri` sets the variable too.)"""
        return self.tracking_uri is None and not os.environ.get("MLFLOW_TRACKING_URI")

    def start(self, run: TrackedRun) -> None:
        options = {name: getattr(self, name) for name in _OPTIONS} | _checked(run.options)
        self.flush_secs = options["flush_secs"]
        mlflow = _quiet_mlflow()
        uri, artifacts = options["tracking_uri"], options["artifact_location"]
        if uri is None and run.directory is not None and not mlflow.is_tracking_uri_set():
            folder = run.directory.parent.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(folder / 'mlflow.db').as_posix()}"
            artifacts = artifacts or (folder / "mlartifacts").as_uri()
            with _alone(folder):
                self._client = mlflow.MlflowClient(tracking_uri=uri)
        else:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
        named = options.get("run_id")
        continued = named or (run.resumed or {}).get("run_id")
        self._is_continued = bool(continued)
        if named:
            self._check_place(named, options)
        if continued:
            self._client.update_run(continued, status="RUNNING")
            self._run = self._client.get_run(continued)
            if named:
                self._describe(options)
        else:
            self._run = self._create(run, options, artifacts)
        self._store(run.config)
        self._config = run.config
        self._watch(options.get("log_system_metrics"))

    def state(self) -> dict[str, Any]:
        """The id that MLflow gave to the run."""
        return {"run_id": self._id}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        from mlflow.entities import Metric

        stamp = self._timestamp(options)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        for name, value in values.items():
            if name not in texts:
                self._gathered.append(Metric(self._name(name), float(value), stamp, step))
        if len(self._gathered) >= _METRICS or time.monotonic() - self._sent_at >= self.flush_secs:
            self.flush()
        for name, value in texts.items():  # last, because they alone may be refused
            with self._artifacts():
                self._client.log_text(self._id, value, self._file("texts", name, step, "txt"))

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """See `Tracker.log_images`. Several under one name get numbers: "name/0" and so on."""
        stamp = self._timestamp(options)
        for name, images in values.items():
            key = self._name(name, _NAMES_OF_FILES)
            for index, image in enumerate(images):
                numbered = f"{key}/{index}" if len(images) > 1 else key
                with self._artifacts():
                    self._client.log_image(
                        self._id, image.numpy(), key=numbered, step=step, timestamp=stamp, synchronous=True
                    )

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        import pandas as pd  # type: ignore[import-untyped, import-not-found, unused-ignore]  # MLflow depends on it

        self._timestamp(options)
        # As objects, for pandas would make floats of integers beside None.
        frame = pd.DataFrame(list(table.rows), columns=list(table.columns), dtype=object)
        with self._artifacts():
            self._client.log_table(self._id, frame, self._file("tables", name, step, "json"))

    def flush(self) -> None:
        self._sent_at = time.monotonic()
        while self._gathered:
            self._client.log_batch(self._id, metrics=self._gathered[:_METRICS], synchronous=True)
            del self._gathered[:_METRICS]
        self._store_whole()

    def finish(self, failed: bool) -> None:
        self.flush()
        if self._monitor is not None:
            self._monitor.finish()
        with variables({"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}):
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    @property
    def _id(self) -> str:
        return str(self._run.info.run_id)

    def _create(self, run: TrackedRun, options: Mapping[str, Any], artifacts: str | None) -> Any:
        """A new run of MLflow."""
        name = options["experiment_name"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        experiment = options.get("experiment_id") or self._experiment(name, artifacts)
        return self._client.create_run(experiment, run_name=options["run_name"] or run.run_id, tags=_tags(options))

    def _describe(self, options: Mapping[str, Any]) -> None:
        """Gives a run of the user's the name and the tags that were asked for."""
        if options["run_name"] is not None:
            self._client.update_run(self._id, name=options["run_name"])
        for tag, text in _tags(options).items():
            self._client.set_tag(self._id, tag, text, synchronous=True)
        self._run = self._client.get_run(self._id)

    def _check_place(self, run_id: str, options: Mapping[str, Any]) -> None:
        """Raises ValueError if a run is to go on in another experiment. Changes nothing."""
        by_id, by_name = options.get("experiment_id"), options.get("experiment_name")
        if by_id is None and by_name is None:
            return
        there = str(self._client.get_run(run_id).info.experiment_id)
        found = there if by_id is not None else self._client.get_experiment(there).name
        if found != str(by_name if by_id is None else by_id):
            raise ValueError(f"the run {run_id!r} of MLflow belongs to the experiment {found!r}, and stays there")

    def _watch(self, wanted: bool | None) -> None:
        """Has MLflow measure the machine, if that is asked for."""
        from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

        variable: Any = MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
        if variable.get() if wanted is None else wanted:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            monitor: Any = SystemMetricsMonitor
            uri = self._client.tracking_uri
            self._monitor = monitor(self._id, resume_logging=self._is_continued, tracking_uri=uri)
            self._monitor.start()

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """The id of the experiment of this name, which may be made by others in the same moment."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _store(self, config: Mapping[str, Any]) -> None:
        """The parameters of the run, as far as it does not have them yet."""
        from mlflow.entities import Param

        wanted = {self._name(name): _shortened(str(value), _LONGEST_VALUE) for name, value in flat(config)}
        there = self._run.data.params
        new = [Param(name, value) for name, value in wanted.items() if name not in there]
        for first in range(0, len(new), _PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _PARAMS], synchronous=True)
        changed = sorted(name for name, value in wanted.items() if there.get(name, value) != value)
        if changed:
            _log.warning(
                "MLflow does not change parameters: the new values of %s are in config.json.", ", ".join(changed)
            )

    def _store_whole(self) -> None:
        """The configuration as an artifact, once.

        Not in `start`: where a server cannot write, MLflow tries again for minutes, and `start_timeout` would be over.
        """
        config, self._config = self._config, None
        if config is not None:
            text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
            try:
                with self._artifacts():
                    self._client.log_text(self._id, text, "config.json")
            except RecordRefusedError as error:
                _log.warning("MLflow has the configuration as parameters alone, and not in config.json: %s", error)

    @contextlib.contextmanager
    def _artifacts(self) -> Iterator[None]:
        """Has what MLflow raises cost one record: numbers lie elsewhere, and may still be recorded."""
        try:
            yield
        except Exception as error:
            raise RecordRefusedError(
                f"MLflow could not write to {self._run.info.artifact_uri}: {said(error).rstrip('.')}. Give this process access to that "
                f"place; or start the server with --serve-artifacts, and use a new experiment."
            ) from error

    def _timestamp(self, options: Mapping[str, Any]) -> int:
        """The time of a record in milliseconds, never twice the same unless the user gives it.

        MLflow drops a value that repeats with its step and time.
        """
        check_options(options, ["timestamp"], "log_kwargs={'mlflow': ...}", "a record")
        if "timestamp" in options:
            return int(options["timestamp"])
        self._stamp = max(int(time.time() * 1000), self._stamp + 1)
        return self._stamp

    def _file(self, folder: str, name: str, step: int, ending: str) -> str:
        """The path of a new artifact."""
        name = self._name(name, _NAMES_OF_FILES)
        there = self._files_before(f"{folder}/{name}")
        while True:
            path = f"{folder}/{name}/{step:08}"
            self._files[path] += 1
            path += f".{ending}" if self._files[path] == 1 else f"-{self._files[path]}.{ending}"
            if path not in there:
                return path

    def _files_before(self, folder: str) -> set[str]:
        """The artifacts of a continued run: texts would replace them, tables be added to them."""
        if not self._is_continued:
            return set()
        if folder not in self._there:
            self._there[folder] = {each.path for each in self._client.list_artifacts(self._id, folder)}
        return self._there[folder]

    def _name(self, name: str, unwanted: re.Pattern[str] = _NAMES) -> str:
        """A name as MLflow takes it."""
        taken = _taken(name, unwanted)
        if taken != name and taken not in self._renamed:
            self._renamed.add(taken)
            self._client.set_tag(self._id, f"name.{taken}", _shortened(name, _LONGEST_TAG), synchronous=True)
        return taken


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run; that it is not nested says nothing here."""
    given = {name: value for name, value in options.items() if value or name not in {"nested", "nested_run"}}
    check_options(given, _OPTIONS_OF_A_RUN, "init_kwargs={'mlflow': ...}", "MLflow")
    return given


def _tags(options: Mapping[str, Any]) -> dict[str, str]:
    """Those of the user, and what MLflow keeps as tags."""
    special = {"mlflow.note.content": options["description"], "mlflow.parentRunId": options.get("parent_run_id")}
    return {**(options["tags"] or {}), **{tag: text for tag, text in special.items() if text is not None}}


def _quiet_mlflow() -> Any:
    """MLflow, without its reports on how it is used unless the user wants them."""
    wanted = _TELEMETRY in os.environ
    with variables({_TELEMETRY: "true"}):  # which is looked at when MLflow is imported
        import mlflow
        from mlflow import telemetry

        if not wanted and telemetry.get_telemetry_client() is not None:
            telemetry.set_telemetry_client()  # type: ignore[no-untyped-call, unused-ignore]  # looks again
    return mlflow


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Locks a folder, on POSIX: MLflow breaks a database that two processes begin at once."""
    if os.name != "posix":
        yield
        return
    import fcntl

    with (folder / ".mlflow.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _taken(name: str, unwanted: re.Pattern[str]) -> str:
    """The name, or if it is not taken one made of it that no other name becomes."""
    found = unwanted.sub("_", name)
    if found != posixpath.normpath(found) or found.startswith(("/", "..")) or found in {"", "."}:
        found = found.replace("/", "_").strip(".") or "_"
    return spelled(name, found, _LONGEST_NAME - len("name."))


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"

"""Comet: runs on its server, or in archives of this machine that `comet upload` uploads later."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import inspect
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trackers.name_limits import Names
from accel_trackers.png import pillow
from accel_trackers.process_guard import check_options, process_kept, shared_options, variables
from accel_trackers.service import Service

if TYPE_CHECKING:
    import torch

    from accel_core import Bins, Table, TrackedRun

logger = logging.getLogger(__name__)

LONGEST_NAME = 100  # letters of a value's name; Comet cuts longer ones off, and they become one
LONGEST_PARAMETER = 1000  # letters; Comet cuts longer texts off
STEP_PARAMETER = "comet:curr_step"  # Comet records each step a second time, as a parameter of its own
KEY_LENGTHS = (32, 50)  # of the key of an experiment, which has letters and digits only
AUTOMATIC = ("auto_param_logging", "auto_metric_logging", "log_graph")

# What Comet collects by itself, and the setting of its own, in a variable or in ~/.comet.config, that decides instead where there is one.
QUIET = {
    "log_code": ("comet.auto_log.code", False),
    "log_graph": ("comet.auto_log.graph", False),
    "parse_args": ("comet.auto_log.cli_arguments", False),
    "log_git_metadata": ("comet.auto_log.git_metadata", False),
    "log_git_patch": ("comet.auto_log.git_patch", False),
    "auto_output_logging": ("comet.auto_log.output_logger", False),
    "auto_param_logging": ("comet.auto_log.parameters", False),
    "auto_metric_logging": ("comet.auto_log.metrics", False),
    "auto_log_co2": ("comet.auto_log.co2", False),
    "display_summary_level": ("comet.display_summary_level", 0),
}

# Read by comet_ml while it is imported: whether it patches frameworks, reports its own errors, and prints more than warnings.
VARIABLES = {
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_ERROR_TRACKING_ENABLE": "false",
    "COMET_LOGGING_CONSOLE": "WARNING",
}


class CometML(Service):
    """Records with Comet. Log in once before the first run: type `comet login`.

    Options of `comet_ml.start` and of `comet_ml.ExperimentConfig` go on top of these:
    `init_kwargs={"comet_ml": {"log_code": True}}`. Off unless asked for there, or by Comet's own
    settings: copies of code, graph, git and command line, what the program prints, the measuring of
    the machine, and all that Comet takes from frameworks by patching them. The experiment is not
    Comet's global one either, so that several can be recorded at a time; it is where one of
    `auto_metric_logging`, `auto_param_logging` and `log_graph` is asked for. Frameworks are patched
    only if the program imports comet_ml first of all. Reports of Comet's own errors are off. Not to
    be turned off: at the end Comet records a metric "process duration", in seconds.

    Texts are recorded as text samples whose metadata has the name, tables as CSV files, the whole
    configuration as config.json beside the parameters (of which Comet keeps 1000 letters each).
    Comet has bins of its own: of a histogram it gets the middles and counts of the bins. Of a
    metric it keeps 15 000 values. Offline, nothing can be read before the run ends, and where the
    program is killed there is no archive. Where the server is lost on the way, which is told, Comet
    writes an archive too.

    Args:
        workspace: workspace of the experiment; None: what COMET_WORKSPACE or the login says.
        online: send records to Comet. False: keep them on this machine. None: what
            COMET_START_ONLINE says, else online.
        experiment_name: name shown for the experiment; None: the service invents one.
        tags: labels of the experiment.
        offline_directory: folder for archives; None: what COMET_OFFLINE_DIRECTORY says, else
            .cometml-runs in the working directory.
        system_metrics: let Comet describe the machine, and measure processor, memory and
            accelerators all the time, in threads of this process.
    """

    name, client, extra = "comet_ml", "comet_ml", "comet"
    writer = Service.tracker  # a `comet_ml.CometExperiment`, by the name that scripts may know

    def __init__(
        self,
        workspace: str | None = None,
        online: bool | None = None,
        experiment_name: str | None = None,
        tags: list[str] | None = None,
        offline_directory: Path | None = None,
        system_metrics: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "workspace": workspace,
            "online": online,
            "name": experiment_name,
            "tags": tags,
            "offline_directory": None if offline_directory is None else os.fspath(offline_directory),
        }
        self._system_metrics = system_metrics
        self._is_online = self._is_lost = False
        self._names = Names("Comet", lambda name: name, longest=LONGEST_NAME)

    def start(self, run: TrackedRun) -> None:
        comet_ml = _imported(any(run.options.get(name) for name in AUTOMATIC))
        start, config = self._options_of(comet_ml, run)
        online = start["online"] if start["online"] is not None else comet_ml.get_config("comet.start.online")
        if online is False:
            # Comet makes the last part of the path, and writes to a temporary folder where another is missing.
            Path(config["offline_directory"] or ".").mkdir(parents=True, exist_ok=True)
        elif not config.get("disabled") and comet_ml.get_api_key(start.get("api_key"), comet_ml.get_config()) is None:
            raise RuntimeError(
                "Comet is to record online, and found no API key in COMET_API_KEY or ~/.comet.config. Type `comet login` in a terminal, or "
                "record on this machine only: CometML(online=False), or COMET_START_ONLINE=0 in the environment."
            )
        with _hidden(comet_ml, any(config.get(name) for name in AUTOMATIC)):
            self._run = comet_ml.start(**start, experiment_config=comet_ml.ExperimentConfig(**config))
        self._run.autolog_parameters_ignore.add(STEP_PARAMETER)
        self._is_online = isinstance(self._run, comet_ml.Experiment)
        if not self._run.alive and not config.get("disabled"):
            raise RuntimeError("Comet did not open the experiment, and logged the reason, as an error of comet_ml")
        if run.resumed is not None and online is not False and not isinstance(self._run, comet_ml.ExistingExperiment):
            logger.warning(
                "Comet knows no earlier part of experiment %s: `comet upload` that before.", self._run.get_key()
            )
        if run.config:
            self._store(run.config)

    def state(self) -> dict[str, Any]:
        """The key of the experiment."""
        return {"experiment_key": self._run.get_key()}

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """See `Tracker.log`; takes options of `log_metrics` and `log_histogram_3d`."""
        own, _ = self._options_of_record(options)
        self._look_for_server()
        start = f"{prefix}_" if (prefix := own.pop("prefix", None)) is not None else ""
        metrics = {self._names.of(start + name): value for name, value in values.items() if not isinstance(value, str)}
        self._run.log_metrics(metrics, step=step, **own)
        for name, value in values.items():
            if isinstance(value, str):
                self._run.log_text(value, step=step, metadata={"name": name})

    def log_images(self, values: Mapping[str, Sequence[torch.Tensor]], step: int, **options: Any) -> None:
        """See `Tracker.log_images`; the options are those of `log_image`."""
        for name, images in values.items():
            for image in images:
                self._run.log_image(pillow(image), name=name, step=step, **options)

    def log_table(self, name: str, table: Table, step: int, **options: Any) -> None:
        """See `Tracker.log_table`; the options are those of `log_asset_data`."""
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(table.columns)
        rows.writerows([["None" if cell is None else cell for cell in row] for row in table.rows])
        self._run.log_asset_data(text.getvalue(), name=f"{name}.csv", step=step, **options)

    def log_histograms(self, values: Mapping[str, Bins], step: int, **options: Any) -> None:
        """See `Tracker.log_histograms`; takes options of `log_histogram_3d` and `log_metrics`."""
        _, own = self._options_of_record(options)
        for name, bins in values.items():
            histogram = self._module.Histogram()
            middles = [(low + high) / 2 for low, high in zip(bins.edges, bins.edges[1:], strict=False)]
            histogram.add(middles, counts=list(bins.counts))
            self._run.log_histogram_3d(histogram, name=self._names.of(name), step=step, **own)

    def _look_for_server(self) -> None:
        """Tells each time that Comet has lost its server, as far as it knows."""
        streamer = self._run.streamer if self._is_online else None
        before, self._is_lost = self._is_lost, streamer is not None and not streamer.has_connection_to_server()
        if self._is_lost and not before:
            logger.warning(_LOST, self._run.get_key())

    def _options_of_record(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        calls = {
            self._run.log_metrics: ("dic", "step"),
            self._run.log_histogram_3d: ("values", "name", "step"),
        }
        return shared_options(options, "comet_ml", calls)

    def flush(self) -> None:
        """See `Tracker.flush`. Comet sends by itself; its own `flush` may wait for an hour."""
        self._look_for_server()

    def finish(self, failed: bool) -> None:
        """See `Tracker.finish`. An experiment that failed says so under "Other"."""
        if failed:
            self._run.log_other("failed", True)
        self._run.end()

    def _options_of(self, comet_ml: Any, run: TrackedRun) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of `start` and of `ExperimentConfig`, from the user's options."""
        known = [set(inspect.signature(callee).parameters) for callee in (comet_ml.start, comet_ml.ExperimentConfig)]
        one_by_one = (known[0] | known[1]) - {"experiment_config"}
        check_options(
            run.options, one_by_one, "init_kwargs={'comet_ml': ...}", "comet_ml.start or comet_ml.ExperimentConfig"
        )
        quiet = {"log_env_details": ("comet.auto_log.env_details", self._system_metrics), **QUIET}
        ours = {name: value for name, (setting, value) in quiet.items() if comet_ml.get_config(setting) is None}
        key = run.resumed["experiment_key"] if run.resumed is not None else None
        options = {
            "project_name": run.project,
            "experiment_key": key or comet_ml.get_config("comet.experiment_key") or experiment_key(run.run_id),
            "mode": "create" if key is None else "get_or_create",
            **ours,
            **self._options,
            **run.options,
        }
        return tuple({name: options[name] for name in options if name in names} for names in known)  # type: ignore[return-value]

    def _store(self, config: Mapping[str, Any]) -> None:
        self._run.log_parameters(_cut(config), nested_support=True)
        self._run.log_asset_data(dict(config), name="config.json")


_LOST = (
    "Comet has lost its server while experiment %s is recorded. It tries again; if it cannot hand over everything by the end of the run, it "
    "leaves an archive on this machine, and says then how to upload it."
)


def experiment_key(run_id: str) -> str:
    """The key of a run in Comet: its id, as far as Comet allows, completed by its hash."""
    least, most = KEY_LENGTHS
    letters = "".join(letter for letter in run_id if letter.isascii() and letter.isalnum())
    key = letters + hashlib.sha256(run_id.encode()).hexdigest()
    return key[: max(least, min(most, len(letters)))]


def _cut(value: Any) -> Any:
    """The value with its texts shortened to the length that Comet keeps."""
    if isinstance(value, Mapping):
        return {name: _cut(member) for name, member in value.items()}
    return value[:LONGEST_PARAMETER] if isinstance(value, str) else value


def _imported(automatic: bool) -> Any:
    """comet_ml, kept from changing the process: its import replaces `sys.excepthook`."""
    with process_kept(), variables({} if automatic else VARIABLES):
        import comet_ml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    return comet_ml


@contextlib.contextmanager
def _hidden(comet_ml: Any, automatic: bool) -> Iterator[None]:
    """Keeps the experiment from becoming the global one, which ends where another begins."""
    before = comet_ml.get_global_experiment()
    if automatic:
        yield
        return
    comet_ml.config.set_global_experiment(None)
    try:
        yield
    finally:
        comet_ml.config.set_global_experiment(before)

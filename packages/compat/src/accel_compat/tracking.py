"""Trackers by the names and classes that scripts know, and classes that scripts register."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_compat.plugins import LoggerType
from accel_compat.state import PartialState
from accel_core import GeneralTracker, NotInstalledError, TrackedRun, Tracker
from accel_core.api.launcher import how_to_install, list_offers

if TYPE_CHECKING:
    from collections.abc import Callable


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for methods of trackers: they run on the main process alone, unless `main_process_only` is False."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "main_process_only", False) or PartialState().is_main_process:
            return function(self, *args, **kwargs)
        return None

    return run


def _service(name: str) -> Any:
    offer = next((offer for offer in list_offers("accel.trackers") if offer.name == name), None)
    if offer is None:
        raise NotInstalledError(f"The tracker {name!r} is one of accel-trackers. {how_to_install('accel-trackers')}")
    return offer.load()


class _Service(GeneralTracker):
    """One of accel-trackers' services, by itself: its methods record at once, in this thread."""

    name = ""
    requires_logging_directory = False
    main_process_only = True
    tracker: Any = property(lambda self: self._service.tracker)

    def __init__(self, run_name: str = "", logging_dir: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.logging_dir, self.init_kwargs = run_name, logging_dir, kwargs
        self._config: dict[str, Any] = {}
        self._service: Any = None
        self._last = -1

    def start(self) -> None:
        """Makes the service's object; its run begins with the configuration or the first record."""
        self._service = _service(self.name)()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Begins the run, with this configuration."""
        self._begin(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records values."""
        self._begin({})
        self._last = self._last + 1 if step is None else step
        self._service.log(values, self._last, **kwargs)

    def finish(self) -> None:
        """Closes the run."""
        if self._last >= 0 or self._config:
            self._service.finish(failed=False)

    def _begin(self, config: dict[str, Any]) -> None:
        if self._config:
            return
        self._config = config or {"run_name": self.run_name}
        folder = None if self.logging_dir is None else Path(self.logging_dir) / self.run_name
        self._service.start(TrackedRun(self.run_name, self.run_name or "run", config, folder, self.init_kwargs))


def _class_for(name: str, label: str, folder: bool) -> type[_Service]:
    text = f"Records with {label}, by itself; `Accelerator(log_with={name!r})` does it in a thread."
    names = {"__doc__": text, "__module__": "accelerate.tracking", "name": name, "requires_logging_directory": folder}
    return type(f"{label}Tracker", (_Service,), names)


TensorBoardTracker = _class_for("tensorboard", "TensorBoard", folder=True)
WandBTracker = _class_for("wandb", "WandB", folder=False)
TrackioTracker = _class_for("trackio", "Trackio", folder=False)
CometMLTracker = _class_for("comet_ml", "CometML", folder=False)
AimTracker = _class_for("aim", "Aim", folder=True)
MLflowTracker = _class_for("mlflow", "MLflow", folder=False)
ClearMLTracker = _class_for("clearml", "ClearML", folder=False)
DVCLiveTracker = _class_for("dvclive", "DVCLive", folder=False)
SwanLabTracker = _class_for("swanlab", "SwanLab", folder=False)

_BUILT_IN = (
    TensorBoardTracker, WandBTracker, TrackioTracker, CometMLTracker, AimTracker, MLflowTracker, ClearMLTracker,
    DVCLiveTracker, SwanLabTracker,
)  # fmt: skip
LOGGER_TYPE_TO_CLASS: dict[str, type[Any]] = {kind.name: kind for kind in _BUILT_IN}
"""What a name in `log_with` stands for; scripts put classes of their own here."""


def register_tracker_class(tracker_class: Any) -> None:
    """Has `log_with` know a class by its `name`; it is made when `init_trackers` is called.

    Its arguments are the project's name, the folder for logs where `requires_logging_directory`, and `init_kwargs[name]`.
    `ValueError` if it is no `GeneralTracker`, or lacks one of the two attributes.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(
            f"register_tracker_class() was given {tracker_class!r}, expected a subclass of `GeneralTracker`."
        )
    if not getattr(tracker_class, "name", None):
        raise ValueError(f"{tracker_class.__name__} has no `name`: give its class a non-empty `name` attribute.")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(f"{tracker_class.__name__} lacks `requires_logging_directory`: set it to True or False.")
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        what = f"A tracker named {tracker_class.name!r} is already registered"
        warnings.warn(f"{what}: it is {tracker_class.__name__} from now on.", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


class Registered(Tracker):
    """A class that a script registered: made with the run."""

    def __init__(self, kind: type[Any], logging_dir: Any) -> None:
        self.name = kind.name  # type: ignore[misc]  # of this object
        self.main_process_only = getattr(kind, "main_process_only", True)  # type: ignore[misc]
        self.requires_logging_directory = False  # type: ignore[misc]  # it gets the common one
        self._kind, self._folder, self._made = kind, logging_dir, None

    def start(self, run: TrackedRun) -> None:
        """Makes the script's object, and begins its run."""
        folder = [self._folder] if self._kind.requires_logging_directory else []
        self._made = made = self._kind(run.project, *folder, **run.options)
        made.start()
        if run.config:
            made.store_init_configuration(dict(run.config))

    @property
    def tracker(self) -> Any:
        """The script's object."""
        return self._made

    def log(self, values: Mapping[str, Any], step: int, **options: Any) -> None:
        """Hands values on."""
        self._made.log(dict(values), step=step, **options)  # type: ignore[attr-defined]

    def records(self, value: object) -> bool:  # noqa: ARG002
        """True: it says itself what it cannot record."""
        return True

    def finish(self, failed: bool) -> None:  # noqa: ARG002
        """Closes the run."""
        self._made.finish()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._made, name)


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose service is installed."""
    return [LoggerType(name) for name in LOGGER_TYPE_TO_CLASS if name in _known_words() and _is_usable(name)]


def chosen(log_with: Any, logging_dir: Any) -> list[Any]:
    """What `accel_core.Accelerator(log_with=...)` is given: names that can be used here, and objects.

    `ValueError` for an unknown name, and for one that needs a folder where there is none.
    """
    found: list[Any] = []
    for each in filter_trackers(log_with, logging_dir):
        kind = LOGGER_TYPE_TO_CLASS.get(_word(each)) if not isinstance(each, (GeneralTracker, Tracker)) else None
        if kind is None:
            found.append(each)
        else:
            found.append(_word(each) if issubclass(kind, _Service) else Registered(kind, logging_dir))
    if log_with is not None and not found:
        warnings.warn(f"log_with={log_with!r} names no tracker that is installed: nothing is recorded.", stacklevel=3)
    return found


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """The trackers of `log_with` that can be used here, each once: names as `LoggerType`, and objects."""
    if log_with is None:
        return []
    listed = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    objects = [each for each in listed if isinstance(each, (GeneralTracker, Tracker))]
    names = [_word(each) for each in listed if not isinstance(each, (GeneralTracker, Tracker))]
    if "all" in names:
        return [*objects, *get_available_trackers()]
    found: list[Any] = []
    for each in listed:
        if each in objects:
            found.append(each)
            continue
        name = _word(each)
        kind = LOGGER_TYPE_TO_CLASS.get(name)
        if kind is None and name not in _offered():
            known = ", ".join(sorted({*LOGGER_TYPE_TO_CLASS, *_offered()}))
            raise ValueError(f"Unsupported logging capability: log_with={name!r}. Known are {known}, and 'all'.")
        if kind is not None and issubclass(kind, _Service) and not _is_usable(name):
            what = f"log_with={name!r} cannot be used here, and is left out:"
            warnings.warn(f"{what} {_service(name).unusable()}", stacklevel=4)
            continue
        if getattr(kind, "requires_logging_directory", False) and logging_dir is None:
            raise ValueError(
                f"Logging with `{name}` requires a `logging_dir`: give it, or project_dir, to Accelerator()."
            )
        word = LoggerType(name) if name in _known_words() else name
        if word not in found:
            found.append(word)
    return found


def _word(given: Any) -> str:
    return str(getattr(given, "value", given))


def _offered() -> list[str]:
    return [offer.name for offer in list_offers("accel.trackers")]


def _known_words() -> list[str]:
    return [_word(each) for each in LoggerType]


def _is_usable(name: str) -> bool:
    kind = LOGGER_TYPE_TO_CLASS[name]
    return not issubclass(kind, _Service) or (name in _offered() and _service(name).unusable() is None)

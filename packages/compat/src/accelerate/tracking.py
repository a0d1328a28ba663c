"""Trackers."""

from accel_compat.missing_names import refuse_from
from accel_compat.tracking import (
    LOGGER_TYPE_TO_CLASS,
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from accel_core import GeneralTracker

__getattr__ = refuse_from(__name__)

__all__ = [
    "LOGGER_TYPE_TO_CLASS", "AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker", "GeneralTracker",
    "MLflowTracker", "SwanLabTracker", "TensorBoardTracker", "TrackioTracker", "WandBTracker", "filter_trackers",
    "get_available_trackers", "on_main_process", "register_tracker_class",
]  # fmt: skip

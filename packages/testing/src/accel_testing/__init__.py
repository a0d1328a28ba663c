"""Tools for tests of accel-core and its plugins: ranks, suites, and checks for leaks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_testing.checkpoint_suite import CheckpointSuite
    from accel_testing.leaks import assert_dies, live_objects, no_leaks
    from accel_testing.loader_suite import LoaderSuite
    from accel_testing.precision_suite import PrecisionSuite, Setting
    from accel_testing.ranks import RankReport, RanksFailed, preload, run_ranks
    from accel_testing.strategy_suite import StrategySuite
    from accel_testing.tracker_observations import Recorded, Written
    from accel_testing.tracker_suite import TrackerSuite

__all__ = [
    "CheckpointSuite", "LoaderSuite", "PrecisionSuite", "RankReport", "RanksFailed", "Recorded", "Setting", "StrategySuite",
    "TrackerSuite", "Written", "assert_dies", "live_objects", "no_leaks", "preload", "run_ranks",
]  # fmt: skip

__version__ = "0.1.0"

# Looked up when they are used: pytest imports this package wherever it is installed, and torch takes seconds.
_MODULES = {
    "CheckpointSuite": "checkpoint_suite",
    "LoaderSuite": "loader_suite",
    "PrecisionSuite": "precision_suite",
    "RankReport": "ranks",
    "RanksFailed": "ranks",
    "Recorded": "tracker_observations",
    "Setting": "precision_suite",
    "StrategySuite": "strategy_suite",
    "TrackerSuite": "tracker_suite",
    "Written": "tracker_observations",
    "assert_dies": "leaks",
    "live_objects": "leaks",
    "no_leaks": "leaks",
    "preload": "ranks",
    "run_ranks": "ranks",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

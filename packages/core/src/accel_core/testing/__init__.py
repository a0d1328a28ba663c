"""What a test of accel-core, or of a plugin, needs: ranks, the conformance suites, and the leak police."""

from accel_core.testing.checkpoint_suite import CheckpointSuite
from accel_core.testing.leaks import assert_dies, live_objects, no_leaks
from accel_core.testing.loader_suite import LoaderSuite
from accel_core.testing.precision_suite import PrecisionSuite, Setting
from accel_core.testing.ranks import RankReport, RanksFailed, preload, run_ranks
from accel_core.testing.strategy_suite import StrategySuite
from accel_core.testing.tracker_observations import Recorded, Written
from accel_core.testing.tracker_suite import TrackerSuite

__all__ = [
    "CheckpointSuite",
    "LoaderSuite",
    "PrecisionSuite",
    "RankReport",
    "RanksFailed",
    "Recorded",
    "Setting",
    "StrategySuite",
    "TrackerSuite",
    "Written",
    "assert_dies",
    "live_objects",
    "no_leaks",
    "preload",
    "run_ranks",
]

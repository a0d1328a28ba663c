"""What a test of accel-core, or of a plugin, needs: ranks, and the leak police."""

from accel_core.testing.leaks import assert_dies, live_objects, no_leaks
from accel_core.testing.ranks import RankReport, RanksFailed, run_ranks
from accel_core.testing.strategy_suite import StrategySuite

__all__ = ["RankReport", "RanksFailed", "StrategySuite", "assert_dies", "live_objects", "no_leaks", "run_ranks"]

"""What a test of accel-core, or of a plugin, needs: ranks, and the leak police."""

from accel_core.testing.ranks import RankReport, RanksFailed, run_ranks

__all__ = ["RankReport", "RanksFailed", "run_ranks"]

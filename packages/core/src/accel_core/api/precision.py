"""Names for precisions beside `accel_core.Precision`, `PrecisionPolicy`: to unscale and to skip."""

from accel_core.loop.gradients import Gradients
from accel_core.loop.optimizer_gate import SkippedIf, held_by
from accel_core.loop.preparation import Prepared

__all__ = ["Gradients", "Prepared", "SkippedIf", "held_by"]

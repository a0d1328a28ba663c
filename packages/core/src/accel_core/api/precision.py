"""Names for precisions beside `accel_core.Precision`, `PrecisionPolicy`: gradients to unscale."""

from accel_core.loop.gradients import Gradients
from accel_core.loop.optimizer_gate import held_by
from accel_core.loop.preparation import Prepared

__all__ = ["Gradients", "Prepared", "held_by"]

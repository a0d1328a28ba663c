"""The first value that is not finite: which module made it, on which rank, at which step, from which samples.

- `detector`: sees that a window went wrong, and has every rank repeat its own.
- `recording`: keeps what it takes to repeat a forward.
- `draws`: which batch a forward uses.
- `replay`, `tracing`, `alone`: repeat it, and look at every module.
- `findings`: what was found, and the error that says it.
"""

from accel_core.nonfinite.detector import NonFiniteDetector
from accel_core.nonfinite.findings import Finding, NonFiniteError

__all__ = ["Finding", "NonFiniteDetector", "NonFiniteError"]

"""The first value that is not finite: its module, rank, step and samples.

detector            sees that a window went wrong, and has every rank repeat its own
recording           keeps what it takes to repeat a forward
batch_tracking      which batch a forward uses
replay, tracing, no_collectives    repeat it, and look at every module

What was found, and the error that says it, are `accel_core.Finding` and
`accel_core.NonFiniteError`.
"""

from __future__ import annotations

from accel_diagnostics.detector import NonFiniteDetector

__all__ = ["NonFiniteDetector"]

__version__ = "0.1.0"

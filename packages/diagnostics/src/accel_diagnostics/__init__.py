"""The first value that is not finite: its module, rank, step and samples.

detector            sees that a window went wrong, and has every rank repeat its own
recording           keeps what it takes to repeat a forward
batch_tracking      which batch a forward uses
replay, tracing, no_collectives    repeat it, and look at every module
findings            what is told of a value, and of the samples of its batch

The error that says it on all ranks is `accel_core.NonFiniteError`.
"""

from __future__ import annotations

from accel_diagnostics.detector import NonFiniteDetector
from accel_diagnostics.findings import Finding, SampleIds, sample_ids

__all__ = ["Finding", "NonFiniteDetector", "SampleIds", "sample_ids"]

__version__ = "0.1.0"

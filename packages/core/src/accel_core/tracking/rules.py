"""How much patience the run has with its trackers, and what becomes of their failures."""

from __future__ import annotations

from dataclasses import dataclass

from accel_core.handlers import KwargsHandler


class TrackerError(RuntimeError):
    """A tracker failed, and the run was told to fail with it: `TrackingKwargs(strict=True)`."""


class RecordRefusedError(ValueError):
    """What a tracker raises for a record that its service cannot hold. That record is left out, which is said, and the tracker goes on."""


@dataclass
class TrackingKwargs(KwargsHandler):
    """How trackers are treated that raise, or take long.

    A tracker that does either is switched off with one warning, and the training goes on.

    Args:
        strict: whether the failure of a tracker, and a value that it cannot record, ends the run with a `TrackerError`.
        start_timeout: seconds that a tracker may take to start; the first record waits for it.
        stall_timeout: seconds that it may take for one record. Nobody waits for that: the training goes on meanwhile.
        finish_timeout: seconds that `end_training`, or the end of the program, waits until everything is recorded.
        most_pending: how many records may wait for one tracker, at least 1. Large ones count as several: every 10,000 values of
            histograms, images, tensors, arrays and lists, every 10,000 characters of texts, and every 100 cells of a table are one more.

    Raises:
        ValueError: for a number that is not positive.
    """

    strict: bool = False
    start_timeout: float = 120.0
    stall_timeout: float = 60.0
    finish_timeout: float = 300.0
    most_pending: int = 100_000

    def __post_init__(self) -> None:
        for name in ("start_timeout", "stall_timeout", "finish_timeout", "most_pending"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                unit = "a number of records, at least 1" if name == "most_pending" else "a positive number of seconds"
                raise ValueError(f"TrackingKwargs({name}={value!r}): expected {unit}.")

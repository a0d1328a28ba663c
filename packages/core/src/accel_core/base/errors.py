"""The exceptions beside `ValueError` and `TypeError`; messages say what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PluginError(Exception):
    """A plugin cannot be found, loaded, or activated together with the others."""


class NotInstalledError(PluginError, ImportError):
    """The distribution that serves a request is not installed."""


class CollectiveMismatchError(RuntimeError):
    """Ranks called a collective with arguments that do not fit; raised on every rank."""


class WorldError(RuntimeError):
    """The launch environment, devices or process group cannot give the world asked for."""


class CheckpointError(RuntimeError):
    """State cannot be saved, or a checkpoint cannot be loaded: damaged, or of something else."""


class TrackerError(RuntimeError):
    """A tracker failed, and the run was told to fail with it: `TrackingKwargs(strict=True)`."""


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite; raised on all ranks.

    `findings` has what each rank found, an `accel_diagnostics.Finding`, or None.
    """

    def __init__(self, findings: Sequence[Any], message: str) -> None:
        super().__init__(message)
        self.findings = tuple(findings)

    @property
    def first(self) -> Any:
        """The earliest finding, of those reproduced if any: by micro-batch, then by rank."""
        return min((finding for finding in self.findings if finding is not None), key=lambda each: each.order)

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[tuple[Any, ...], str]]:
        return type(self), (self.findings, str(self))


class RecordRefusedError(ValueError):
    """A tracker's service cannot hold a record: it is reported, left out, and the rest goes on."""

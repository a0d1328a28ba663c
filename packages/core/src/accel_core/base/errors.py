"""The exceptions beside `ValueError` and `TypeError`. A message says what was asked, what was found, what to type next."""

from __future__ import annotations


class PluginError(Exception):
    """A plugin cannot be found, loaded, or activated together with the others."""


class NotInstalledError(PluginError, ImportError):
    """The distribution that serves a request is not installed."""


class CollectiveMismatchError(RuntimeError):
    """The ranks called a collective with arguments that do not fit together; raised on every rank."""


class WorldError(RuntimeError):
    """The launch environment, the devices or the process group cannot give the world that was asked for."""


class CheckpointError(RuntimeError):
    """State cannot be saved as it is, or a checkpoint cannot be loaded: it is none, is damaged, or is of something else."""


class TrackerError(RuntimeError):
    """A tracker failed, and the run was told to fail with it: `TrackingKwargs(strict=True)`."""


class RecordRefusedError(ValueError):
    """A tracker's service cannot hold a record. That record is left out, which is said, and the tracker goes on."""

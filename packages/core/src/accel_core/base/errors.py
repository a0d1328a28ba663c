"""The exceptions beside `ValueError` and `TypeError`; messages say what to type next."""

from __future__ import annotations


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


class RecordRefusedError(ValueError):
    """A tracker's service cannot hold a record: it is reported, left out, and the rest goes on."""

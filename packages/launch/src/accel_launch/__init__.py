"""Starting and configuring: the `accel` command, and launchers for notebooks and for debugging."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_launch.errors import LaunchError, RankFailedError
    from accel_launch.notebook.launchers import debug_launcher, notebook_launcher

__all__ = ["LaunchError", "RankFailedError", "debug_launcher", "notebook_launcher"]

__version__ = "0.1.0"

_MODULES = {
    "LaunchError": "errors",
    "RankFailedError": "errors",
    "debug_launcher": "notebook.launchers",
    "notebook_launcher": "notebook.launchers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

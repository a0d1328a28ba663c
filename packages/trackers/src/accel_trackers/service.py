"""What the trackers of services share."""

from __future__ import annotations

from importlib.util import find_spec


def missing(module: str, extra: str) -> str | None:
    """Why a service cannot be used here, if its client is not installed.

    Args:
        module: the top-level module of the client, which is not imported.
        extra: that of accel-trackers which installs it.
    """
    if find_spec(module) is not None:
        return None
    return f"{module} is not installed. Type: pip install 'accel-trackers[{extra}]'"

"""The distribution that is installed as `accelerate`: ours, or another one that this one cannot stand beside."""

from __future__ import annotations

from importlib import metadata

VERSION = "1.15.0"
"""The version of the public behaviour that is offered."""
OWN = "accel"
"""The local part of the version of packages/compat-metadata."""


def refuse_another() -> None:
    """Raises `ImportError` if another distribution named `accelerate` was installed, whose files lie between ours."""
    try:
        installed = metadata.version("accelerate")
    except metadata.PackageNotFoundError:
        return  # accel-compat without its metadata: pip refuses that, and nothing is wrong about the files
    if installed.partition("+")[2] != OWN:
        raise ImportError(
            f"accelerate {installed} and accel-compat were installed in one environment, and both have the module accelerate. For "
            f"accel-compat type: pip uninstall accelerate accel-compat, and install accel-compat again. For the other: pip uninstall "
            f"accel-compat accelerate, and pip install accelerate."
        )

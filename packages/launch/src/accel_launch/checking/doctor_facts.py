"""The facts about one rank's machine for `accel doctor`: versions, variables, limits and names."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_launch.checking.environment import relevant
from accel_launch.starting.interfaces import own_addresses

if TYPE_CHECKING:
    from accel_core.api.launcher import Place

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (looked at, not written to)
_OWN = re.compile(
    r"RANK|.*_RANK|.*LOCALID|.*NODEID|.*PROCID|.*_PID|TORCHELASTIC_.*|.*LOCALRANKID|GLOO_SOCKET_IFNAME|SLURMD_NODENAME|"
    r"SLURM_(LAUNCH|TASK|TOPOLOGY).*|PMIX_.*|ACCELERATE_MACHINE_RANK"
)
"""Variables that have to differ between the ranks or machines of one run."""


def facts(place: Place) -> dict[str, Any]:
    """Versions, variables, limits and names of this process's machine, as JSON. No collective."""
    names = sorted({str(each.metadata["Name"]) for each in metadata.distributions()})
    ours = {name: metadata.version(name) for name in names if name.startswith("accel-")}
    return {
        "rank": place.rank,
        "machine": int(os.environ.get("GROUP_RANK") or place.rank // place.local_size),
        "local rank": place.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "addresses": own_addresses(),
        "host resolves to": _resolved(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **ours},
        "variables": {name: value for name, value in relevant(os.environ).items() if not _OWN.fullmatch(name)},
        "driver": _driver(),
        "shared memory": shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.exists() else None,
        "open files": _open_files(),
    }


def _driver(root: Path = Path("/")) -> str:
    """The version of the driver of NVIDIA or AMD; empty where there is none, or it does not tell."""
    for path, pattern in (
        ("proc/driver/nvidia/version", r" (\d+\.\d[\d.]*)"),
        ("sys/module/amdgpu/version", r"(\S+)"),
    ):
        with suppress(OSError):
            found = re.search(pattern, (root / path).read_text(encoding="utf-8"))
            if found is not None:
                return str(found[1])
    return ""


def _resolved() -> list[str]:
    """The addresses of this host's name; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(each[4][0]) for each in found})


def _open_files() -> int | None:
    """The limit; None if there is none, or the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit

"""The facts about a machine and an installation that a bug report needs: `accel env`.

Nothing here starts a process group, or fails because one thing cannot be found: what cannot be told
is said to be unknown. Values that look secret by their names are never given out.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_core import WorldError
from accel_core.api.launcher import masked, masked_words, read_place, without_secrets
from accel_launch.settings import files
from accel_launch.starting.devices import usable_cores

_RELEVANT = re.compile(
    r"(ACCEL|SLURM_|OMPI_|PMI|MV2_|MPI_|NCCL_|RCCL_|GLOO_|UCX_|FI_|TP_|TORCH|PYTORCH_|OMP_|MKL_|KMP_|CUDA_|HIP_|ROCR_|HSA_|ZE_|XLA_"
    r"|MASTER_|RANK$|WORLD_SIZE$|LOCAL_RANK$|LOCAL_WORLD_SIZE$|GROUP_|ROLE_|HF_HOME$|XDG_CONFIG_HOME$|XDG_CACHE_HOME$|NO_COLOR$"
    r"|PYTHONPATH$|VIRTUAL_ENV$|CONDA_PREFIX$|LD_LIBRARY_PATH$).*"
)
_GIB = 1 << 30


def describe(config_file: str | None = None) -> dict[str, Any]:
    """Everything as JSON: section → what → value. `config_file` None: the user's own file."""
    return {
        "system": _system(),
        "torch": _torch(),
        "devices": _devices(),
        "distributions": _distributions(),
        "started": _started(),
        "environment": relevant(os.environ),
        "configuration": _configuration(config_file),
    }


def text(found: Mapping[str, Any]) -> str:
    """The facts that `describe` has found, as lines of text."""
    lines = []
    for section, content in found.items():
        width = max(map(len, content), default=0)
        lines += [section, *([] if content else ["  none"])]
        for name, value in content.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"  {name.ljust(width)}  {shown}")
    return "\n".join(lines)


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that bear on how processes start, meet and compute; secrets hidden."""
    return {name: _shown(name, value) for name, value in sorted(environ.items()) if _RELEVANT.fullmatch(name)}


def _shown(name: str, value: str) -> str:
    try:
        content = json.loads(value)
    except ValueError:
        return str(masked(name, value))
    return json.dumps(masked(name, content)) if isinstance(content, (dict, list)) else str(masked(name, value))


def _system() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": _memory(),
    }


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    limit = Path("/sys/fs/cgroup/memory.max")
    limited = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    words = f"{total / _GIB:.1f} GiB"
    return f"{words}, limited to {int(limited) / _GIB:.1f} GiB" if limited.isdecimal() else words


def _torch() -> dict[str, str]:
    """Its version, what it was built with, and what ranks can talk by."""
    built = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu", "git_version")}
    found = {
        "version": torch.__version__,
        **{name: str(version) for name, version in built.items() if version is not None},
    }
    if (library := torch.backends.cudnn.version()) is not None:
        found["cudnn"] = str(library)
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if getattr(dist, f"is_{name}_available")()]
    if "nccl" in backends:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {**found, "backends": ", ".join(backends), "threads": str(torch.get_num_threads())}


def _devices() -> dict[str, str]:
    if not torch.accelerator.is_available():
        return {}
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "one is available"
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda _: "no name")
    return {f"{kind.type}:{index}": str(name_of(index)) for index in range(torch.accelerator.device_count())}


def _distributions() -> dict[str, str]:
    """Versions of our distributions, of those that offer to accel-core, and of what these need."""
    installed = {_folded(each.metadata["Name"]): each for each in metadata.distributions() if each.metadata["Name"]}
    ours = {
        name
        for name, each in installed.items()
        if name.startswith("accel-") or any(point.group.startswith("accel.") for point in each.entry_points)
    }
    needs = [need for name in ours for need in installed[name].requires or ()]
    needed = {_folded(match[0]) for need in needs if (match := re.match(r"[\w.-]+", need))}
    names = [*sorted(ours), *sorted((needed & installed.keys()) - ours)]
    return {name: installed[name].version for name in names}


def _folded(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _started() -> dict[str, str]:
    try:
        place = read_place(os.environ)
        by = place.source if place.source == "alone" else f"{place.source}, rank {place.rank} of {place.size}"
    except WorldError as error:
        by = f"unclear: {error}"
    return {"command": " ".join(masked_words(sys.argv)), "by": by}


def _configuration(config_file: str | None) -> dict[str, Any]:
    """The file, and what it says. What cannot be read is not shown, because it may hold secrets."""
    path = files.chosen_path(config_file, os.environ)
    try:
        found = files.load(config_file, os.environ)
    except (ValueError, OSError):
        state = "cannot be read: `accel config validate` says why" if path.exists() else "is not there"
        return {"file": f"{path} ({state})"}
    if found is None:
        return {"file": f"{path} (is not there)"}
    return {"file": str(found.path), **without_secrets(found.data)}

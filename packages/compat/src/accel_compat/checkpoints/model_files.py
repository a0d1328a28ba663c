"""Weights of one model as entries of a neutral checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from accel_compat.checkpoints.distributed_files import distributed_parts
from accel_compat.checkpoints.pickled_file import read_dict
from accel_core import CheckpointError
from accel_core.api.layouts import Alias, Elementwise, Entry, Opaque

Part = dict[str, dict[str, Entry]]
Parts = list[Callable[[], Part]]

_COMPILED = "_orig_mod."
_INDEX = ".index.json"


def model_parts(path: Path, unit: str) -> tuple[Parts, str]:
    """What gives the entries of a model, file by file, and in a few words where they are."""
    if path.is_dir():
        parts = distributed_parts(path, "model", lambda names: f"{unit}/{plain_name(names[0])}")
        return parts, f"{path.name} (torch.distributed.checkpoint)"
    files = _files_of_index(path) if path.name.endswith(_INDEX) else [path]
    return [partial(_part, each, unit) for each in files], path.name


def plain_name(name: str) -> str:
    """The name of a parameter without what compilation puts into it."""
    return name.replace(_COMPILED, "")


def _part(path: Path, unit: str) -> Part:
    state = _safetensors(path) if path.suffix == ".safetensors" else read_dict(path)
    return {unit: entries_of({plain_name(str(name)): value for name, value in state.items()})}


def entries_of(state: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries of a state dict: tensors, which may be tied, and what modules add to it."""
    found: dict[str, Entry] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[name] = Opaque(value, type(value).__qualname__)
            continue
        place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        kept = first.setdefault(place, name) if value.numel() else name
        found[name] = Elementwise.whole(value) if kept == name else Alias(kept)
    return found


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    except SafetensorError as error:
        raise CheckpointError(f"{path} was to be read, but it is damaged: {error!s:.200}. Copy it again.") from error


def _files_of_index(path: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        files = [path.parent / name for name in names if Path(name).name == name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} was to be read, but it is damaged: {error!s:.200}. Copy it again.") from error
    missing = [name for name in names if path.parent / name not in files or not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} was to be read, but {missing[0]!r:.200}, which it names, is not beside it. Copy it again."
        )
    return files

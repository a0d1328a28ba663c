"""The paths of Accelerate's configuration file, and the keys by which one is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = ("default_config.yaml", "default_config.json")
_MARKS = ("compute_environment", "distributed_type")
"""Keys that every file of Accelerate has, and none of ours."""


def peer_paths(environ: Mapping[str, str]) -> list[Path]:
    """The paths at which Accelerate may keep its file, best first."""
    home = Path(environ.get("HOME") or Path.home())
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    folder = Path(environ.get("HF_HOME") or cache / "huggingface") / "accelerate"
    # Scripts move HF_HOME after the file was written: then the file still lies where it was.
    folders = dict.fromkeys(
        [folder, cache / "huggingface" / "accelerate", home / ".cache" / "huggingface" / "accelerate"]
    )
    return [each.expanduser() / name for each in folders for name in _NAMES]


def is_of_peer(data: Mapping[str, Any]) -> bool:
    """Whether the content of a file is in Accelerate's format."""
    return any(key in data for key in _MARKS)

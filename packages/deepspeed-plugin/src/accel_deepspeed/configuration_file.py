"""Reading a DeepSpeed configuration from a file, a dictionary, or an object that holds one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any


def load(config: object) -> tuple[dict[str, Any], str]:
    """A copy of the configuration, and how messages call it.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: it is neither a mapping nor a path.
        ValueError: the file is not JSON, or has a key twice; with its line.
    """
    held = getattr(config, "config", config)
    if isinstance(held, Mapping):
        return copy.deepcopy(dict(held)), "The DeepSpeed configuration"
    if not isinstance(held, str | Path):
        raise TypeError(
            f"config={config!r} is a {type(config).__name__}: give a dictionary, or the path of a JSON file, as DeepSpeed's "
            f"documentation describes it."
        )
    return _read_file(Path(held)), str(held)


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"config={str(path)!r} was given, and there is no such file (looked for at {path.absolute()}). Give the path of a "
            f"JSON file, or a dictionary."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_without_repetition, path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}, column {error.colno}: this is not JSON: {error.msg}. Names and texts stand in double "
            f"quotes, and there are no comments and no comma after the last entry."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, where an object of keys is expected: {{...}}.")
    return config


def _without_repetition(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's entries; JSON would keep the last of a key that stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"{path} has the key {twice!r} twice in one section. Keep one of them.")
    return found

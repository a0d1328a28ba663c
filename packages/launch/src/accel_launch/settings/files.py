"""Configuration files: where they lie, what they say and in which line.

A file is YAML 1.2, where `no` is a text, or JSON. It is read here and by nothing else: a script
that is started by `python` or `torchrun` never picks up one from somebody's home.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_core import NotInstalledError
from accel_core.api.launcher import masked, variable_of
from accel_launch.errors import SettingsError
from accel_launch.importing.places import is_of_peer, peer_paths

_FILE_VARIABLE = variable_of("config_file")
_MOST, _LARGEST = 100_000, 1 << 20  # values in a file, where aliases count as what they stand for; and characters of it
Positions = dict[tuple[str, ...], int]


class Unusual(int):
    """A whole number such as 007, 0x10 or 1_000, perhaps meant as a text, which would differ."""


@dataclass(frozen=True)
class ConfigFile:
    """The content of a configuration file."""

    path: Path  # where it lies
    data: Mapping[str, Any]  # its content; empty for an empty file
    positions: Positions = field(default_factory=dict)  # of each key, by the keys that lead to it: its line, from 1
    notes: tuple[str, ...] = ()  # what the user should know of how it was read

    def place(self, *keys: str) -> str:
        """The position of a key: `config.yaml, line 7`."""
        line = self.positions.get(keys)
        return str(self.path) if line is None else f"{self.path}, line {line}"


def own_path() -> Path:
    """The path of the user's own file, present or not, in the configuration folder (XDG)."""
    from platformdirs import user_config_path

    return user_config_path("accel", appauthor=False) / "config.yaml"


def chosen_path(option: str | None, environ: Mapping[str, str]) -> Path:
    """The file that holds: `--config-file`, else `ACCELERATE_CONFIG_FILE`, else the user's own."""
    text = option or environ.get(_FILE_VARIABLE, "").strip()
    return Path(text).expanduser() if text else own_path()


def load(option: str | None, environ: Mapping[str, str]) -> ConfigFile | None:
    """Reads the file that holds; None if none was asked for and the user has none.

    If the user has no file of ours but one of Accelerate's, that one is translated, and so is a
    requested file of that kind. `ConfigFile.notes` says so. What translates may not be installed:
    then the former is left out, and the latter is an error. Raises `SettingsError` if a file
    that was asked for does not exist, or if one cannot be read.
    """
    path = chosen_path(option, environ)
    if path.exists():
        try:
            return _read_either(path)
        except NotInstalledError as error:
            raise SettingsError(f"{path} is in Accelerate's format. {error}") from error
    if path != own_path():
        asked = "" if option else f" ({_FILE_VARIABLE})"
        raise SettingsError(
            f"The configuration file {path} was asked for{asked}, and there is no such file. Type `accel config "
            f"--config-file {path}` to write one, or leave it out."
        )
    other = next((each for each in peer_paths(environ) if each.is_file()), None)
    try:
        return None if other is None else _read_either(other)
    except NotInstalledError as error:
        what = f"{other} is in Accelerate's format, and was not read: {str(error).splitlines()[-1]}, or"
        return ConfigFile(own_path(), {}, notes=(f"{what} `accel config` to write a file of ours.",))


def read(path: Path) -> ConfigFile:
    """Reads a file of ours; `SettingsError` if it is unreadable, no mapping, or has a key twice."""
    try:
        text = _text(path)
        # JSON may be indented by tabs, which YAML forbids.
        data, positions = (_from_json if text.lstrip().startswith("{") else _from_yaml)(path, text)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(
            f"The configuration file {path} cannot be read: {error}. Give another with --config-file."
        ) from error
    if not isinstance(data, dict | None):
        raise SettingsError(
            f"The configuration file {path} holds a {type(data).__name__}, and a mapping of options was expected, such "
            "as `num_processes: 2`. Type `accel config` to write one."
        )
    return ConfigFile(path, data or {}, positions)


def write(path: Path, data: Mapping[str, Any], comments: Mapping[str, str], *, anew: bool = False) -> None:
    """Writes a file as a whole or not at all: who reads it meanwhile finds the old one.

    Equal values stay as they are written there, and remarks beside keys that stay are kept; new
    keys get their help, from `comments`, as a remark. `anew` keeps nothing of what stands there. A
    file whose name ends in `.json` has no remarks. What a link leads to is written.
    """
    from accel_launch.settings.rendering import render

    target = path.resolve()
    before = (
        (read(target).data, _text(target)) if target.exists() and not anew and target.suffix != ".json" else ({}, "")
    )
    text = json.dumps(data, indent=2) + "\n" if target.suffix == ".json" else render(data, comments, *before)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            new.chmod(target.stat().st_mode & 0o777)
        os.replace(new, target)
    except OSError as error:
        raise SettingsError(
            f"The configuration file {path} cannot be written: {error}. Give another with --config-file."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def _text(path: Path) -> str:
    """The text of a file or a pipe; raises for what is longer than a configuration, or does not end."""
    with path.open(encoding="utf-8-sig") as stream:
        text = stream.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise OSError(f"it has more than {_LARGEST} characters")
    return text


def _read_either(path: Path) -> ConfigFile:
    file = read(path)
    if not is_of_peer(file.data):
        return file
    from accel_launch.importing.foreign import translate

    imported = translate(file.data)
    left = [f"  {key}: {masked(key, value)!r} was left out: {reason}" for key, value, reason in imported.left]
    count, end = len({each.old for each in imported.carried if each.new}), ":" if left else "."
    opening = f"{path} is in Accelerate's format: {count} of its options were carried over, {len(left)} were not{end}"
    keep = "Type `accel config import` to keep the result as a file of your own."
    return ConfigFile(path, imported.data, notes=("\n".join([opening, *left, keep]),))


def _from_json(path: Path, text: str) -> tuple[Any, Positions]:
    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
            raise SettingsError(
                f"{path}: the key {twice[0]!r} stands there twice, and only one can hold. Take one out."
            )
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique), {}
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{path}, line {error.lineno}: this is no JSON: {error.msg}. What begins with a brace is read as JSON."
        ) from error


def _from_yaml(path: Path, text: str) -> tuple[Any, Positions]:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        found = YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        key = str(error.problem).partition('"')[2].partition('"')[0]
        raise SettingsError(
            f"{path}, line {error.problem_mark.line + 1}: the key {key!r} stands there twice. Take one out."
        ) from error
    except YAMLError as error:
        mark = (error.problem_mark or error.context_mark) if isinstance(error, MarkedYAMLError) else None
        what = error.problem or error.context if isinstance(error, MarkedYAMLError) else error
        where = "" if mark is None else f", line {mark.line + 1}"
        raise SettingsError(
            f"{path}{where}: this is no YAML: {what}. Write one option a line, as in `num_processes: 2`, and type "
            f"`accel config validate {path}` when it is mended."
        ) from error
    reader = _Reader(path)
    return reader.plain(found, ()), reader.positions


class _Reader:
    """From nodes of ruamel.yaml to dicts, lists and scalars of Python, and the lines of keys."""

    def __init__(self, path: Path) -> None:
        self.positions: Positions = {}
        self._path, self._count = path, 0

    def plain(self, node: Any, keys: tuple[str, ...]) -> Any:
        self._count += 1
        if self._count > _MOST:
            raise SettingsError(
                f"The configuration file {self._path} holds more than {_MOST} values; aliases (`*name`) count as what "
                "they stand for. Write each option once."
            )
        tag = getattr(getattr(node, "tag", None), "value", None)
        if isinstance(node, dict) and tag is None:
            return {self._name(node, key, keys): self.plain(value, (*keys, key)) for key, value in node.items()}
        if isinstance(node, list) and tag is None:
            return [self.plain(value, keys) for value in node]
        if node is None or isinstance(node, bool):
            return node
        if isinstance(node, int):
            return int(node) if type(node) is int or not node else Unusual(node)
        for kind in (float, str):
            if isinstance(node, kind):
                return kind(node)
        raise SettingsError(
            f"{self._place(keys)}: {'.'.join(keys)} is a {tag or type(node).__name__}, and a file holds numbers, texts, "
            "true, false, null, lists and mappings only. Put quotes around it if a text was meant."
        )

    def _name(self, node: Any, key: Any, keys: tuple[str, ...]) -> str:
        lines = node.lc.data or {}  # none of what was merged
        if key in lines:
            whole = (*keys, key)
            self.positions[whole] = lines[key][0] + 1
        if not isinstance(key, str):
            raise SettingsError(
                f"{self._place((*keys, key))}: the key {key!r} is no text, and keys are names. Put quotes around it."
            )
        return str(key)

    def _place(self, keys: tuple[Any, ...]) -> str:
        return ConfigFile(self._path, {}, self.positions).place(*keys)

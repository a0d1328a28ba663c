"""Configuration files: where they lie, what they say and in which line.

A file is YAML 1.2, where `no` is a text, or JSON. It is read here and by nothing else: a script
that is started by `python` or `torchrun` never picks up one from somebody's home.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_core.api.launcher import masked, variable_of
from accel_launch.importing.places import is_of_peer, peer_paths
from accel_launch.settings.errors import SettingsError

_FILE_VARIABLE = variable_of("config_file")
_NOTHING: Mapping[tuple[str, ...], int] = MappingProxyType({})
_EMPTY: Mapping[str, Any] = MappingProxyType({})


_MOST, _DEEPEST, _LARGEST = 100_000, 100, 1 << 20
"""Values in a file, levels of them, and bytes of it."""


class Unusual(int):
    """A whole number that is not written as usual, such as 007, 0x10 or 1_000: it may be meant as a text, which is another one then."""


@dataclass(frozen=True)
class ConfigFile:
    """The content of a configuration file.

    Args:
        path: where it lies.
        data: its content; empty for an empty file.
        positions: the line of each key, by the keys that lead to it, from 1; empty where lines mean
            nothing.
        notes: what the user should know of how it was read.
    """

    path: Path
    data: Mapping[str, Any]
    positions: Mapping[tuple[str, ...], int] = field(default_factory=lambda: _NOTHING)
    notes: tuple[str, ...] = ()

    def place(self, *keys: str) -> str:
        """The position of a key: `config.yaml, line 7`."""
        line = self.positions.get(keys)
        return str(self.path) if line is None else f"{self.path}, line {line}"


def own_path() -> Path:
    """The path of the user's own file, whether or not it exists: in the system's configuration folder (XDG)."""
    from platformdirs import user_config_path

    return user_config_path("accel", appauthor=False) / "config.yaml"


def chosen_path(option: str | None, environ: Mapping[str, str]) -> Path:
    """The file that holds: `--config-file`, else `ACCELERATE_CONFIG_FILE`, else the user's own."""
    text = option or environ.get(_FILE_VARIABLE, "").strip()
    return Path(text).expanduser() if text else own_path()


def load(option: str | None, environ: Mapping[str, str]) -> ConfigFile | None:
    """Reads the file that holds; None if none was asked for and the user has none.

    If the user has no file of ours but one of Accelerate's, that one is translated, and so is a
    file of that kind that was asked for. `ConfigFile.notes` says so.

    Raises:
        SettingsError: if a file that was asked for does not exist, or if one cannot be read.
    """
    path = chosen_path(option, environ)
    if path.exists():
        return _read_either(path)
    if path != own_path():
        asked = "" if option else f" ({_FILE_VARIABLE})"
        raise SettingsError(
            f"The configuration file {path} was asked for{asked}, and there is no such file. Type `accel config --config-file {path}` to write one, or leave "
            f"it out."
        )
    other = next((each for each in peer_paths(environ) if each.is_file()), None)
    return None if other is None else _read_either(other)


def read(path: Path) -> ConfigFile:
    """Reads a file of ours.

    Raises:
        SettingsError: if it cannot be read, is no mapping, or has a key twice.
    """
    try:
        text = _text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"The configuration file {path} cannot be read: {error}. Type `accel config --config-file {path}` to write one, or give "
            f"another with --config-file."
        ) from error
    # JSON may be indented by tabs, which YAML forbids.
    try:
        data, positions = _from_json(path, text) if text.lstrip().startswith("{") else _from_yaml(path, text)
    except RecursionError as error:
        raise _too_much(path) from error
    if data is None:
        return ConfigFile(path, _EMPTY)
    if not isinstance(data, dict):
        raise SettingsError(
            f"The configuration file {path} holds a {type(data).__name__}, and a mapping of options was expected, such as "
            f"`num_processes: 2`. Type `accel config` to write one."
        )
    return ConfigFile(path, data, positions)


def write(path: Path, data: Mapping[str, Any], comments: Mapping[str, str], *, anew: bool = False) -> None:
    """Writes a file as a whole or not at all: who reads it meanwhile finds the old one.

    Values that are the same stay as they are written there, and remarks beside keys that stay are kept;
    new keys get their help, from `comments`, as a remark. `anew` keeps nothing of what stands there. A
    file whose name ends in `.json` has no remarks. What a link leads to is written. Raises
    `SettingsError` if a file that is there cannot be read, or if it cannot be written.
    """
    from accel_launch.settings.rendering import render

    target = path.resolve()
    if target.suffix == ".json":
        text = json.dumps(data, indent=2) + "\n"
    elif target.exists() and not anew:
        text = render(data, comments, read(target).data, _text(target))
    else:
        text = render(data, comments, {})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, text)
    except OSError as error:
        raise SettingsError(
            f"The configuration file {path} cannot be written: {error}. Give another with --config-file, and start with the same: "
            f"accel launch --config-file PATH script.py"
        ) from error


def _text(path: Path) -> str:
    """The text of a regular file of limited size. Raises for others: they could block, or never end."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("it is no regular file")
        content = stream.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(f"it is larger than {_LARGEST} bytes, and holds more than options")
    return content.decode("utf-8-sig")


def _read_either(path: Path) -> ConfigFile:
    file = read(path)
    if not is_of_peer(file.data):
        return file
    from accel_launch.importing.translation import translate

    imported = translate(file.data)
    left = [f"  {key}: {masked(key, value)!r} was left out: {reason}" for key, value, reason in imported.left]
    carried = {each.old for each in imported.carried if each.new}
    opening = (
        f"{path} is in Accelerate's format: {len(carried)} of its options were carried over, {len(left)} were not"
        f"{':' if left else '.'}"
    )
    keep = "Type `accel config import` to keep the result as a file of your own."
    return ConfigFile(path, imported.data, notes=("\n".join([opening, *left, keep]),))


def _from_json(path: Path, text: str) -> tuple[Any, Mapping[tuple[str, ...], int]]:
    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = Counter(key for key, _ in pairs)
            twice = next(key for key, count in keys.items() if count > 1)
            raise SettingsError(f"{path}: the key {twice!r} stands there twice, and only one can hold. Take one out.")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique), _NOTHING
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{path}, line {error.lineno}: this is no JSON: {error.msg}. A file that begins with a brace is read as JSON; type "
            f"`accel config validate {path}` when it is mended."
        ) from error


def _from_yaml(path: Path, text: str) -> tuple[Any, Mapping[tuple[str, ...], int]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        _check_levels(path, YAML(typ="rt", pure=True).parse(text))
        found = YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        key = str(error.problem).partition('"')[2].partition('"')[0]
        raise SettingsError(
            f"{path}, line {line}: the key {key!r} stands there twice, and only one can hold. Take one out."
        ) from error
    except YAMLError as error:
        mark = (error.problem_mark or error.context_mark) if isinstance(error, MarkedYAMLError) else None
        what = error.problem or error.context if isinstance(error, MarkedYAMLError) else error
        where = "" if mark is None else f", line {mark.line + 1}"
        raise SettingsError(
            f"{path}{where}: this is no YAML: {what}. Write one option a line, as in `num_processes: 2`, and type "
            f"`accel config validate {path}` when it is mended."
        ) from error
    _check_size(path, found)
    positions: dict[tuple[str, ...], int] = {}
    return _plain(path, found, (), positions), positions


def _check_levels(path: Path, events: Iterable[Any]) -> None:
    """Refuses levels before anything is built of them: ruamel.yaml takes seconds for thousands of brackets."""
    depth = 0
    for count, event in enumerate(events):
        depth += {"SequenceStartEvent": 1, "MappingStartEvent": 1, "SequenceEndEvent": -1, "MappingEndEvent": -1}.get(
            type(event).__name__, 0
        )
        if depth > _DEEPEST or count > 2 * _MOST:
            raise _too_much(path)


def _check_size(path: Path, node: Any) -> None:
    """Refuses a file in which aliases stand for more than any file of options holds, or for themselves."""
    left, count = [(node, 0)], 0
    while left:
        each, depth = left.pop()
        count += 1
        if count > _MOST or depth > _DEEPEST:
            raise _too_much(path)
        if isinstance(each, (dict, list)):
            left += [(inner, depth + 1) for inner in (each.values() if isinstance(each, dict) else each)]


def _too_much(path: Path) -> SettingsError:
    return SettingsError(
        f"The configuration file {path} holds more than {_MOST} values, or more than {_DEEPEST} levels of them; aliases (`*name`) count as "
        f"what they stand for. Write each option once, as in `num_processes: 2`."
    )


def _plain(path: Path, node: Any, keys: tuple[str, ...], positions: dict[tuple[str, ...], int]) -> Any:
    """Converts nodes of ruamel.yaml to dicts, lists and scalars of Python; adds the lines of keys to `positions`."""
    tag = getattr(getattr(node, "tag", None), "value", None)
    if isinstance(node, dict) and tag is None:
        return {key: _plain(path, value, (*keys, key), positions) for key, value in _items(path, node, keys, positions)}
    if isinstance(node, list) and tag is None:
        return [_plain(path, value, keys, positions) for value in node]
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, int):
        return int(node) if type(node) is int or not node else Unusual(node)
    for kind in (float, str):
        if isinstance(node, kind):
            return kind(node)
    line = positions.get(keys)
    where = str(path) if line is None else f"{path}, line {line}"
    raise SettingsError(
        f"{where}: {'.'.join(keys)} is a {tag or type(node).__name__}, and a file holds numbers, texts, true, false, null, lists and mappings "
        f"only. Put quotes around it if a text was meant."
    )


def _items(
    path: Path, node: dict[Any, Any], keys: tuple[str, ...], positions: dict[tuple[str, ...], int]
) -> list[tuple[str, Any]]:
    lines = getattr(getattr(node, "lc", None), "data", None) or {}
    found = []
    for key, value in node.items():
        line = lines[key][0] + 1 if key in lines else None
        if not isinstance(key, str):
            raise SettingsError(
                f"{path}{'' if line is None else f', line {line}'}: the key {key!r} is no text, and keys are names. Put quotes "
                f"around it if a name was meant."
            )
        if line is not None:
            whole = (*keys, key)
            positions[whole] = line
        found.append((str(key), value))
    return found


def _replace(target: Path, text: str) -> None:
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(new, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            new.chmod(target.stat().st_mode & 0o777)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)

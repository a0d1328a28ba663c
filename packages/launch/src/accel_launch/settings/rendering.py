"""The text of a configuration file: what was given, with help beside it, and with the user's own remarks where they were."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_launch.settings.files import ConfigFile

_WIDTH = 100
_NOTHING_GIVEN = "# Nothing is given: defaults hold."


def render(data: Mapping[str, Any], comments: Mapping[str, str], file: ConfigFile | None = None, text: str = "") -> str:
    """The text of a YAML file.

    Args:
        data: options, and mappings of options under the names of sections.
        comments: help, by `num_processes`, `fsdp` or `fsdp.cpu_offload`.
        file: what stands there already; None for a new file.
        text: that of `file`.
    """
    old = None if file is None else _Old(file, text.splitlines())
    heading, left_over = ([], []) if old is None else (old.heading(), old.left_over(data))
    lines = [*heading, *(_lines(data, comments, old, ()) if data else [_NOTHING_GIVEN]), *left_over]
    return "".join(f"{line}\n" for line in lines)


class _Old:
    """A file as it was, in pieces: which lines belong to which key."""

    def __init__(self, file: ConfigFile, lines: Sequence[str]) -> None:
        self._data = file.data
        self._lines = lines
        # Several keys in one line (`fsdp: {cpu_offload: true}`) are one piece, that of the outer key.
        self._starts = {
            keys: line - 1
            for keys, line in file.positions.items()
            if len(keys) == 1 or line != file.positions.get(keys[:-1])
        }

    def heading(self) -> list[str]:
        """The lines above everything, which belong to no key: an empty line ends them."""
        if not self._data:
            return [line for line in self._lines if line != _NOTHING_GIVEN]
        first = min((start for keys, start in self._starts.items()), default=0)
        return list(self._lines[: first - len(self._above(first))])

    def left_over(self, data: Mapping[str, Any]) -> list[str]:
        """Remarks that stand apart behind keys which are no longer there."""
        gone = [keys for keys in self._starts if len(keys) == 1 and keys[0] not in data]
        return [line for keys in gone for line in self.behind_all(keys) if line.strip()]

    def value(self, keys: tuple[str, ...]) -> Any:
        found: Any = self._data
        for key in keys:
            if not isinstance(found, Mapping) or key not in found:
                return _MISSING
            found = found[key]
        return found

    def remarks(self, keys: tuple[str, ...]) -> list[str]:
        """The remarks right above a key."""
        return self._above(self._starts[keys]) if keys in self._starts else []

    def body(self, keys: tuple[str, ...]) -> list[str]:
        """The lines of a key, with what is nested in it; empty if it shares its line."""
        return self._piece(keys)[0]

    def behind_all(self, keys: tuple[str, ...]) -> list[str]:
        """The empty lines and the remarks between a key and those right above the next one."""
        return self._piece(keys)[1]

    def behind(self, keys: tuple[str, ...]) -> str:
        """The remark behind a value, in the line of its key."""
        body = self.body(keys)
        code, mark, remark = body[0].partition(" #") if body else ("", "", "")
        in_text = any(code.count(quote) % 2 for quote in "'\"")
        return f"{mark}{remark}" if mark and not in_text else ""

    def _piece(self, keys: tuple[str, ...]) -> tuple[list[str], list[str]]:
        if keys not in self._starts:
            return [], []
        start = self._starts[keys]
        peers = [line for other, line in self._starts.items() if line > start and len(other) <= len(keys)]
        end = min(peers) - len(self._above(min(peers))) if peers else len(self._lines)
        if len(keys) > 1:  # what stands behind the last key of a section is behind the section
            outer = self._starts[keys[:-1]]
            end = min(end, outer + len(self.body(keys[:-1])))
        last = max(line for line in range(start, end) if line == start or not _is_remark(self._lines[line]))
        return list(self._lines[start : last + 1]), list(self._lines[last + 1 : end])

    def _above(self, line: int) -> list[str]:
        first = line
        while first > 0 and self._lines[first - 1].lstrip().startswith("#"):
            first -= 1
        return list(self._lines[first:line])


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


_MISSING = object()


def _lines(data: Mapping[str, Any], comments: Mapping[str, str], old: _Old | None, outer: tuple[str, ...]) -> list[str]:
    indent = "  " * len(outer)
    lines: list[str] = []
    for key, value in data.items():
        keys = (*outer, key)
        before = _MISSING if old is None else old.value(keys)
        body = [] if old is None else old.body(keys)
        if old is not None and before is not _MISSING:
            lines += old.remarks(keys)
        elif help_text := comments.get(".".join(keys)):
            lines += textwrap.wrap(help_text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ")
        if body and _same(before, value):
            lines += body
        elif isinstance(value, Mapping) and value and not outer:
            nested = old if len(body) > 1 else None
            lines += [f"{key}:{'' if old is None else old.behind(keys)}", *_lines(value, comments, nested, keys)]
        else:
            behind = "" if old is None or before is _MISSING else old.behind(keys)
            lines.append(f"{indent}{_entry(key, value)}{behind}")
        if old is not None:
            lines += old.behind_all(keys)
    return lines


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _entry(key: str, value: Any) -> str:
    """`key: value` in one line."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 1 << 16
    stream = io.StringIO()
    yaml.dump({key: json.loads(json.dumps(value))}, stream)  # numbers of `files.Unusual` are plain ones then
    return stream.getvalue().strip().removeprefix("{").removesuffix("}")

"""The text of a configuration file: given values, help beside new ones, the user's remarks."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

_WIDTH = 100
_NOTHING_GIVEN = "# Nothing is given: defaults hold."


def render(data: Mapping[str, Any], comments: Mapping[str, str], before: Mapping[str, Any], text: str = "") -> str:
    """The text of a YAML file with `data`: options, and mappings of options under section names.

    `before` is the content of `text`, empty for a new file: equal values stay as they are written
    there. New keys get their help from `comments`, by `num_processes` or `fsdp.cpu_offload`.
    """
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 1 << 16
    yaml.indent(mapping=2, sequence=4, offset=2)
    found = yaml.load(text) if before else None
    tree = found if isinstance(found, CommentedMap) else CommentedMap()
    _update(tree, data, before, comments, ())
    stream = io.StringIO()
    if data:
        yaml.dump(tree, stream)
    else:
        stream.write(f"{_NOTHING_GIVEN}\n")
    # ruamel.yaml keeps remarks beside keys, and here is none.
    heading = [line for line in text.splitlines() if line.startswith("#") and line != _NOTHING_GIVEN]
    return "".join(f"{line}\n" for line in heading if not before or not data) + stream.getvalue()


def _update(
    tree: CommentedMap,
    data: Mapping[str, Any],
    before: Mapping[str, Any],
    comments: Mapping[str, str],
    outer: tuple[str, ...],
) -> None:
    for key in [key for key in tree if key not in data]:
        del tree[key]
    for key, value in data.items():
        keys, is_new = (*outer, key), key not in tree
        old = before.get(key)
        if isinstance(value, Mapping) and value and not outer:
            if not isinstance(old, Mapping):
                tree[key], old = CommentedMap(), {}
            _update(tree[key], value, old, comments, keys)
        elif is_new or type(old) is not type(value) or old != value:
            tree[key] = _plain(value)
        if is_new and (about := comments.get(".".join(keys))) and not tree.fa.flow_style():
            indent = 2 * len(outer)
            lines = textwrap.wrap(about, _WIDTH - indent - 4)
            tree.yaml_set_comment_before_after_key(key, "\n  ".join(lines), indent=indent)


def _plain(value: Any) -> Any:
    """A value in one line; numbers of `files.Unusual` are plain ones then."""
    found = json.loads(json.dumps(value))
    kind = CommentedSeq if isinstance(found, list) else CommentedMap if isinstance(found, dict) else None
    if kind is None:
        return found
    node = kind(found)
    node.fa.set_flow_style()
    return node

"""Lists in messages."""

from __future__ import annotations

from collections.abc import Sequence

from accel_core.api.component import listed

LINES = "\n  "
"""The separator of what stands in lines of its own."""


def quoted(words: Sequence[str]) -> str:
    """The words, each in quotes, not too many."""
    return listed([*map(repr, words)])

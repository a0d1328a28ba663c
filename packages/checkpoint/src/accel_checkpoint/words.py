"""Lists in messages."""

from __future__ import annotations

from collections.abc import Sequence

LINES = "\n  "
"""The separator of what stands in lines of its own."""


def listed(words: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """The words, not too many: "a, b and 3 more", or in `LINES`."""
    more = f"{separator if separator == LINES else ' '}and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def quoted(words: Sequence[str]) -> str:
    """The same, each in quotes."""
    return listed([*map(repr, words)])

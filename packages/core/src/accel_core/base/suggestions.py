"""Words of errors: the name that was probably meant, and lists that are not too long."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant, letter case aside; None if nothing is close."""
    by_folded = {candidate.casefold(): candidate for candidate in names}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None


def choices(meant: str | None, known: Iterable[str], title: str = "Known") -> str:
    """The names to choose from, and the one that was probably meant: see `nearest`."""
    return f"{title}: {', '.join(known) or 'none'}." + (f" Type {meant!r} if that was meant." if meant else "")


def listed(words: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """The first `most` of the words, and how many more there are: "a, b and 3 more"."""
    more = f"{separator if separator.isspace() else ' '}and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more

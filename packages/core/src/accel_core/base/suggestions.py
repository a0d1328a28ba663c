"""The name that was probably meant, for errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant, letter case aside; None if nothing is close."""
    by_folded = {candidate.casefold(): candidate for candidate in names}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None

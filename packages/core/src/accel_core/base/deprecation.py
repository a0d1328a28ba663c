"""Older spellings of names, which work, with one warning, until a version drops them."""

from __future__ import annotations

import sys
import warnings
from typing import NamedTuple

# Whose frames are not the place where a user wrote something: ours, and what may stand between a user's line and ours.
_NOT_THE_USERS = ("accel_", "contextlib.", "enum.", "functools.", "torch.")


class Deprecation(NamedTuple):
    """An older spelling: the old text, the new one, and the first version without the old."""

    old: str
    new: str
    removed_in: str

    def warn(self) -> None:
        """Warns at the caller outside of the library: a `FutureWarning`, always shown by Python."""
        warnings.warn(
            f"{self.old} is an older spelling, which version {self.removed_in} no longer takes. Write {self.new}.",
            FutureWarning,
            stacklevel=level_of_the_user(),
        )


def level_of_the_user() -> int:
    """The `stacklevel` of the user's line, for a warning by the caller, whose own frame is 1."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return level

"""The exception of settings."""

from __future__ import annotations

from collections.abc import Sequence


class SettingsError(ValueError):
    """What was given cannot hold: an option that does not exist, a value of another type, a file that cannot be read.

    Args:
        problems: every mistake that was found, each with where it was made and what to type instead.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

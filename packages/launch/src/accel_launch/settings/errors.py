"""The exception of settings."""

from __future__ import annotations

from collections.abc import Sequence


class SettingsError(ValueError):
    """Options are invalid: one does not exist, a value has another type, a file cannot be read.

    Args:
        problems: every mistake that was found, each with where it was made and what to type
            instead.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

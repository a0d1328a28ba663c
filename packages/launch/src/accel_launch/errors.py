"""The exceptions of this package."""

from __future__ import annotations

from collections.abc import Sequence


class LaunchError(ValueError):
    """The requested run cannot be started. The message says what was asked, what was found, and what to type next."""


class SettingsError(ValueError):
    """Options are invalid: one does not exist, a value has another type, a file cannot be read. `problems` has every mistake."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RankFailedError(RuntimeError):
    """A rank failed. It is the cause of the exception that the rank raised, with its traceback there; raised itself if there is
    none: the process was killed, or what it raised cannot be brought here.
    """

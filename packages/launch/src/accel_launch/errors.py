"""The exceptions of this package."""

from __future__ import annotations

from collections.abc import Sequence


class LaunchError(ValueError):
    """The requested run cannot be started: what was asked, what was found, what to type next."""


class SettingsError(ValueError):
    """Invalid options: unknown names, wrong types, unreadable files. `problems` has every one."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RankFailedError(RuntimeError):
    """A rank failed: the cause of the exception that the rank raised, with its traceback there;
    raised itself if there is none: the process was killed, or its exception cannot be brought here.
    """

"""The exception of a rank that failed."""

from __future__ import annotations


class RankFailedError(RuntimeError):
    """A rank failed. It is the cause of the exception that the rank raised, with its traceback there; raised itself if there is
    none: the process was killed, or what it raised cannot be brought here.
    """

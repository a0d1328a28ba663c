"""The exception of what cannot be started."""

from __future__ import annotations


class LaunchError(ValueError):
    """The requested run cannot be started. The message says what was asked, what was found, and what to type next."""

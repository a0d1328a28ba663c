"""Objects with threads and locks, in a process that was forked: it has none of the threads, and what they locked stays locked."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Threaded(Protocol):
    """An object with threads or locks."""

    def begin(self) -> None:
        """Makes new ones, and forgets what the old ones were doing."""


_known: weakref.WeakValueDictionary[int, Threaded] = weakref.WeakValueDictionary()


def begin_in_each_process(each: Threaded) -> None:
    """Calls `begin` now, and in each process that is forked as long as the object is there."""
    each.begin()
    _known[id(each)] = each


def _begin() -> None:
    for each in [*_known.values()]:
        each.begin()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_begin)

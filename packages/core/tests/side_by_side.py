"""Launches of ranks side by side, for tests whose ranks mostly wait: six times five seconds then are hardly more than five."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")

AT_ONCE = 6


def side_by_side(launches: Mapping[K, Callable[[], T]]) -> dict[K, Future[T]]:
    """Calls functions that call `run_ranks`, a few at a time in the order of the mapping; all have ended when this returns."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {name: pool.submit(launch) for name, launch in launches.items()}

"""The program of the process that `guard` starts: it reads which process groups there are, and ends them when nobody writes any more.

It is executed by itself and imports nothing of ours, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

_NAP = 0.05


def main(patience: float) -> None:
    """Reads standard input to its end: each line lists the groups that there are then. Ends those of the last line."""
    groups: list[int] = []
    for line in sys.stdin:
        groups = [int(word) for word in line.split()]
    groups = _send(groups, signal.SIGTERM)
    _send(groups, signal.SIGCONT)
    deadline = time.monotonic() + patience
    while groups and time.monotonic() < deadline:
        time.sleep(_NAP)
        groups = _send(groups, 0)
    _send(groups, signal.SIGKILL)


def _send(groups: Iterable[int], number: int) -> list[int]:
    """Sends a signal, and returns the groups that are still there."""
    there = []
    for group in groups:
        try:
            os.killpg(group, number)
        except OSError:
            continue
        there.append(group)
    return there


if __name__ == "__main__":
    main(float(sys.argv[1]))

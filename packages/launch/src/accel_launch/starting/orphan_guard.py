"""A process that ends the ranks of a launcher which was killed, and so could not do it itself.

SIGKILL cannot be passed on. Without the guard, ranks whose launcher was killed (by somebody, or for
want of memory) would go on using the machine's accelerators. The guard executes this file, imports
nothing of ours, knows the ranks' process groups, and reads a pipe that the launcher holds: when
that breaks, the launcher has gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

_NAP = 0.05


class Guard:
    """Ends the ranks last told if this process dies in a `with` block; kills after `patience`.

    Their groups are killed; the signal before goes to ranks alone, or with `groups` to these (see `Ranks`).
    """

    def __init__(self, patience: float, groups: bool = False) -> None:
        self._patience, self._groups = patience, groups

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._patience), "killpg" if self._groups else "kill"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.watch([])
        self._process.communicate()

    def watch(self, groups: Iterable[int]) -> None:
        """From now on these are ended if the launcher is killed, and no others."""
        pipe = self._process.stdin
        assert pipe is not None, "it was asked for"
        try:
            pipe.write(" ".join(map(str, groups)) + "\n")
            pipe.flush()
        except BrokenPipeError:
            return  # somebody has killed the guard: the ranks run on all the same


def main(patience: float, send: Callable[[int, int], None]) -> None:
    """Reads lists of groups, one a line, to the end of standard input; then ends the last ones."""
    groups: list[int] = []
    for line in sys.stdin:
        groups = [int(word) for word in line.split()]
    groups = _send(send, groups, signal.SIGTERM)
    _send(os.killpg, groups, signal.SIGCONT)
    deadline = time.monotonic() + patience
    while groups and time.monotonic() < deadline:
        time.sleep(_NAP)
        groups = _send(os.killpg, groups, 0)
    _send(os.killpg, groups, signal.SIGKILL)


def _send(send: Callable[[int, int], None], groups: Iterable[int], number: int) -> list[int]:
    """Sends a signal, and returns the groups that are still there."""
    there = []
    for group in groups:
        try:
            send(group, number)
        except OSError:
            continue
        there.append(group)
    return there


if __name__ == "__main__":
    main(float(sys.argv[1]), getattr(os, sys.argv[2]))

"""A process that ends the ranks of a launcher which was killed, and so could not do it itself.

SIGKILL cannot be passed on. Without the guard, ranks whose launcher was killed (by somebody, or for
want of memory) would go on using the machine's accelerators. The guard is an interpreter that
imports nothing of ours, knows the ranks' process groups, and reads a pipe that only the launcher
holds: when that breaks, the launcher has gone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_PROGRAM = Path(__file__).with_name("guardian.py")


class Guard:
    """Within a `with` block, ends the process groups that it was last told of if this process is killed.

    Args:
        patience: seconds that they have to end, before they are killed.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(self._patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            # Somebody has killed the guard: the ranks run on all the same.
            return

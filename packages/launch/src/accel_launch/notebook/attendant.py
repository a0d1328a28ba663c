"""A thread that serves ranks until it is dismissed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Attendant:
    """The thread.

    Args:
        name: of the thread.
        serve: what it does. It waits for the bell beside what it serves, and returns when the bell
            has rung and nothing is left.

    Attributes:
        bell: a file descriptor, which can be read (and is at its end) once it rings.
    """

    def __init__(self, name: str, serve: Callable[[], None]) -> None:
        self.bell, self._rope = os.pipe()
        self._thread = threading.Thread(target=serve, name=f"notebook_launcher: {name}", daemon=True)

    def begin(self) -> None:
        """It serves from now on."""
        self._thread.start()

    def dismiss(self) -> None:
        """Rings the bell, and waits until it has served what was left."""
        os.close(self._rope)
        self._thread.join()
        os.close(self.bell)

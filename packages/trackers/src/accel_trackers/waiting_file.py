"""Writers that wait while the disk is full: it may be full for a moment, and the run goes on."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from io import FileIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL = {errno.ENOSPC, errno.EDQUOT}
_TRY_AGAIN_AFTER = 5.0  # seconds

logger = logging.getLogger(__name__)


def when_there_is_space(write: Callable[[], object], name: object, undo: Callable[[], object] = lambda: None) -> None:
    """Calls `write`, which writes the file or folder `name`; while the disk is full, waits, and calls it again.

    `undo` takes back what a call has written that failed.
    """
    was_told = False
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if not was_told:
                logger.warning("%s: %s. Records wait until there is space; make room for them.", name, error.strerror)
            was_told = True
            undo()
            time.sleep(_TRY_AGAIN_AFTER)


class WaitingFile(FileIO):
    """A file without a buffer. `write` returns when all is written; while the disk is full, it waits."""

    def write(self, content: ReadableBuffer, /) -> int:
        """Writes all of it, and returns its length in bytes."""
        rest, write = memoryview(content), super().write

        def write_rest() -> None:
            nonlocal rest
            while rest:  # a part of it is written, if there is no space for more
                rest = rest[write(rest) :]

        when_there_is_space(write_rest, self.name)
        return memoryview(content).nbytes

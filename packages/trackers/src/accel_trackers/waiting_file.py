"""A file whose writer waits while the disk is full: it may be full for a moment, and the run goes on."""

from __future__ import annotations

import errno
import logging
import time
from io import FileIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL = {errno.ENOSPC, errno.EDQUOT}
_TRY_AGAIN_AFTER = 5.0  # seconds

logger = logging.getLogger(__name__)


class WaitingFile(FileIO):
    """A file without a buffer. `write` returns when all is written; while the disk is full, it waits."""

    def write(self, content: ReadableBuffer, /) -> int:
        """Writes all of it, and returns its length in bytes."""
        rest, was_told = memoryview(content), False
        while rest:
            try:
                rest = rest[super().write(rest) :]  # a part of it, if there is no space for more
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not was_told:
                    logger.warning(
                        "%s: %s. Records wait until there is space; make room for them.", self.name, error.strerror
                    )
                was_told = True
                time.sleep(_TRY_AGAIN_AFTER)
        return memoryview(content).nbytes

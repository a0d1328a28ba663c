"""The files of a run: the output of its processes, if asked for, and reports of their errors."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from accel_launch.starting.checks import read_streams
from accel_launch.starting.flight_recorder import recording_again

if TYPE_CHECKING:
    from accel_launch.options import LaunchOptions

_PREFIX = "accel-launch-"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Logs(DefaultLogsSpecs):
    """The destinations of this machine's output; torch's agent calls `reify` before each start.

    `folder` has the files. If it is not `kept` for the user, these are error files and the errors of
    ranks that the console does not show, for the summary; `close` removes it.
    """

    def __init__(self, launch: LaunchOptions, processes: int) -> None:
        self.kept = launch.log_dir is not None or launch.redirects != "0" or launch.tee != "0"
        self._temporary = None if self.kept else tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.folder = Path(
            self._temporary.name if self._temporary else launch.log_dir or tempfile.mkdtemp(prefix=_PREFIX)
        )
        redirects, tee = (
            {rank: Std(value) for rank, value in read_streams(name, getattr(launch, name), processes).items()}
            for name in ("redirects", "tee")
        )
        shown = set(range(processes) if launch.local_ranks_filter is None else launch.local_ranks_filter)
        redirects |= {rank: redirects[rank] | Std.ERR for rank in set(redirects) - shown}
        self._teed = {rank for rank in shown if tee.get(rank, Std.NONE) & Std.ERR}
        self._destination, self._starts = LogsDest(), 0
        super().__init__(str(self.folder), redirects, tee, shown)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See base class."""
        # Torch empties the folder of a number that comes again, and does not count what starts again for another machine.
        own = {rank: {**each, "TORCHELASTIC_RESTART_COUNT": str(self._starts)} for rank, each in envs.items()}
        self._destination = super().reify(own)
        for rank, each in envs.items():
            each[_ERROR_FILE] = own[rank][_ERROR_FILE]
            each.update(recording_again(self._starts, os.environ))
        self._starts += 1
        return self._destination

    def error_file(self, local_rank: int) -> Path:
        """The file for the error that ended a process, in torch's format; it may not exist."""
        return Path(self._destination.error_files[local_rank])

    def unseen(self, local_rank: int) -> Path | None:
        """The file with a process's errors, if the console does not show them; None if it does."""
        path = self._destination.stderrs.get(local_rank)
        return Path(path) if path and local_rank not in self._teed else None

    def close(self) -> None:
        """Removes what is not the user's."""
        if self._temporary is not None:
            self._temporary.cleanup()

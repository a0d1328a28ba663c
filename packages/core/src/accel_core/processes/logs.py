"""Logging from several processes: a standard logger that knows its rank.

It works before an Accelerator or a process group exists, and starts nothing. Handlers and formats
are the program's own; records have the attributes `rank`, `local_rank` and `world_size`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.options.option_sources import given_outside
from accel_core.processes.launch_environment import Place, read_place

LEVEL_VARIABLE = "ACCELERATE_LOG_LEVEL"


def get_logger(name: str, log_level: str | int | None = None) -> ProcessLogger:
    """The standard logger `name`, usually `__name__`, with one line per node unless asked for more.

    `log_level` is a name in either case or a number; None: what `ACCELERATE_LOG_LEVEL`, or a
    launcher's `--log-level`, says, else it stays as it is. `ValueError` if there is no such level.
    """
    logger = logging.getLogger(name)
    given = given_outside(LEVEL_VARIABLE) if log_level is None else None
    level = log_level if given is None else given.text
    if level is not None:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return ProcessLogger(logger)


class ProcessLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # not before Python 3.11
    """A standard logger whose methods take two more arguments.

    `main_process_only` (True): one line per node, from its local main process, else one from every
    process, which begins with `[RANK n]`. `in_order` (False): all lines, rank after rank; a
    collective, with the same level enabled on every rank.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._launched_at: Place | None = None
        self._warned: set[tuple[str, str]] = set()

    def log(  # type: ignore[override]  # two of the keywords have a meaning and a type here
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: bool = True,
        in_order: bool = False,
        **kwargs: Any,
    ) -> None:
        """Logs on the processes selected; `WorldError` for `in_order` without a process group."""
        if not self.isEnabledFor(level):
            return
        rank, local_rank, size = self._place()
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line of the caller is shown
        kwargs["extra"] = {"rank": rank, "local_rank": local_rank, "world_size": size, **(kwargs.get("extra") or {})}
        in_turn = in_order and size > 1
        if in_turn and not _group_runs():
            raise WorldError(
                f"in_order=True lets {size} processes wait for each other, but their process group does not run yet. Create "
                f"the Accelerator first, or log with main_process_only=False."
            )
        if in_order or not main_process_only:
            msg = f"[RANK {rank}] {msg}"
        elif local_rank:
            return
        for turn in range(size) if in_turn else [rank]:
            if turn == rank:
                self.logger.log(level, msg, *args, **kwargs)
            if in_turn:
                from accel_core.processes.world import World

                World.current().barrier()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """A `warning`, but only once by this logger for the same message and arguments."""
        key = (str(msg), repr(args))
        if not self.isEnabledFor(logging.WARNING) or key in self._warned:
            return
        self._warned.add(key)
        self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def _place(self) -> tuple[int, int, int]:
        """Rank, local rank and size."""
        if self._launched_at is None:
            self._launched_at = read_place(os.environ)
        launched = self._launched_at
        if not _group_runs():
            return launched.rank, launched.local_rank, launched.size
        rank = dist.get_rank()
        # As in World: a group that no launcher knows of is taken to run on one machine.
        return rank, rank if launched.source == "alone" else launched.local_rank, dist.get_world_size()


def _group_runs() -> bool:
    return dist.is_available() and dist.is_initialized()

"""Logging from several processes: a standard logger that knows its rank.

    logger = get_logger(__name__)
    logger.info("loaded %d samples", n)                             # once per node
    logger.info("my shard begins at %d", i, main_process_only=False)  # "[RANK 3] my shard begins at
        300"
    logger.info("one after the other", in_order=True)               # a collective

It works before an Accelerator or a process group exists, and starts nothing. Handlers and formats
are the program's own; records have the attributes `rank`, `local_rank` and `world_size`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.options.option_sources import given_outside
from accel_core.processes.launch_environment import Place, read_place

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # the class cannot be subscripted before Python 3.11
    _Adapter = logging.LoggerAdapter

LEVEL_VARIABLE = "ACCELERATE_LOG_LEVEL"


def get_logger(name: str, log_level: str | int | None = None) -> ProcessLogger:
    """The standard logger `name`, with one line per node unless asked for more.

    Args:
        name: as for `logging.getLogger`, usually `__name__`.
        log_level: of this logger, as a name in either case or as a number. None: what
            `ACCELERATE_LOG_LEVEL`, or a launcher's `--log-level`, says, else it stays as it is.

    Raises:
        ValueError: if there is no such level.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(_level(log_level, "get_logger(log_level=…)"))
    elif (given := given_outside(LEVEL_VARIABLE)) is not None:
        logger.setLevel(_level(given.text, given.source))
    return ProcessLogger(logger)


class _Place(NamedTuple):
    """The fields of a log record that describe its process."""

    rank: int
    local_rank: int
    world_size: int


class ProcessLogger(_Adapter):
    """A standard logger whose methods take two more arguments.

    `main_process_only` (True): one line per node, from its local main process. False: a line from
    every process, which begins with `[RANK n]`.

    `in_order` (False): True writes the lines of all processes, rank after rank. A collective: every
    rank must call it, with the same level enabled.
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
        """Logs on the processes that the arguments select; `debug`, `info` and the others come through here.

        Raises:
            WorldError: with `in_order` in a larger world whose process group does not run yet; if
                the launcher's variables contradict each other.
        """
        if not self.isEnabledFor(level):
            return
        place = self._place()
        kwargs["stacklevel"] = (
            kwargs.get("stacklevel", 1) + 1
        )  # the line shown is the caller's, and not one of this file
        kwargs["extra"] = {**place._asdict(), **(kwargs.get("extra") or {})}
        if in_order and place.world_size > 1:
            self._log_in_turn(place, level, f"[RANK {place.rank}] {msg}", args, kwargs)
        elif not main_process_only or in_order:
            self.logger.log(level, f"[RANK {place.rank}] {msg}", *args, **kwargs)
        elif place.local_rank == 0:
            self.logger.log(level, msg, *args, **kwargs)

    def _log_in_turn(
        self, place: _Place, level: int, msg: str, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        from accel_core.processes.world import World

        if not _group_runs():
            raise WorldError(
                f"in_order=True lets {place.world_size} processes wait for each other, but their process group does not run "
                f"yet. Create the Accelerator first, or log with main_process_only=False."
            )
        kwargs["stacklevel"] += 1
        world = World.current()
        for rank in range(place.world_size):
            if rank == place.rank:
                self.logger.log(level, msg, *args, **kwargs)
            world.barrier()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """`warning`, but the same message with the same arguments is logged only the first time by this logger."""
        key = (str(msg), repr(args))
        if not self.isEnabledFor(logging.WARNING) or key in self._warned:
            return
        self._warned.add(key)
        self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def _place(self) -> _Place:
        if self._launched_at is None:
            self._launched_at = read_place(os.environ)
        launched = self._launched_at
        if not _group_runs():
            return _Place(launched.rank, launched.local_rank, launched.size)
        rank = dist.get_rank()
        # As in World: a group that no launcher knows of is taken to run on one machine.
        local_rank = rank if launched.source == "alone" else launched.local_rank
        return _Place(rank, local_rank, dist.get_world_size())


def _group_runs() -> bool:
    return dist.is_available() and dist.is_initialized()


def _level(level: str | int, source: str) -> int:
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    # Not logging.getLevelNamesMapping, which is new in Python 3.11: this returns text for a name that it does not know.
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else None
    if not isinstance(number, int):
        raise ValueError(
            f"{source} is {level!r}, which is no logging level. "
            f"Use DEBUG, INFO, WARNING, ERROR, CRITICAL or a level that the program has registered."
        )
    return number

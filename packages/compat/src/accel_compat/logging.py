"""Loggers that know the processes of the run."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import MutableMapping
from typing import Any

from accel_compat.state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger whose messages are written by the main process, unless `main_process_only=False`.

    `in_order=True` has all processes write, one behind the other, a collective. `RuntimeError` before there is a state: which
    process this is is not known then.
    """

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message with the rank of this process before it."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Writes a message on the processes that are asked for."""
        if not PartialState._shared_state:
            raise RuntimeError("Which process this is is not known before PartialState() or Accelerator() was made.")
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        if not in_order:
            if self._should_log(main_process_only):
                self.logger.log(level, msg, *args, **kwargs)
            return
        state = PartialState()
        for index in range(state.num_processes):
            if index == state.process_index:
                self.logger.log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    @functools.lru_cache(None)  # noqa: B019  (loggers live as long as the process)
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that is written once, however often it is called with the same arguments."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger that knows the processes. `log_level`: None takes ACCELERATE_LOG_LEVEL, else leaves it."""
    logger = logging.getLogger(name)
    level = os.environ.get("ACCELERATE_LOG_LEVEL") if log_level is None else log_level
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})

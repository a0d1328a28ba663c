"""Tools that the trackers of services share: options, environment, state of the process."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

LOGGERS = ("asyncio", "urllib3")  # of others, whose levels services set
HOOKS = ((sys, "excepthook"), (sys, "exit"), (builtins, "__import__"))
STREAMS = ((sys, "stdout"), (sys, "stderr"))


def check_options(given: Collection[str], known: Collection[str], where: str, callee: str) -> None:
    """Refuses options unknown to a service: TypeError names them, and those that are known.

    `where` is what the user gave them in: "init_kwargs={'wandb': ...}"; `callee` what they go to.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        found, expected = ", ".join(map(repr, unknown)), ", ".join(sorted(known)) or "nothing"
        raise TypeError(f"{where} has {found}, which {callee} does not have here: expected {expected}.")


def shared_options(
    given: Mapping[str, Any], service: str, calls: Mapping[Callable[..., Any], Collection[str]]
) -> list[dict[str, Any]]:
    """The options of a record for each of the calls that it takes, which know different ones.

    `calls` has the service's calls, and their parameters that the tracker fills itself. TypeError
    names those of the `log_kwargs` of the user that none of the calls knows.
    """
    if not given:
        return [{} for _ in calls]
    known = [_parameters(call) - set(ours) for call, ours in calls.items()]
    callee = " or ".join(getattr(call, "__name__", str(call)) for call in calls)
    check_options(given, set().union(*known), f"log_kwargs={{{service!r}: ...}}", callee)
    return [{name: value for name, value in given.items() if name in names} for names in known]


def _parameters(call: Callable[..., Any]) -> set[str]:
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    found = inspect.signature(call).parameters.items()
    return {name for name, each in found if each.kind not in variable and name != "self"}


@contextlib.contextmanager
def variables(wanted: Mapping[str, str | None], *, override: bool = False) -> Iterator[None]:
    """Sets environment variables, for a moment, and puts back what they were.

    Args:
        wanted: their values; None: the variable is only put back.
        override: whether those are set too that the user has set.
    """
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(
        {name: value for name, value in wanted.items() if value is not None and (override or before[name] is None)}
    )
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Process:
    """The state of the process that services change while they are imported and started.

    Trackers start at the same time, each in a thread: all go back to what was before the first of
    them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: dict[Any, Any] = {}

    @contextlib.contextmanager
    def kept(self, wanted: Collection[tuple[Any, str]] = (), *, streams: bool = False) -> Iterator[None]:
        """A context that undoes a service's changes to the process.

        They concern its end, its imports, the start method of `multiprocessing`, and levels of loggers.

        Args:
            wanted: of `HOOKS`, what is left to the service, because the user wants what it does there.
            streams: whether standard output and error are put back too.
        """
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = {place: getattr(*place) for place in (*HOOKS, *STREAMS)}
                self._before |= {name: logging.getLogger(name).level for name in LOGGERS}
                self._before["start method"] = multiprocessing.get_start_method(allow_none=True)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                self._put_back(wanted, HOOKS + (STREAMS if streams else ()))

    def _put_back(self, wanted: Collection[tuple[Any, str]], places: Collection[tuple[Any, str]]) -> None:
        for place in places:
            if place in wanted:
                self._before[place] = getattr(*place)  # also for those that leave later
            setattr(*place, self._before[place])
        for name in LOGGERS:
            logging.getLogger(name).setLevel(self._before[name])
        if multiprocessing.get_start_method(allow_none=True) != self._before["start method"]:
            multiprocessing.set_start_method(self._before["start method"], force=True)


process_kept = _Process().kept

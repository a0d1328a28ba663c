"""Marks of the collectives of this process, by which the Watch explains failures and waits."""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from accel_core.processes.failure_output import is_broken_connection

if TYPE_CHECKING:
    from accel_core.processes.mismatch_report import Description
    from accel_core.processes.watch.monitor import Watch

# For a rank whose arguments are wrong: its call meets whatever the others have called, and all raise.
REFUSED = "a collective that it cannot take part in"
# By torch's default group, like the World that it belongs to.
on_duty: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


def running() -> Watch | None:
    """The Watch over torch's default group; None without a group, or if nobody watches it."""
    return on_duty.get(dist.group.WORLD) if dist.is_initialized() else None  # type: ignore[arg-type]


def collective(name: str, *, whole: bool = False) -> contextlib.AbstractContextManager[object]:
    """A block in which the default group's ranks meet, by the name that users know: "gather()".

    `whole` says that ranks may meet in it from different collectives inside.
    """
    watch = running()
    return contextlib.nullcontext() if watch is None else Collective(watch, name, whole=whole)


def explain(error: BaseException) -> None:
    """Adds to a broken connection's error why it broke, which may take seconds. No collective."""
    watch = running()
    # After a verdict the collectives of a device break with whatever its backend calls it.
    broken = is_broken_connection(error) or (watch and watch.verdict and isinstance(error, RuntimeError))
    if watch is not None and broken and not explanation(error):
        text = watch.explain(error)
        if text:
            # Not a note (PEP 678): it would be missing from `str(error)`, and from logs.
            error.args = (f"{error}\n{text}",)
            error._accel_explained = text  # type: ignore[attr-defined]


def explanation(error: BaseException) -> str:
    """The text that `explain` has added to an error; empty if none."""
    return str(getattr(error, "_accel_explained", ""))


class Entry(NamedTuple):
    """A collective as the user called it."""

    name: str
    members: tuple[int, ...] | None = None  # the ranks that take part; None: all
    inner: str = ""  # the innermost collective inside of it, in which ranks meet
    whole: bool = False  # collectives inside of it do not count: ranks may meet from different ones


class Collective:
    """A block in a collective: people read the outermost name, ranks meet in the innermost."""

    __slots__ = ("_details", "_entry", "_outer", "_watch")

    def __init__(
        self,
        watch: Watch,
        name: str,
        members: tuple[int, ...] | None = None,
        details: Description | None = None,
        whole: bool = False,
    ) -> None:
        self._watch, self._details = watch, details
        self._entry = Entry(name, members, "", whole)
        self._outer: Entry | None = None

    def __enter__(self) -> None:
        inside, thread = self._watch.inside, threading.get_ident()
        self._outer = outer = inside.get(thread)
        if outer is None:
            inside[thread] = self._entry
            if self._watch.checks is not None:
                try:
                    self._watch.checks.compare(self._entry.name, self._entry.members, self._details)
                except BaseException as error:
                    self.__exit__(type(error), error, None)
                    raise
        elif not outer.whole:
            inside[thread] = Entry(outer.name, self._entry.members, self._entry.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            explain(error)
        self._watch.inside[threading.get_ident()] = self._outer

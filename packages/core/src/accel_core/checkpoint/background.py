"""Saving while training goes on: copies are taken, a thread writes them, and failures surface at the next save or wait.

*Eager*: everything is copied before `save_state` returns. *Lazy*: what only an optimizer's step changes is copied by the
thread, and the next step waits for that. What was changed all the same, by somebody else, is noticed by the tensor's version
and makes the save fail; writes through `tensor.data` have no version and are not noticed.

The ranks tell each other what they have written by small files beside it, because a thread has no part in collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from accel_core.checkpoint.agreement import everywhere
from accel_core.checkpoint.index import write_new
from accel_core.checkpoint.writing import Work, Written
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.world import World

Mode = Literal["eager", "lazy"]

ALIGNMENT = 64
"""Bytes: copies begin at multiples of it, as vector instructions like it."""

ORPHANED = 15.0
"""Seconds for which a process that is ending waits for the files of the other ranks."""

_POLL = 0.02


class Publisher(Protocol):
    """What the main process does with a draft."""

    def publish(self, written: list[Written]) -> None:
        """Makes it the checkpoint of its folder, from what the members have written, in the order of their ranks."""

    def discard(self) -> None:
        """Removes it."""


class Staging:
    """Memory for copies, kept from one save to the next: touching it for the first time costs more than copying."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def room(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A place in CPU memory for each tensor, with its shape and dtype; valid until the next call."""
        starts, end = {}, 0
        for key, tensor in tensors.items():
            starts[key] = end
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if len(self._buffer) < end:
            self._buffer = torch.empty(end, dtype=torch.uint8)
        return {
            key: self._buffer[starts[key] : starts[key] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for key, tensor in tensors.items()
        }


class Background:
    """At most one save that is being written by a thread.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._staging = Staging()
        self._save: _Save | None = None

    def start(self, work: Work, data: Path, publisher: Publisher | None, members: Sequence[int], mode: Mode) -> None:
        """Copies, and begins to write; the last save has ended. No collective.

        Args:
            work: what this rank writes.
            data: the data folder of the checkpoint.
            publisher: publishes once all members have written; None: another rank does it.
            members: the ranks that write into this folder.
            mode: what is copied before this returns.
        """
        assert self._save is None, "wait() was called"
        self._save = _Save(work, data, publisher, (self._world.rank, tuple(members)))
        self._save.begin(self._staging.room(work.tensors), mode)

    @property
    def copying(self) -> Callable[[], None] | None:
        """Waits until all copies are taken; None if they are."""
        save = self._save
        return None if save is None or save.copied.is_set() else save.wait_for_copies

    def wait(self) -> None:
        """Returns when the save that was begun last is published on every rank. A collective, if one was begun.

        Raises:
            Exception: on every rank, what made it fail on any of them.
        """
        save, self._save = self._save, None
        if save is not None:
            everywhere(self._world, save.join)

    def discard(self) -> None:
        """Forgets a save whose outcome nobody can ask for any more; the thread goes on. No collective."""
        self._save = None


class _Save:
    """One save: a thread, its outcome, and whether anybody has heard of that."""

    def __init__(
        self,
        work: Work,
        data: Path,
        publisher: Publisher | None,
        place: tuple[int, tuple[int, ...]],
    ) -> None:
        self.copied = threading.Event()
        self._work, self._data, self._publisher = work, data, publisher
        self._rank, self._members = place
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def begin(self, room: dict[str, torch.Tensor], mode: Mode) -> None:
        """Copies what cannot wait, and starts the thread."""
        lasting = self._work.lasting if mode == "lazy" else set()
        versions = {key: self._work.tensors[key]._version for key in lasting}
        with torch.no_grad():
            for key, place in room.items():
                if key not in lasting:
                    place.copy_(self._work.tensors[key])
        if not lasting:
            self._let_go()
        # Not a daemon: the interpreter waits for it when it exits.
        self._thread = threading.Thread(target=self._run, args=(room, versions), name="accel checkpoint")
        _report_at_exit(self)
        self._thread.start()

    def wait_for_copies(self) -> None:
        """Returns when training may change what is saved."""
        self.copied.wait()

    def join(self) -> None:
        """Waits for the thread and raises what made it fail."""
        assert self._thread is not None, "it was begun"
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def report(self) -> None:
        """Says on stderr what nobody has asked for."""
        failure, self._failure = self._failure, None
        if failure is not None:
            print(f"The checkpoint in {self._data.parent} was not saved: {failure}", file=sys.stderr)  # noqa: T201

    def _let_go(self) -> None:
        self._work.tensors = {}
        self.copied.set()

    def _run(self, room: dict[str, torch.Tensor], versions: Mapping[str, int]) -> None:
        try:
            try:
                self._copy(room, versions)
            finally:
                self._let_go()
            self._work.tensors = room
            written = self._work.write(self._data)
            self._tell(written)
            if self._publisher is not None:
                self._publisher.publish(self._collect(written))
        except Exception as error:  # noqa: BLE001  (raised where somebody asks for it)
            self._failure = error
            self._tell_failure(error)
            if self._publisher is not None:
                self._publisher.discard()
        finally:
            self._work.tensors, self._publisher = {}, None

    def _copy(self, room: Mapping[str, torch.Tensor], versions: Mapping[str, int]) -> None:
        changed = []
        with torch.no_grad():
            for key, version in versions.items():
                live = self._work.tensors[key]
                room[key].copy_(live)
                if live._version != version:
                    changed.append(key)
        if changed:
            raise CheckpointError(
                f"{len(changed)} tensors were changed while save_state(asynchronous='lazy') copied them, not by the step of a "
                f"prepared optimizer: {', '.join(sorted(changed)[:8])}. Change them after wait_for_checkpoint(), or save with "
                f"asynchronous='eager'."
            )

    def _tell(self, written: Written) -> None:
        if len(self._members) > 1:
            write_new(self._message(self._rank, "done"), json.dumps(written.to_json()).encode())

    def _tell_failure(self, error: Exception) -> None:
        if len(self._members) > 1:
            with contextlib.suppress(OSError):  # a full disk, perhaps: then the others wait until this rank has ended
                write_new(self._message(self._rank, "failed"), str(error).encode())

    def _collect(self, own: Written) -> list[Written]:
        if len(self._members) == 1:
            return [own]
        found = {self._rank: own}
        deadline: float | None = None
        while len(found) < len(self._members):
            for rank in self._members:
                if rank not in found and (answer := self._answer(rank)) is not None:
                    found[rank] = answer
            if not threading.main_thread().is_alive():
                deadline = deadline or time.monotonic() + ORPHANED
                if time.monotonic() > deadline:
                    missing = sorted(set(self._members) - found.keys())
                    raise CheckpointError(
                        f"The training ended, and the parts of ranks {missing} were not written within {ORPHANED:.0f} s. The "
                        f"checkpoint before it is untouched."
                    )
            time.sleep(_POLL)
        for rank in self._members:
            os.unlink(self._message(rank, "done"))
        return [found[rank] for rank in self._members]

    def _answer(self, rank: int) -> Written | None:
        if self._message(rank, "failed").exists():
            raise CheckpointError(self._message(rank, "failed").read_text())
        try:
            return Written.from_json(json.loads(self._message(rank, "done").read_bytes()))
        except (FileNotFoundError, ValueError):  # not there, or not whole yet
            return None

    def _message(self, rank: int, word: str) -> Path:
        return self._data / f"rank-{rank:05d}.{word}.json"


def _report_at_exit(save: _Save) -> None:
    reference = weakref.ref(save)

    def report() -> None:
        found = reference()
        if found is not None:
            found.report()

    atexit.register(report)
    weakref.finalize(save, atexit.unregister, report).atexit = False

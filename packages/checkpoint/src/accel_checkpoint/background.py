"""Saving during training: a thread writes copies; its errors are raised at the next save or wait.

*Eager*: all is copied before `save_state` returns. *Lazy*: what only a step changes is copied later,
by the thread or by an accelerator beside its computation; the next step waits for it. A change by
others fails the save, by the tensor's version (writes to `tensor.data` have none). Ranks report by
small files: a thread has no collectives.
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
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from accel_checkpoint.collective_steps import everywhere
from accel_checkpoint.deferred import refuse_deferred
from accel_checkpoint.files.disk import write_new
from accel_checkpoint.files.part_file import plain
from accel_checkpoint.host_copies import Staging, copy, on_accelerator
from accel_checkpoint.writing import Publication, Work, Written
from accel_core import CheckpointError
from accel_core.api.component import listed

if TYPE_CHECKING:
    from accel_checkpoint.files.folder import Draft
    from accel_core import World

Mode = Literal["eager", "lazy"]

ORPHANED = 15.0  # seconds for which a process that is ending waits for files of other ranks, while none of them grows
_FIRST = 0.1  # seconds at most for which a new thread lets its caller go on first: it would hold the GIL for 5 ms
_POLL = 0.02
_LONGEST_LOOK = 1.0  # seconds between two looks at files that count as seconds in which nothing was written


class Job(NamedTuple):
    """The work of a rank, and the publisher of the whole; None if another rank publishes."""

    work: Work
    publisher: Publication | None


class Background:
    """At most one save that is being written by a thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        self._staging = Staging(memory // 2 // world.local_size)  # the other half is for everything else
        self._save: _Save | None = None

    def start(self, work: Work, data: Path, publisher: Publication | None, members: Sequence[int], mode: Mode) -> None:
        """Copies what `mode` says, and begins to write; the last save has ended. No collective.

        `publisher` publishes when all `members`, which write into this folder, have written; None:
        another rank does. CheckpointError is raised for what is no plain tensor.
        """
        assert self._save is None, "wait() was called"
        save = _Save(data, (self._world.rank, tuple(members)), waits=len(members) < self._world.size)
        refuse_deferred(work.tensors.values())
        save.begin(Job(work, publisher), self._staging, mode)
        self._save = save

    def start_alone(self, prepare: Callable[[], Job], draft: Draft) -> None:
        """Starts a lazy save of a world of one: the thread does all; `prepare` finds the work."""
        assert self._save is None, "wait() was called"
        save = _Save(draft.data, (0, (0,)))
        save.begin_alone(prepare, self._staging, draft)
        self._save = save

    @property
    def copying(self) -> Callable[[], None] | None:
        """Waits until all copies are taken; None if they are."""
        save = self._save
        return None if save is None or save.copied.is_set() else save.wait_for_copies

    def wait(self) -> None:
        """Returns when the last save is published everywhere, or raises; collective if begun."""
        save = self._save
        if save is None:
            return
        try:
            # First, so that nobody waits for the part of a rank that failed, or is gone.
            everywhere(self._world, "for the parts of an asynchronous save", save.join_part)
            everywhere(self._world, "for an asynchronous save to be published", save.join)
            everywhere(self._world, "for what it replaces to be removed", save.finish)
        except Exception:
            self.abandon()
            raise
        self._save = None

    def abandon(self) -> None:
        """Ends a save that has failed somewhere else, and forgets it. No collective."""
        if self._save is not None:
            self._save.abandon()
            self._save = None


class _Save:
    """One save: a thread, its outcome, and whether anybody has heard of that.

    `place` is this rank and those that write into `data`; if others `waits` for write into other
    folders, what is replaced stays until all are published.
    """

    def __init__(self, data: Path, place: tuple[int, tuple[int, ...]], *, waits: bool = False) -> None:
        self._waits = waits
        self._unfinished: Publication | None = None
        self.copied = threading.Event()
        self._taken = threading.Event()  # what the thread copies itself
        self._behind: list[torch.Event] = []  # reached when the rest is there, which accelerators copy meanwhile
        self._comparing = threading.Lock()
        self._live: Mapping[str, torch.Tensor] = {}  # what is copied later, until it was compared
        self._changed: list[str] = []
        self._data = data
        self._rank, self._members = place
        self._work: Work | None = None
        self._publisher: Publication | None = None
        self._failure: Exception | None = None  # of the part of this rank
        self._unpublished: Exception | None = None  # why the whole is not there
        self._told = threading.Event()
        self._abandoned = False
        self._seen: dict[str, tuple[int, int]] = {}  # files of the others, and what they were at the last look
        self._quiet = self._looked = 0.0  # seconds since they have been so; when they were looked at last
        self._thread: threading.Thread | None = None

    def begin(self, job: Job, staging: Staging, mode: Mode) -> None:
        """Copies what cannot wait, and starts the thread. The rest on accelerators is enqueued."""
        room = self._take(job, staging)
        tensors, later = job.work.tensors, job.work.lasting if mode == "lazy" else {}
        self._live = {key: tensors[key] for key in later}
        by_thread = [key for key in later if not on_accelerator(tensors[key])]
        self._behind = copy((room[key], tensors[key]) for key in room if key not in later)
        enqueued = ((room[key], tensors[key]) for key in later if on_accelerator(tensors[key]))
        self._behind += copy(enqueued, staging.streams)
        for event in self._behind if mode == "eager" else ():
            event.synchronize()
        if mode == "eager" or not (later or self._behind):
            self._let_go()
        self._start(lambda: self._run(room, by_thread))

    def begin_alone(self, prepare: Callable[[], Job], staging: Staging, draft: Draft) -> None:
        """Starts the thread, which copies everything; nothing of it is on an accelerator."""

        def run() -> None:
            try:
                room = self._take(prepare(), staging)
            except Exception as error:  # noqa: BLE001  (raised where somebody asks for it)
                self._failure = error
                self._let_go()
                self._told.set()
                draft.discard()
                return
            self._live = {key: self._own.tensors[key] for key in self._own.lasting}
            self._run(room, list(room))

        self._start(run)

    def _take(self, job: Job, staging: Staging) -> dict[str, torch.Tensor]:
        work = self._work = job.work
        work.tensors = {key: plain(key, tensor) for key, tensor in work.tensors.items()}
        self._publisher = job.publisher
        return staging.room(work.tensors)

    def _start(self, run: Callable[[], None]) -> None:
        going = threading.Event()

        def run_behind() -> None:
            going.wait(_FIRST)
            run()

        # Not a daemon: the interpreter waits for it when it exits.
        self._thread = threading.Thread(target=run_behind, name="accel checkpoint")
        _report_at_exit(self)
        self._thread.start()
        going.set()

    def wait_for_copies(self) -> None:
        """Returns when training may change what is saved, by what it enqueues from now on."""
        self._taken.wait()
        self._compare()
        for event in self._behind:
            torch.accelerator.current_stream(event.device).wait_event(event)

    def join_part(self) -> None:
        """Waits until this rank has written its part, and raises what kept it from that."""
        self._told.wait()
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """Waits for the thread and raises what kept it from publishing."""
        assert self._thread is not None, "it was begun"
        self._thread.join()
        if self._unpublished is not None:
            raise self._unpublished

    def finish(self) -> None:
        """Removes what was replaced, where that had to wait for others."""
        publisher, self._unfinished = self._unfinished, None
        if publisher is not None:
            publisher.finish()

    def abandon(self) -> None:
        """Waits for the thread, which waits for no other rank. The caller tells the user why."""
        assert self._thread is not None, "it was begun"
        self._abandoned = True
        self._thread.join()
        self._failure = self._unpublished = None

    def report(self) -> None:
        """Says on stderr what nobody has asked for."""
        failure = self._failure or self._unpublished
        self._failure = self._unpublished = None
        if failure is not None:
            print(f"The checkpoint in {self._data.parent} was not saved: {failure}", file=sys.stderr)  # noqa: T201

    def __del__(self) -> None:
        self.report()  # of an Accelerator that has died, nobody can ask

    @property
    def _own(self) -> Work:
        assert self._work is not None, "a job was taken"
        return self._work

    def _let_go(self) -> None:
        if self._work is not None:
            self._work.tensors = {}
        self._live, self._behind = {}, []
        self._taken.set()
        self.copied.set()

    def _run(self, room: dict[str, torch.Tensor], later: Sequence[str]) -> None:
        written: Written | None = None
        try:
            written = self._write(room, later)
        except Exception as error:  # noqa: BLE001  (raised where somebody asks for it)
            self._failure = error
            self._tell_failure(error)
        finally:
            self._own.tensors = {}
            self._told.set()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            self._finish(publisher, written)

    def _write(self, room: dict[str, torch.Tensor], later: Sequence[str]) -> Written:
        try:
            copy((room[key], self._own.tensors[key]) for key in later)
        finally:
            self._taken.set()
            for event in self._behind:
                torch.accelerator.set_device_index(event.device.index)  # else this thread would begin the first one
                event.synchronize()
            self._compare()
            self._let_go()
        if self._changed:
            raise CheckpointError(
                f"{len(self._changed)} tensors were changed while save_state(asynchronous='lazy') copied them, not by the step of a "
                f"prepared optimizer: {listed(self._changed)}. Change them after wait_for_checkpoint(), or save with "
                f"asynchronous='eager'."
            )
        self._own.tensors = room
        written = self._own.write(self._data)
        if len(self._members) > 1:
            write_new(self._message(self._rank, "done"), json.dumps(written.to_json()).encode())
        return written

    def _finish(self, publisher: Publication, written: Written | None) -> None:
        try:
            if written is not None:
                publisher.publish(self._collect(written))
                if self._waits:
                    self._unfinished = publisher
                else:
                    publisher.finish()
                return
        except Exception as error:  # noqa: BLE001  (raised where somebody asks for it)
            self._unpublished = error
        publisher.draft.discard()

    def _compare(self) -> None:
        """Notes what was changed: once, by the thread behind its copies or by the step that waits."""
        with self._comparing:
            live, self._live = self._live, {}
            self._changed += sorted(key for key, tensor in live.items() if tensor._version != self._own.lasting[key])

    def _tell_failure(self, error: Exception) -> None:
        if len(self._members) > 1:
            with contextlib.suppress(OSError):  # a full disk, perhaps: then the others hear of it when they wait
                path = self._message(self._rank, "failed")
                write_new(path.with_suffix(".tmp"), str(error).encode())
                os.replace(path.with_suffix(".tmp"), path)

    def _collect(self, own: Written) -> list[Written]:
        if len(self._members) == 1:
            return [own]
        found: dict[int, Written | str] = {self._rank: own}
        while len(found) < len(self._members):
            for rank in self._members:
                if rank not in found and (answer := self._answer(rank)) is not None:
                    found[rank] = answer
            if self._abandoned or self._is_orphaned():
                missing = sorted(set(self._members) - found.keys())
                raise CheckpointError(
                    f"The training ended, and the parts of ranks {missing} were not written: for {ORPHANED:.0f} s none of "
                    f"their files grew. What was saved before is untouched: load that."
                )
            time.sleep(_POLL)
        for rank in self._members:  # not before all have ended: the folder goes with a failure
            answer = found[rank]
            if isinstance(answer, str):
                raise CheckpointError(f"{answer} (on rank {rank})")
        for rank in self._members:
            os.unlink(self._message(rank, "done"))
        return [answer for rank in self._members if isinstance(answer := found[rank], Written)]

    def _answer(self, rank: int) -> Written | str | None:
        """The outcome of a rank: what it wrote, or the text of its error; None if unknown yet."""
        if self._message(rank, "failed").exists():
            return self._message(rank, "failed").read_text()
        try:
            content = json.loads(self._message(rank, "done").read_bytes())
        except (FileNotFoundError, ValueError):  # not there, or not whole yet
            return None
        return Written.from_json(content)

    def _is_orphaned(self) -> bool:
        """Whether the training has ended, and nothing was written for `ORPHANED` seconds."""
        if threading.main_thread().is_alive():
            return False
        with os.scandir(self._data) as entries:
            found = {entry.name: ((stat := entry.stat()).st_size, stat.st_mtime_ns) for entry in entries}
        # Of a longer time between two looks the machine stood still for most, and the others wrote nothing either.
        since = min(time.monotonic() - self._looked, _LONGEST_LOOK)
        self._quiet = self._quiet + since if found == self._seen else 0.0
        self._seen, self._looked = found, time.monotonic()
        return self._quiet > ORPHANED

    def _message(self, rank: int, word: str) -> Path:
        return self._data / f"rank-{rank:05d}.{word}.json"


def _report_at_exit(save: _Save) -> None:
    reference = weakref.ref(save)

    def report() -> None:
        if (found := reference()) is not None:
            found.report()

    atexit.register(report)
    weakref.finalize(save, atexit.unregister, report).atexit = False

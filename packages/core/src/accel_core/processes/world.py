"""The processes of a run: who they are, where they compute, and how they meet and part."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.options.component_options import read_section
from accel_core.options.handlers import InitProcessGroupKwargs
from accel_core.options.resolution import Option, flag
from accel_core.processes import failure_output
from accel_core.processes.launch_environment import Place, read_place
from accel_core.processes.process_groups import (
    check_timeouts,
    default_backend,
    default_group,
    groups_beside,
    made_beside,
    timeouts,
)
from accel_core.processes.rendezvous import PATIENCE, Shutdown, acquire, assemble, claim, not_met, open_store, round_of
from accel_core.processes.watch.collective_scope import explain, explanation, on_duty, running
from accel_core.processes.watch.device_mark import DeviceMark

if TYPE_CHECKING:
    from accel_core.processes.channel import Channel
    from accel_core.processes.watch.connections import Connections
    from accel_core.processes.watch.monitor import Watch


_MANY = 256  # ranks, above which gloo beside a device is not to open a connection to each of the others in each group


class Closeable(Protocol):
    """An object that must release process groups before they end; closed once or more."""

    def close(self) -> None: ...  # noqa: D102


class World:
    """The ranks of a run as seen from one of them. Made by `World.current`.

    Attributes:
        rank, size, is_main, is_last: the position of this process, and how many there are.
        local_rank, local_size, is_local_main: the same on this machine.
        source: who said so: "torchrun", "slurm", "mpi", "running group" (somebody else's), "alone".
        device: where this process computes by default.
        cpu_only: whether it was asked for the CPU, in a world of one.
        timeout: after how long a collective of the default group gives up.
    """

    cpu_only = False

    def __init__(self, place: Place, device: torch.device, timeout: timedelta, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.is_main, self.is_last = self.rank == 0, self.rank == self.size - 1
        self.is_local_main = self.local_rank == 0
        self.source, self.device, self.timeout = place.source, device, timeout
        # Weak: `_shared` would keep world and group alive for ever, and torch's own references decide how long a group lives.
        self._group = None if group is None else weakref.ref(group)
        self._process = os.getpid()
        self._hosted = place.agent
        # Whether every collective is compared across the ranks before it runs.
        self.checks = flag("debug", None, "ACCELERATE_DEBUG_MODE", False).value
        self.watch: Watch | None = None  # stays so in a world of one, and where ranks met without a store
        self.mark: DeviceMark | None = None  # of an accelerator that is watched
        self._connects: torch.device | None = None  # for which subgroups are connected when they are made
        self._connections: Connections | None = None  # those of the groups that were made here
        self._url: str | None = None  # the meeting point; None if somebody else started the group
        self._store: dist.Store | None = None  # where this world met; None if somebody else started the group
        self._channels: dict[dist.ProcessGroup | None, Channel] = {}
        self._to_close: list[weakref.ref[Closeable]] = []
        self._shows_crashes = False  # since this world began; else somebody else has seen to that
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self.told: Mapping[str, Option[Any]] | None = None  # the group's options from outside; None: not read

    @classmethod
    def current(
        cls,
        *,
        cpu: bool | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        init_method: str | None = None,
    ) -> World:
        """This process's world: the one in use, torch's default group, the launcher's, or alone.

        The first call in a larger world is collective: it starts torch's default group unless that
        runs. Arguments as of `init_process_group`; None: torch's default, the device's backend
        beside gloo, the launcher's address; `cpu` computes on the CPU, although there is an
        accelerator, which is then asked nothing; None: as the process's last world does, if it
        lives. `WorldError` if the launch environment contradicts itself, devices are fewer than
        local ranks, ranks do not meet, or a group runs already and is not as asked for.
        """
        group, last = default_group(), _alone.get("last") if cpu is None else None
        asked: dict[str, Any] = {"timeout": timeout, "backend": backend, "init_method": init_method}
        world = None if group is None else _shared.get(group) or cls._adopt(group, cpu)
        if group is not None and world is not None and world.told is not None:
            world._require(group, cpu, **asked)
            return world
        place = read_place(os.environ)
        if world is None and place.size == 1:
            device = acquire(place, cpu) if last is None else last.device
            world = cls(place, device, timeout or dist.default_pg_timeout, None)
            world.cpu_only = bool(cpu)
            _alone["last"] = last or world
            return world
        # The options of the process group from outside of the code, where the code says nothing. Read once.
        outside = read_section("process_group", InitProcessGroupKwargs)
        told = {name: option for name, option in outside.items() if asked[name] is None}
        asked |= {name: option.value for name, option in told.items()}
        if group is None or world is None:
            world = cls._start(place, acquire(place, cpu), **asked)
        else:
            world._require(group, cpu, **asked)
            if group not in _shared:  # refused before: others may have ended by the same error, and the store with them
                world._share(group)
        world.told = told
        return world

    @classmethod
    def _adopt(cls, group: dist.ProcessGroup, cpu: bool | None) -> World:
        rank, size = dist.get_rank(), dist.get_world_size()
        place = read_place(os.environ)
        if place.source == "alone":
            # Nobody says which ranks share a machine; a script that starts its own group usually runs on one.
            place = Place("alone", rank, size, rank, size)
        elif (place.rank, place.size) != (rank, size):
            raise WorldError(
                f"torch's default process group runs, with rank {rank} of {size}, but the environment says rank {place.rank} of "
                f"{place.size} ({place.source}). Start the group with the launcher's rank and size, or unset its variables."
            )
        place = dataclasses.replace(place, source="running group")
        timeout = min(timeouts(group), default=dist.default_pg_timeout)
        return cls(place, acquire(place, cpu), timeout, group)

    @classmethod
    def _start(
        cls, place: Place, device: torch.device, timeout: timedelta | None, backend: str | None, init_method: str | None
    ) -> World:
        from accel_core.processes.watch.connections import Connections

        url = init_method or place.meeting_point()
        try:
            store = _meet(url, place, timeout or dist.default_pg_timeout)
            assemble(store, url, place, device, timeout or dist.default_pg_timeout)
            backend, connections = backend or default_backend(device), Connections(store)
            serving = dict(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()).get(device.type)
            bound = device if serving and device.type != "cpu" else None
            if bound is not None and place.size > _MANY:
                os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
            # torch forgets the default of a backend that stands beside another one.
            limit = timeout or dist.distributed_c10d._get_default_timeout(dist.Backend(serving or "gloo"))
            with connections.made_here():
                dist.init_process_group(backend, None, limit, place.size, place.rank, store, device_id=bound)
        except dist.DistError as error:
            raise not_met(url, place, error) from error
        group = default_group()
        assert group is not None, "init_process_group has returned"
        world = cls(place, device, timeout or min(timeouts(group), default=dist.default_pg_timeout), group)
        world._store, world._url, world._connections = store, url, connections
        if bound is not None and group._get_backend(bound).supports_splitting:
            # It is connected by now. New groups would be split from it, for which all ranks must come, also to those of some
            # ranks, or of the CPU: docs/decisions/0067-the-watch-and-devices-that-work-by-themselves.md.
            group.bound_device_id, world._connects = None, bound
        check_timeouts(group, timeout)
        world._share(group)
        world.group_beside(group, "messages")  # now, while all ranks are together
        return world

    def _start_alone(self) -> dist.ProcessGroup:
        """torch's default group with this process alone, for a world that was made without."""
        self._store, backend = dist.HashStore(), default_backend(self.device)
        dist.init_process_group(backend, timeout=self.timeout, rank=0, world_size=1, store=self._store)
        group = default_group()
        assert group is not None, "init_process_group has returned"
        self._group = weakref.ref(group)
        self._share(group)
        return group

    def _share(self, group: dist.ProcessGroup) -> None:
        _shared[group] = self
        _all.add(self)
        self._set_watch(group)
        if not faulthandler.is_enabled():
            # stderr has no descriptor in a notebook, say. A rank that a backend aborts shows where it stood.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                faulthandler.enable()
                self._shows_crashes = True
        failure_output.show_once()
        atexit.unregister(_end_all)
        atexit.register(_end_all)

    def _set_watch(self, group: dist.ProcessGroup) -> None:
        from torch.distributed import distributed_c10d

        store: dist.Store | None = distributed_c10d._get_default_store()
        if self.size == 1 or store is None:
            return  # nobody to wait for; or a backend that has met by means of its own
        from accel_core.processes.watch.connections import Connections
        from accel_core.processes.watch.monitor import Watch

        self._connections = connections = self._connections or Connections(store)
        whole, beside = weakref.ref(group), made_beside(group)

        def break_off() -> None:
            # Of those that it is no member of, a rank has a number.
            groups = [whole(), *beside.values()]
            connections.break_off([each for each in groups if isinstance(each, dist.ProcessGroup)])

        if self.device.type != "cpu":
            with contextlib.suppress(RuntimeError):  # no events, or no backend for the device
                self.mark = DeviceMark(self.device, group._get_backend(self.device).name())
        checks, mark, hosted = self.checks, self.mark, self._hosted
        watch = Watch(store, self.rank, self.size, break_off, lambda: whole() is None, checks, mark, hosted)
        self.watch = on_duty[group] = watch.start()

    def _require(
        self,
        group: dist.ProcessGroup,
        cpu: bool | None,
        timeout: timedelta | None,
        backend: str | None,
        init_method: str | None,
    ) -> None:
        """Compares what is asked for with the running group, which cannot be changed any more."""
        differences: list[tuple[str, object, object]] = []
        limits = set(timeouts(group) or [self.timeout])
        if timeout is not None and limits != {timeout}:
            differences.append(("timeout", timeout, ", ".join(sorted(map(str, limits)))))
        running = dist.get_backend_config(group) if backend is not None else ""
        if backend is not None and repr(dist.BackendConfig(dist.Backend(backend))) != running:
            differences.append(("backend", backend, running))
        if init_method is not None and init_method != self._url:
            differences.append(("init_method", init_method, self._url or "one that is not known here"))
        if cpu and self.device.type != "cpu":
            differences.append(("cpu", True, f"device {self.device}"))
        if differences:
            texts = "; ".join(f"{name}={asked} was asked for, it has {found}" for name, asked, found in differences)
            raise WorldError(
                f"The process group of this process runs already ({self.source}) and cannot be changed: {texts}. Say so where "
                f"the group is started (the first Accelerator, or init_process_group), or leave the argument out here."
            )

    @functools.cached_property
    def widest(self) -> torch.dtype:
        """The widest floating dtype of the device, for sums: float64, or float32 if it lacks that."""
        with contextlib.suppress(RuntimeError, TypeError):  # as devices raise that lack it
            return torch.ones((), dtype=torch.float64, device=self.device).add_(1).dtype
        return torch.float32

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The default group; None in a world of one without one. `WorldError` once it has ended."""
        if self._group is None:
            return None
        group = self._group()
        if group is None or group is not default_group():
            raise WorldError(
                f"The process group of this world ({self.size} ranks, {self.source}) was asked for, but it has ended: "
                f"end_training() or destroy_process_group() was called. Communicate before that, or make a new Accelerator."
            )
        return group

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The process group of `ranks`, made once, with the world's timeout, backend. Collective.

        torch's `GroupMember.NON_GROUP_MEMBER` on other ranks. A world of one may start a group.
        """
        members = tuple(sorted(ranks))
        if len(set(members)) < len(members) or not set(members) <= set(range(self.size)):  # torch 2.9 would hang
            raise ValueError(f"World.subgroup({list(ranks)}) names a duplicate, or a rank out of range({self.size}).")
        group = self.group or self._start_alone()
        if members == tuple(range(self.size)):
            return group
        with self.collective("World.subgroup()"):
            return self._group_of(members, "", by_all=True)

    def barrier(self) -> None:
        """Waits until every rank has come here. A collective; does nothing in a world of one."""
        self.arrive("wait_for_everyone()")

    def collective(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A block of communication; the Watch names it ("gather()"), and explains what breaks."""
        return contextlib.nullcontext() if self.watch is None else self.watch.collective(name)

    def arrive(self, name: str) -> None:
        """Returns once all ranks call `arrive(name)`; `CollectiveMismatchError` if names differ."""
        if self.size > 1:
            self.channel().arrive(name)

    def channel(self, group: dist.ProcessGroup | None = None) -> Channel:
        """The channel between the ranks of `group`, or of the whole world; one for each group."""
        if group is self.group:
            group = None  # which stands for the default group, and holds no reference to it
        if group not in self._channels:
            from accel_core.processes.channel import Channel

            members = None if group is None else tuple(dist.get_process_group_ranks(group))
            ranks = members or tuple(range(self.size))
            connect, rank = functools.partial(self._group_of, ranks, "messages"), ranks.index(self.rank)
            # Groups of messages have the backends of the default one. If somebody else started that, it may have none for the CPU.
            on_cpu = self.size > 1 and "cpu:" in dist.get_backend_config(self.group)
            lies = torch.device("cpu") if on_cpu else self.device
            self._channels[group] = Channel(connect, rank, len(ranks), self.device, lies, self.watch, members)
        return self._channels[group]

    def group_beside(self, group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
        """A group of these ranks per `purpose`: gloo ends ranks that get too much. Collective."""
        return self._group_of(tuple(dist.get_process_group_ranks(group)), purpose)

    def _group_of(self, ranks: tuple[int, ...], purpose: str, by_all: bool = False) -> dist.ProcessGroup:
        """The group of these ranks for this purpose, made by them, or, `by_all`, by all ranks."""
        whole = self.group
        assert whole is not None, "a world of one without a group sends no messages"
        groups = made_beside(whole)
        if (ranks, purpose) not in groups:
            watched = None if self._connections is None or self.rank not in ranks else self._connections
            with contextlib.nullcontext() if watched is None else watched.made_here():
                local, device = not by_all, self._connects if by_all else None
                made = dist.new_group(list(ranks), self.timeout, use_local_synchronization=local, device_id=device)
            if self.rank in ranks:
                check_timeouts(made, self.timeout)
            groups[ranks, purpose] = made
        return groups[ranks, purpose]

    def compute_on(self, device: torch.device) -> None:
        """Computes there from now on, as a strategy says that knows a device which torch does not."""
        self.device = device
        vars(self).pop("widest", None)

    def close_before_end(self, closeable: Closeable) -> None:
        """Has `closeable.close()` called before the group or process ends. Held weakly."""
        self._to_close = [reference for reference in self._to_close if reference() is not None]
        self._to_close.append(weakref.ref(closeable))

    def enter(self, user: object) -> None:
        """`user` (an Accelerator) works in this world from now on. The reference is weak."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """`user` needs the world no more. If nobody does, it ends, a collective: see `end`."""
        self._users.discard(user)
        if not self._users:
            self.end()

    def end(self) -> None:
        """Closes what is to be closed; ends the process group if started here. Once only.

        A collective, at exit at the latest: every rank waits for the others, `PATIENCE` at most.
        """
        self._end(patient=True)

    def _end(self, patient: bool) -> None:
        with contextlib.ExitStack() as last_to_first:  # all of it happens, even if one of them raises
            last_to_first.callback(self._part, patient)
            for reference in self._to_close:
                if (closeable := reference()) is not None:
                    last_to_first.callback(closeable.close)
            self._to_close = []

    def _part(self, patient: bool) -> None:
        """Forgets the group, and destroys it if this world started it."""
        group = None if self._group is None else self._group()
        self._channels.clear()
        _all.discard(self)
        if self._shows_crashes:
            faulthandler.disable()
            self._shows_crashes = False
        if group is None or _shared.pop(group, None) is None:
            return
        del group
        watch, self.watch, self.mark = self.watch, None, None
        if watch is None:
            self._destroy(together=patient)
            return
        if patient and self.device.type != "cpu":
            _await_device(self.device, watch)
        watch.leave(failed=not patient)
        watch.stop(alone=not self._destroy(together=patient and not watch.verdict))
        if watch.verdict and patient and not watch.raised:
            raise WorldError(f"The training of rank {self.rank} ended, but that of the others did not. {watch.verdict}")

    def _destroy(self, *, together: bool) -> bool:
        """Destroys the group if this world started it. Returns whether the others had patience enough."""
        group, store, self._store = default_group(), self._store, None
        if store is None or group is None or self._group is None or group is not self._group():
            return True
        groups = [group, *groups_beside(group)] if not together and self.device.type != "cpu" else []
        made_beside(group).clear()
        del group
        shutdown = Shutdown(store, self.rank, self.size, PATIENCE if together else timedelta(0))
        shutdown.say("ready", wait=True)
        if self._connections is not None and (groups or not shutdown.complete):
            # Whoever still holds the group (a model in the traceback of an error), or its sockets (a loader's worker, which was
            # forked), would keep the others waiting; so would a device that has yet to run what does not fit the others' calls.
            self._connections.break_off(groups)
        groups.clear()  # what is closed already cannot be broken off
        dist.destroy_process_group()
        shutdown.say("gone", wait=self.rank == 0)
        return shutdown.complete


def _await_device(device: torch.device, watch: Watch) -> None:
    """Waits for a device's collectives, which need this process, unless the Watch finds them to be in vain."""
    waiting = threading.Thread(target=torch.accelerator.synchronize, args=(device,), daemon=True)
    waiting.start()
    while waiting.is_alive() and not watch.verdict:
        waiting.join(0.1)


# What is shared hangs on torch's default group: a world is found as long as its group runs, and dies with it.
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, World] = weakref.WeakKeyDictionary()
# Every world with a group that somebody still uses, its group ended or not: what is to be closed is closed at exit.
_all: weakref.WeakSet[World] = weakref.WeakSet()
# The last world of one that chose its device: what scripts call beside an Accelerator computes where that one does.
_alone: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()
# The stores at which this process has met others, and how often. They stay: rank 0 hosts the store, and a rank that is
# quick to start the next world must not find the server of the last one about to vanish.
_met: dict[str, tuple[dist.Store, int]] = {}


def _end_all() -> None:
    """Ends worlds with a group at exit, else torch may abort; does not wait after an error."""
    if any(world._process != os.getpid() for world in _all):
        return  # it was forked, and leaves the connections alone
    error = fatal_error()
    if error is not None:
        _tell_why(error)
    for world in list(_all):
        world._end(patient=error is None)


def end_worlds() -> None:
    """Ends worlds with a group at once, and not at exit: before long work of this process."""
    atexit.unregister(_end_all)
    _end_all()


def fatal_error() -> BaseException | None:
    """The exception that nobody caught, as the interpreter has reported it."""
    return getattr(sys, "last_value", None)


def _tell_why(error: BaseException) -> None:
    """Leaves others a notice of the error that ends this process, or tells whose failure does."""
    lost, watch = failure_output.broken_connection_in(error), running()
    if lost is None and watch is not None and watch.verdict and isinstance(error, RuntimeError):
        lost = error  # of a device whose collectives were broken off
    found = str(lost)
    if lost is not None and watch is not None and watch.verdict:
        explain(lost)  # which takes no time then: agents read the file as soon as it is there
    failure_output.leave(error, follows=lost is not None, why="" if lost is None else explanation(lost))
    if lost is None and watch is not None:
        watch.fail(error)
    elif lost is not None:
        explain(lost)
        if str(lost) != found:
            print(str(lost)[len(found) :].lstrip(), file=sys.stderr)  # noqa: T201  (the traceback stands there already)


def _meet(url: str, place: Place, timeout: timedelta) -> dist.Store:
    """The store of these ranks' next world at `url`; `WorldError` if this rank is taken."""
    if url in _met:
        store, count = _met[url]
    else:
        store, count = open_store(url, place, timeout), 0
        if not place.agent:  # else the launcher hosts the store, gives the ranks, and keeps it when it restarts them
            claim(store, url, place)
    store.set_timeout(timeout)
    _met[url] = store, count + 1
    return round_of(store, place, count)

"""The meeting of ranks, each with its device: all send a *card*, one gives the *verdict*; their end."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import ipaddress
import logging
import os
import socket
import struct
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from accel_core.base.deprecation import level_of_the_user
from accel_core.base.errors import WorldError
from accel_core.base.installation import how_to_install
from accel_core.base.vocabulary import ABSENT, UNKNOWN_DEVICES

if TYPE_CHECKING:
    from accel_core.processes.launch_environment import Place

LINGER = timedelta(seconds=3)  # for which rank 0 keeps the store for ranks that have not read a bad verdict yet
PATIENCE = timedelta(seconds=5)  # for which a rank that ends waits for the others, in all
_ABSENT = "torch {} finds no accelerator, and this machine has {}. {} To compute on the CPU: Accelerator(cpu=True), or ACCELERATE_USE_CPU=1."
MET = "met"  # the verdict on a world that has come together
_ROUTES = Path("/proc/net/route")  # of IPv4, numbers in the order of bytes in which they are sent
logger = logging.getLogger(__name__)


def open_store(url: str, place: Place, timeout: timedelta) -> dist.Store:
    """The store at `url`; rank 0 makes it, unless the launcher did. Does not wait for the others.

    torch's rendezvous, which does, is used for anything but a plain `tcp://host:port`. Raises
    `torch.distributed.DistError` if the port is taken, or nobody listens within `timeout`.
    """
    parts = urlsplit(url)
    if place.local_size < place.size:
        _choose_interface(str(place.address or parts.hostname))
    if parts.scheme != "tcp" or parts.query or parts.hostname is None or parts.port is None or place.agent:
        store: dist.Store = next(iter(dist.rendezvous(url, place.rank, place.size, timeout=timeout)))[0]
        return store
    hosts = place.rank == 0
    # In a world of several machines the same name may be the loopback here, and not there.
    listener = loopback_listener(parts.hostname, parts.port) if hosts and place.local_size == place.size else None
    return dist.TCPStore(
        *(parts.hostname, parts.port, place.size, hosts, timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _choose_interface(address: str) -> None:
    """Has gloo use the network interface to `address`, not that of this host's name, if known."""
    with contextlib.suppress(OSError, ValueError):
        (target,) = struct.unpack("=I", socket.inet_aton(socket.gethostbyname(address)))
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
        routes = [(int(row[7], 16).bit_count(), -int(row[6]), row) for row in rows]  # the narrowest, then the cheapest
        fitting = [each for each in routes if target & int(each[2][7], 16) == int(each[2][1], 16)]
        # An address of this host may be its loopback, to which no route is listed: any that leads to others.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", max(fitting or routes)[2][0])


def loopback_listener(host: str, port: int) -> socket.socket | None:
    """A loopback socket for a store at `host`; None if `host` is elsewhere, or the port is taken.

    torch by itself listens at all addresses of the machine, and its store lets everybody in.
    """
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(address[0]).is_loopback:
            return socket.create_server(address[:2], family=family)
    return None


def claim(store: dist.Store, url: str, place: Place) -> None:
    """Takes the rank of `place` in the job at `url`; `WorldError` if taken. No collective."""
    job = f"{place.size} ranks, {place.source}" + (f" {place.job}" if place.job else "")
    found = store.compare_set("accel/job", "", job).decode()
    if found != job:
        raise WorldError(
            f"Rank {place.rank} of this job ({job}) was to meet the others at {url}, but another job meets there ({found}). "
            f"Give every job a port of its own: set MASTER_PORT, the same on all ranks of the job, to one that is free."
        )
    if store.add(f"accel/rank/{place.rank}", 1) > 1:
        round_of(store, place, 0).compare_set("verdict", "", f"rank {place.rank} was claimed by two processes")
        raise WorldError(
            f"Rank {place.rank} of {place.size} was asked for ({place.source}), but another process has claimed rank "
            f"{place.rank} at {url}. Give every process a rank of its own, and every job a port of its own (MASTER_PORT)."
        )


def round_of(store: dist.Store, place: Place, count: int) -> dist.Store:
    """The part of `store` for world number `count`, from 0, that these processes make."""
    return dist.PrefixStore(f"accel/{place.attempt}/{count}", store)


def assemble(store: dist.Store, url: str, place: Place, device: torch.device, timeout: timedelta) -> None:
    """Waits for every rank, each with its own device; else `WorldError` on all. A collective."""
    everyone = range(place.size)
    store.set(f"card/{place.rank}", identity(device))
    if store.add("cards", 1) == place.size:
        verdict = _sharing([store.get(f"card/{rank}").decode() for rank in everyone]) or MET
        store.compare_set("verdict", "", verdict)  # unless another rank has said so already
    try:
        store.wait(["verdict"], timeout)
    except dist.DistStoreError:
        missing = [str(rank) for rank in everyone if not store.check([f"card/{rank}"])]
        came = f"{place.size - len(missing)} of {place.size} came within {timeout}"
        store.compare_set("verdict", "", f"{came}, and these ranks are missing: {', '.join(missing)}")
    verdict = store.get("verdict").decode()
    if verdict == MET:
        return
    store.set(f"told/{place.rank}", "")
    if place.rank == 0:
        with contextlib.suppress(dist.DistStoreError):  # who has not come by then finds nobody, and says so
            store.wait([f"told/{rank}" for rank in everyone], LINGER)
    raise not_met(url, place, verdict)


def not_met(url: str, place: Place, reason: object) -> WorldError:
    """The error of a rank whose world did not come together."""
    return WorldError(
        f"A world of {place.size} ranks was asked for ({place.source}), but rank {place.rank} did not meet the others at "
        f"{url}: {reason}. Check that {place.size} processes run, each with a rank of its own, and that every host reaches "
        f"this address, which is that of rank 0 (MASTER_ADDR, MASTER_PORT). A process that is to run alone must not inherit "
        f"the variables of a launcher."
    )


def acquire(place: Place, cpu: bool | None) -> torch.device:
    """The device of this process, made current: that of its local rank, or the only one."""
    # With `cpu` no driver is asked: a process that has asked one cannot fork others that use it.
    accelerator = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        if not cpu:
            _warn_of_drivers()
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    is_only = place.local_size > count == 1  # a scheduler has bound one to each process, or they share it
    device = torch.device(accelerator.type, 0 if is_only else place.local_rank)
    if place.local_size > count and not (is_only and identity(device)):  # of a known one, ranks tell as they meet
        was_bound = is_only and (place.source in ("slurm", "mpi") or "_VISIBLE_" in " ".join(os.environ))
        what = f"{place.local_size} processes run on this machine ({place.source}) and each wants a device of its own, but this "
        what += f"process sees {count} ({accelerator.type})"
        if not was_bound:
            raise WorldError(f"{what}. Start {count}, or compute on the CPU with Accelerator(cpu=True).")
        what += ", and torch cannot tell whether others have it: it is taken to be bound. If not, start one process for each device"
        warnings.warn(f"{what}.", stacklevel=level_of_the_user())
    torch.accelerator.set_device_index(device.index)
    return device


def _warn_of_drivers() -> None:
    """Warns of a driver that fails: torch is built for a device of which this machine has a file."""
    lists = {value.strip() for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
    hidden = not lists.isdisjoint(("", "-1", "NoDevFiles"))  # who hides devices knows
    for build, mark, advice in ABSENT:
        if Path(mark).exists() and getattr(torch.version, build, None) is not None and not hidden:
            warnings.warn(_ABSENT.format(torch.__version__, mark, advice), stacklevel=level_of_the_user())


def refuse_unknown_devices() -> None:
    """Raises `WorldError` on a machine with a device that torch by itself does not know."""
    for mark, distribution in UNKNOWN_DEVICES:
        if Path(mark).exists() if mark.startswith("/") else importlib.util.find_spec(mark) is not None:
            advice = f"strategy={distribution.removeprefix('accel-')!r} trains there. {how_to_install(distribution)}."
            raise WorldError(_ABSENT.format(torch.__version__, mark, advice))


def identity(device: torch.device) -> str:
    """The identity of `device`, with its host's name; empty for the CPU, and if torch has none."""
    describe = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = None if describe is None else describe(device)
    names = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
    known = [f"{name}={getattr(properties, name)}" for name in names if hasattr(properties, name)]
    return " ".join([device.type, *known, f"on {socket.gethostname()}"]) if known else ""


def _sharing(devices: list[str]) -> str:
    """The complaint about ranks that share one device; empty without. `devices`: by rank."""
    for device, count in collections.Counter(filter(None, devices)).items():
        if count > 1:
            ranks = [str(rank) for rank, other in enumerate(devices) if other == device]
            return (
                f"ranks {', '.join(ranks)} have one device between them ({device}). Start one process for each device, let "
                f"every process see all devices of its machine or bind another one to each, or compute with Accelerator(cpu=True)"
            )
    return ""


class Shutdown:
    """The end of one rank, through the store: a collective can fail when somebody has gone."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience: timedelta) -> None:
        self._store, self._rank, self._size = dist.PrefixStore("farewell", store), rank, size
        self._deadline = time.monotonic() + patience.total_seconds()

    @property
    def complete(self) -> bool:
        """Whether there was patience enough for all that was to be said and heard."""
        return time.monotonic() < self._deadline

    # First everyone waits until nobody works in the group, then rank 0, which may host the store, until nobody needs that.
    def say(self, word: str, wait: bool) -> None:
        """Says "ready" (works in the group no more) or "gone"; waits for the others if `wait`."""
        left = timedelta(seconds=self._deadline - time.monotonic())
        if left <= timedelta(0):
            return  # out of patience, which has been said, or in a hurry
        try:
            # One key to wait for: with a key of each rank, the store would look at size² of them.
            if self._store.add(word, 1) == self._size:
                self._store.set(f"all {word}", "")
            if wait:
                self._store.wait([f"all {word}"], left)
        except dist.DistError as error:
            self._deadline = time.monotonic()
            reason, seconds = str(error).partition("\n")[0], PATIENCE.total_seconds()
            text = "Rank %d of %d ends without the others, which were not all %s within %g s: %s"
            logger.warning(text, self._rank, self._size, word, seconds, reason)

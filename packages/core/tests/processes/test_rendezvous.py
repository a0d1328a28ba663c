"""Ranks meet under ranks and devices of their own; if they do not, everyone that has come gets the same reason."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.processes import rendezvous
from accel_core.processes.launch_environment import Place, read_place
from accel_core.processes.rendezvous import assemble, claim, identity, open_store, round_of
from accel_testing import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LONG, SHORT = timedelta(seconds=30), timedelta(seconds=1)


def stand_in_for_a_device(uuid: str) -> None:
    """What torch would say of the one device that this rank sees."""
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuid)  # type: ignore[assignment,misc]


def outcome(store: dist.Store, place: Place, device: torch.device, timeout: timedelta = LONG) -> str:
    try:
        assemble(store, "tcp://here:1", place, device, timeout)
    except WorldError as error:
        return str(error)
    return "all have come"


def meetings() -> dict[str, str]:
    place = read_place(os.environ)
    store, found = open_store(place.meeting_point(), place, LONG), {}
    rounds = [round_of(store, place, count) for count in range(1, 5)]
    found["on CPUs"] = outcome(rounds[0], place, CPU)
    stand_in_for_a_device(f"GPU-{place.rank}")
    found["a device each"] = outcome(rounds[1], place, GPU)
    stand_in_for_a_device(f"GPU-{place.rank // 2}")
    found["a device shared"] = outcome(rounds[2], place, GPU)
    if place.rank < 2:
        found["one missing"] = outcome(rounds[3], place, CPU, SHORT)
    return found


def test_every_rank_hears_the_same_verdict() -> None:
    first, second, third = run_ranks(meetings, 3)
    for found in (first, second, third):
        assert found["on CPUs"] == found["a device each"] == "all have come"
        assert "ranks 0, 1 have one device between them (cuda uuid=GPU-0 on " in found["a device shared"]
        assert "bind another one to each, or compute with Accelerator(cpu=True)" in found["a device shared"]
    for rank, found in enumerate((first, second)):
        assert f"rank {rank} did not meet the others at tcp://here:1: 2 of 3 came" in found["one missing"]
        assert "came within 0:00:01, and these ranks are missing: 2. Check that 3 processes run" in found["one missing"]
        assert "must not inherit the variables of a launcher" in found["one missing"]


def claims() -> list[str]:
    place, said = read_place(os.environ), []
    url = place.meeting_point()
    store = open_store(url, place, LONG)
    claim(store, url, place)
    for job in (place, dataclasses.replace(place, job="77 0")):
        with pytest.raises(WorldError) as caught:
            claim(store, url, job)
        said.append(str(caught.value))
    said.append(outcome(round_of(store, place, 0), place, CPU))
    return said


def test_rank_that_is_taken_and_a_meeting_of_others_are_errors_at_once() -> None:
    started = time.monotonic()
    for rank, (taken, other, verdict) in enumerate(run_ranks(claims, 2)):
        assert (
            f"Rank {rank} of 2 was asked for (torchrun), but another process has claimed rank {rank} at tcp://" in taken
        )
        assert "Rank" in other
        assert "this job (2 ranks, torchrun 77 0) was to meet the others at tcp://" in other
        assert "another job meets there (2 ranks, torchrun). Give every job a port of its own: set MASTER_PORT" in other
        assert "was claimed by two processes" in verdict
    assert time.monotonic() - started < LONG.total_seconds()


def test_device_that_torch_does_not_describe_has_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity(CPU) == ""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="a device"))
    assert identity(GPU) == ""
    monkeypatch.delattr(torch.cuda, "get_device_properties")
    assert identity(GPU) == ""


def test_devices_are_told_apart_by_what_torch_says_and_by_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="0", pci_domain_id=0, pci_bus_id=7, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    expected = f"cuda uuid=0 pci_domain_id=0 pci_bus_id=7 pci_device_id=1 on {socket.gethostname()}"
    assert identity(GPU) == expected


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wifi0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t100\t000000FF\t0\t0\t0
ib0\t000D4D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.77.13.9", "ib0"),  # the narrowest network
        ("10.1.2.3", "eth0"),
        ("8.8.8.8", "eth0"),  # the cheapest way to anywhere
        ("127.0.1.1", "eth0"),  # this host's own name may stand for its loopback
        ("no address", "taken"),
    ],
)
def test_gloo_uses_the_interface_that_leads_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, interface: str
) -> None:
    assert sys.byteorder == "little", "in which the table is written here"
    (tmp_path / "route").write_text(ROUTES)
    monkeypatch.setattr(rendezvous, "_ROUTES", tmp_path / "route")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "taken")
    rendezvous._choose_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "taken", "by the user"
    if interface != "taken":
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        rendezvous._choose_interface(address)
        assert os.environ["GLOO_SOCKET_IFNAME"] == interface

"""From the reports of all ranks to what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

Report = dict[str, Any]

SHARED_MEMORY = 1 << 30
"""Bytes of free shared memory below which workers of loaders may run out of it."""
OPEN_FILES = 4096
"""Files that a process should be allowed to open: workers of loaders and large worlds take many."""


@dataclass(frozen=True)
class Finding:
    """Something that was found.

    Args:
        is_problem: whether training will not work; else it may work worse than it could.
        text: what.
        advice: what to do.
    """

    is_problem: bool
    text: str
    advice: str


def examine(reports: list[Report], size: int) -> list[Finding]:
    """The findings, problems first. `reports` are those that came, of a world of `size` ranks."""
    judges = (_missing, _closed_doors, _broken_group, _shared_devices, _versions, _names, _variables, _limits)
    found = [finding for judge in judges for finding in judge(reports, size)]
    return sorted(found, key=lambda finding: not finding.is_problem)


def machines(reports: list[Report]) -> dict[int, Report]:
    """The first report of each machine."""
    found: dict[int, Report] = {}
    for report in sorted(reports, key=lambda report: int(report["rank"])):
        found.setdefault(report["machine"], report)
    return found


def differing(found: dict[int, Report], what: str) -> dict[str, dict[int, str]]:
    """The entries of `what` that are not the same on all machines: name → machine → value; "not set" where there is none."""
    names = sorted({name for report in found.values() for name in report[what]})
    values = {name: {rank: report[what].get(name, "not set") for rank, report in found.items()} for name in names}
    return {name: by_machine for name, by_machine in values.items() if len(set(by_machine.values())) > 1}


def _missing(reports: list[Report], size: int) -> Iterator[Finding]:
    missing = sorted(set(range(size)) - {report["rank"] for report in reports})
    if missing:
        yield Finding(
            True,
            f"No report came from {_ranks(missing)}.",
            "Look at what they printed, and whether their processes were killed.",
        )


def _closed_doors(reports: list[Report], _: int) -> Iterator[Finding]:
    for report in reports:
        for rank, found in sorted(report.get("doors", {}).items(), key=lambda item: int(item[0])):
            if "error" in found:
                yield Finding(
                    True,
                    f"{_who(report)} does not reach rank {rank} at {found['at']}: {found['error']}.",
                    "Let the machines talk to each other at all ports above 1024 (firewall, security group); or choose the "
                    "network that connects them: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each machine.",
                )


def _broken_group(reports: list[Report], _: int) -> Iterator[Finding]:
    for report in reports:
        if "stuck" in report:
            yield Finding(
                True,
                f"{_who(report)} was stuck in {report['stuck']}.",
                "If others were not, look at what they were doing; else at the network between the machines: NCCL_DEBUG=INFO, "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL and TORCH_CPP_LOG_LEVEL=INFO say more.",
            )
        elif "error" in report:
            yield Finding(
                True,
                f"{_who(report)} failed in {report['step']}: {report['error']}",
                "The error says what it needs; that of the rank which failed first counts.",
            )
        group = report.get("group", {})
        if group.get("sum") != group.get("expected"):
            yield Finding(
                True,
                f"{_who(report)} got {group['sum']} as the sum over all ranks, which is {group['expected']}.",
                "The devices or their connections compute wrong: test them with the tools of their vendor.",
            )


def _shared_devices(reports: list[Report], _: int) -> Iterator[Finding]:
    owners: dict[tuple[int, str], list[int]] = {}
    for report in reports:
        device = report.get("group", {}).get("device", "cpu")
        if device != "cpu":
            owners.setdefault((report["machine"], device), []).append(report["rank"])
    for (machine, device), ranks in owners.items():
        if len(ranks) > 1:
            yield Finding(
                True,
                f"{_ranks(ranks)} share {device} of machine {machine}.",
                "Start one process for each device: --num-processes, or bind another device to each.",
            )


def _versions(reports: list[Report], _: int) -> Iterator[Finding]:
    for name, by_machine in differing(machines(reports), "versions").items():
        yield Finding(
            True, f"{name} differs between the machines: {_listed(by_machine)}.", "Install the same on all machines."
        )


def _variables(reports: list[Report], _: int) -> Iterator[Finding]:
    for name, by_machine in differing(machines(reports), "variables").items():
        yield Finding(
            False, f"{name} differs between the machines: {_listed(by_machine)}.", "Set it alike, or nowhere."
        )


def _names(reports: list[Report], _: int) -> Iterator[Finding]:
    found = machines(reports)
    for machine, report in found.items():
        addresses = report["host resolves to"]
        unset = not report["interface"] and len(found) > 1
        if not addresses:
            yield Finding(
                False,
                f"The name of machine {machine}, {report['host']}, does not resolve to an address.",
                f"Add it to /etc/hosts there: {_public(report)} {report['host']}.",
            )
        elif unset and all(ip_address(each.partition("%")[0]).is_loopback for each in addresses):
            yield Finding(
                True,
                f"The name of machine {machine}, {report['host']}, resolves to {', '.join(addresses)}, where no other machine "
                f"reaches it, and gloo takes its address from that name.",
                "Set GLOO_SOCKET_IFNAME there to the interface that reaches the others; `accel launch` does so by itself.",
            )


def _limits(reports: list[Report], _: int) -> Iterator[Finding]:
    for machine, report in machines(reports).items():
        memory, files = report["shared memory"], report["open files"]
        if memory is not None and memory < SHARED_MEMORY:
            yield Finding(
                False,
                f"Machine {machine} ({report['host']}) has {memory / 2**20:.0f} MiB of shared memory free (/dev/shm); workers of "
                f"loaders pass batches through it.",
                "Give the container more: docker run --shm-size 8g, or --ipc host.",
            )
        if files is not None and files < OPEN_FILES:
            yield Finding(
                False,
                f"A process of machine {machine} ({report['host']}) may open {files} files.",
                f"Allow more: ulimit -n {16 * OPEN_FILES}.",
            )


def _who(report: Report) -> str:
    return f"Rank {report['rank']} (machine {report['machine']}, {report['host']})"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _public(report: Report) -> str:
    return next((each for each in report["addresses"] if not ip_address(each).is_loopback), "its address")


def _listed(by_machine: dict[int, str]) -> str:
    return ", ".join(f"{value} on machine {machine}" for machine, value in by_machine.items())

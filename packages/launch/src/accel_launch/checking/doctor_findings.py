"""Findings and advice from the reports of all ranks, and the page that `accel doctor` prints."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any, NamedTuple

from accel_launch.output import BAD, DOUBTFUL, GOOD, mark, say, table
from accel_launch.starting.failures import listed

Report = dict[str, Any]

SHARED_MEMORY = 1 << 30
"""Bytes of free shared memory below which workers of loaders may run out of it."""
OPEN_FILES = 4096
"""Files that a process should be allowed to open: workers of loaders and large worlds take many."""

LARGE = 16 << 20
"""Bytes that ranks add up to see how fast they send."""

_PAIRS = 64  # so many lines of pairs at most, the slowest


class Finding(NamedTuple):
    """Something that was found."""

    is_problem: bool  # whether training will not work; else it may work worse than it could
    text: str
    advice: str  # what to do


def examine(reports: list[Report], size: int) -> list[Finding]:
    """The findings, problems first. `reports` are those that came, of a world of `size` ranks."""
    found = [
        *_of_all(reports, size),
        *(finding for report in reports for finding in _of_rank(report)),
        *_of_machines(reports),
        *_of_devices(reports),
    ]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _of_all(reports: list[Report], size: int) -> Iterator[Finding]:
    """Ranks that are missing, or share a device."""
    if missing := sorted(set(range(size)) - {report["rank"] for report in reports}):
        advice = "Look at what they printed, and whether their processes were killed."
        yield Finding(True, f"No report came from {listed(missing)}.", advice)
    owners: dict[tuple[int, str], list[int]] = {}
    for report in reports:
        owners.setdefault((report["machine"], report.get("group", {}).get("device", "cpu")), []).append(report["rank"])
    for (machine, device), ranks in owners.items():
        if len(ranks) > 1 and device != "cpu":
            advice = "Start one process for each device: --num-processes, or bind another device to each."
            yield Finding(True, f"{listed(ranks)} share {device} of machine {machine}.", advice)


def _of_rank(report: Report) -> Iterator[Finding]:
    """Closed doors, and a group that does not work."""
    who = f"Rank {report['rank']} (machine {report['machine']}, {report['host']})"
    for rank, found in sorted(report.get("doors", {}).items(), key=lambda item: int(item[0])):
        if "error" in found:
            yield Finding(
                True,
                f"{who} does not reach rank {rank} at {found['at']}: {found['error']}.",
                "Let the machines talk to each other at all ports above 1024 (firewall, security group); or choose the network that "
                "connects them: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each machine.",
            )
    if "stuck" in report:
        yield Finding(
            True,
            f"{who} was stuck in {report['stuck']}.",
            "If others were not, look at what they were doing; else at the network between the machines: NCCL_DEBUG=INFO, "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL and TORCH_CPP_LOG_LEVEL=INFO say more.",
        )
    elif "error" in report:
        advice = "The error says what it needs; that of the rank which failed first counts."
        yield Finding(True, f"{who} failed in {report['step']}: {report['error']}", advice)
    group = report.get("group", {})
    if group.get("sum") != group.get("expected"):
        advice = "The devices or their connections compute wrong: test them with the tools of their vendor."
        yield Finding(
            True, f"{who} got {group['sum']} as the sum over all ranks, which is {group['expected']}.", advice
        )


def _of_machines(reports: list[Report]) -> Iterator[Finding]:
    """Differences between machines, names that do not resolve, and low limits."""
    found = _machines(reports)
    for what, advice in (("versions", "Install the same on all machines."), ("variables", "Set it alike, or nowhere.")):
        for name in sorted({name for report in found.values() for name in report[what]}):
            values = {machine: report[what].get(name, "not set") for machine, report in found.items()}
            if len(set(values.values())) > 1:
                told = ", ".join(f"{value} on machine {machine}" for machine, value in values.items())
                yield Finding(what == "versions", f"{name} differs between the machines: {told}.", advice)
    for machine, report in found.items():
        host, addresses, memory, files = (
            report[key] for key in ("host", "host resolves to", "shared memory", "open files")
        )
        if not addresses:
            own = next((each for each in report["addresses"] if not ip_address(each).is_loopback), "its address")
            text = f"The name of machine {machine}, {host}, does not resolve to an address."
            yield Finding(False, text, f"Add it to /etc/hosts there: {own} {host}.")
        elif not report["interface"] and len(found) > 1 and all(map(_is_loopback, addresses)):
            yield Finding(
                True,
                f"The name of machine {machine}, {host}, resolves to {', '.join(addresses)}, where no other machine reaches it, and gloo "
                f"takes its address from that name.",
                "Set GLOO_SOCKET_IFNAME there to the interface that reaches the others; `accel launch` does so by itself.",
            )
        if memory is not None and memory < SHARED_MEMORY:
            yield Finding(
                False,
                f"Machine {machine} ({host}) has {memory / 2**20:.0f} MiB of shared memory free (/dev/shm); workers of loaders pass "
                f"batches through it.",
                "Give the container more: docker run --shm-size 8g, or --ipc host.",
            )
        if files is not None and files < OPEN_FILES:
            text = f"A process of machine {machine} ({host}) may open {files} files."
            yield Finding(False, text, f"Allow more: ulimit -n {16 * OPEN_FILES}.")


def _of_devices(reports: list[Report]) -> Iterator[Finding]:
    """Devices that do not reach each other, or are not alike."""
    for report in reports:
        peers, where = report.get("peers", {}), f"machine {report['machine']} ({report['host']})"
        bad = [(pair, "brought other values") for pair in peers.get("wrong", ())]
        bad += [(peers["stuck"], "did not end")] if "stuck" in peers else []
        is_off = report["variables"].get("NCCL_P2P_DISABLE", "0") != "0"
        for pair, what in bad:
            yield Finding(
                not is_off,
                f"The driver of {where} says that GPUs reach each other's memory, and a copy from {pair} {what}.",
                "Start with NCCL_P2P_DISABLE=1. A newer driver may mend it, or access control (ACS, IOMMU) switched off in the BIOS.",
            )
        if "error" in peers:
            advice = "If training works, it means nothing."
            yield Finding(False, f"Copies between the GPUs of {where} could not be tried: {peers['error']}", advice)
    models: dict[str, list[int]] = {}
    for report in _by_rank(reports):
        models.setdefault(report.get("group", {}).get("model", ""), []).append(report["rank"])
    models.pop("", None)
    if len(models) > 1:
        told = "; ".join(f"{model}: {listed(ranks)}" for model, ranks in models.items())
        yield Finding(
            False, f"Not all devices are alike: {told}.", "All ranks go as the slowest, with what fits the smallest."
        )
    drivers = {machine: report.get("driver", "") for machine, report in _machines(reports).items()}
    if len(set(filter(None, drivers.values()))) > 1:
        told = ", ".join(f"{version} on machine {machine}" for machine, version in drivers.items())
        yield Finding(False, f"The drivers differ: {told}.", "Install the same on all machines.")


def print_page(reports: list[Report], findings: list[Finding], size: int) -> None:
    """Prints machines, ranks and pairs as tables, then what was found and the verdict."""
    found = _machines(reports)
    rows = [
        (
            str(machine),
            report["host"],
            ", ".join(report["addresses"]) or "unknown",
            report["versions"]["torch"],
            "none" if report["shared memory"] is None else f"{report['shared memory'] / 2**30:.1f} GiB",
            "no limit" if report["open files"] is None else str(report["open files"]),
        )
        for machine, report in found.items()
    ]
    table(("machine", "host", "addresses", "torch", "free /dev/shm", "open files"), rows, "Machines")
    say()
    table(("rank", "machine", "process", "device", "met in"), [*map(_rank, _by_rank(reports))], "Ranks")
    for speed in _speeds(reports):
        say(speed)
    say()
    if size > 1:
        pairs = _pairs(reports)
        table(("from", "to", "answers in"), pairs[:_PAIRS], "Pairs (the slowest first)")
        if len(pairs) > _PAIRS:
            say(f"… and {len(pairs) - _PAIRS} faster ones; --json has all.")
        say()
    for finding in findings:
        style = BAD if finding.is_problem else DOUBTFUL
        say(f"{mark(style)} {finding.text}", style)
        say(f"    {finding.advice}")
    problems = sum(finding.is_problem for finding in findings)
    where = f"{_count(size, 'process', 'processes')} on {_count(len(found), 'machine', 'machines')}"
    remarks = f", {_count(len(findings), 'remark', 'remarks')} above" if findings else ""
    if problems:
        say(f"{mark(BAD)} {where}: {_count(problems, 'problem', 'problems')}, see above.", BAD)
    else:
        say(f"{mark(GOOD)} {where}: all met, and all reach each other{remarks}.", GOOD)


def as_json(reports: list[Report], findings: list[Finding]) -> dict[str, Any]:
    """The page as JSON: whether there is no problem, all findings, and all reports by rank."""
    return {
        "healthy": not any(finding.is_problem for finding in findings),
        "findings": [finding._asdict() for finding in findings],
        "ranks": _by_rank(reports),
    }


def _by_rank(reports: list[Report]) -> list[Report]:
    return sorted(reports, key=lambda report: int(report["rank"]))


def _machines(reports: list[Report]) -> dict[int, Report]:
    """The first report of each machine."""
    found: dict[int, Report] = {}
    for report in _by_rank(reports):
        found.setdefault(report["machine"], report)
    return found


def _rank(report: Report) -> tuple[str, ...]:
    group = report.get("group")
    device = group["device"] if group else "not reached"
    met = f"{report.get('gathered', 0) + group['met']:.2f} s" if group else "did not meet"
    return str(report["rank"]), str(report["machine"]), str(report["pid"]), device, met


def _speeds(reports: list[Report]) -> Iterator[str]:
    """How fast ranks send to each other, and GPUs of a machine copy."""
    sums = [report["group"]["GB/s"] for report in reports if "GB/s" in report.get("group", {})]
    if sums:
        yield f"In a sum of {LARGE >> 20} MiB over all ranks, each sends {min(sums):.2f} GB/s."
    for report in _by_rank(reports):
        if pairs := report.get("peers", {}).get("GB/s"):
            slowest, fastest = min(pairs, key=pairs.__getitem__), max(pairs.values())
            where = f"Between the GPUs of machine {report['machine']}"
            yield f"{where}, copies take {pairs[slowest]:.1f} (from {slowest}) to {fastest:.1f} GB/s."


def _pairs(reports: list[Report]) -> list[tuple[str, ...]]:
    """The rows on pairs, the slowest first."""
    rows = []
    for report in reports:
        for rank, found in report.get("doors", {}).items():
            answer = found["error"] if "error" in found else f"{found['ms']:.3f} ms"
            rows.append((-found.get("ms", float("inf")), report["rank"], int(rank), answer))
    return [(str(first), str(second), answer) for _, first, second, answer in sorted(rows)]


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"

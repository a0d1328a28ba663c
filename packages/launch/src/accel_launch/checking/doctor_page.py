"""The page that `accel doctor` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from accel_launch.checking.doctor_findings import Finding, Report, machines
from accel_launch.output import BAD, DOUBTFUL, GOOD, mark, say, table

_PAIRS = 64  # so many lines of pairs at most, the slowest


def print_page(reports: list[Report], findings: list[Finding], size: int) -> None:
    """Prints machines, ranks and pairs as tables, then what was found and the verdict."""
    table(("machine", "host", "addresses", "torch", "free /dev/shm", "open files"), _machines(reports), "Machines")
    say()
    table(("rank", "machine", "process", "device", "met in"), _ranks(reports), "Ranks")
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
    say(*_verdict(findings, size, len(machines(reports))))


def as_json(reports: list[Report], findings: list[Finding]) -> dict[str, Any]:
    """The page as JSON has it: whether there is no problem, all findings, and all reports by rank."""
    return {
        "healthy": not any(finding.is_problem for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "ranks": sorted(reports, key=lambda report: int(report["rank"])),
    }


def _verdict(findings: list[Finding], size: int, machines: int) -> tuple[str, str]:
    problems = sum(finding.is_problem for finding in findings)
    where = f"{_count(size, 'process', 'processes')} on {_count(machines, 'machine', 'machines')}"
    if problems:
        return f"{mark(BAD)} {where}: {_count(problems, 'problem', 'problems')}, see above.", BAD
    doubts = f", {_count(len(findings), 'remark', 'remarks')} above" if findings else ""
    return f"{mark(GOOD)} {where}: all met, and all reach each other{doubts}.", GOOD


def _machines(reports: list[Report]) -> list[tuple[str, ...]]:
    return [
        (
            str(machine),
            report["host"],
            ", ".join(report["addresses"]) or "unknown",
            report["versions"]["torch"],
            "none" if report["shared memory"] is None else f"{report['shared memory'] / 2**30:.1f} GiB",
            "no limit" if report["open files"] is None else str(report["open files"]),
        )
        for machine, report in machines(reports).items()
    ]


def _ranks(reports: list[Report]) -> list[tuple[str, ...]]:
    return [
        (
            str(report["rank"]),
            str(report["machine"]),
            str(report["pid"]),
            report["group"]["device"] if "group" in report else "not reached",
            f"{report.get('gathered', 0) + report['group']['met']:.2f} s" if "group" in report else "did not meet",
        )
        for report in sorted(reports, key=lambda report: int(report["rank"]))
    ]


def _pairs(reports: list[Report]) -> list[tuple[str, ...]]:
    rows = []
    for report in reports:
        for rank, found in report.get("doors", {}).items():
            answer = found["error"] if "error" in found else f"{found['ms']:.3f} ms"
            rows.append((found.get("ms", float("inf")), (str(report["rank"]), str(rank), answer)))
    return [row for _, row in sorted(rows, key=lambda each: (-each[0], int(each[1][0]), int(each[1][1])))]


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"

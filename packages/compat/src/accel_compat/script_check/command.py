"""`accel check-script`, which `accel doctor script.py` calls."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_compat.script_check import loop, naming, plain_loop, running
from accel_compat.script_check.script import Script

if TYPE_CHECKING:
    from accel_compat.script_check.finding import Finding

_RULES = (*loop.RULES, *naming.RULES, *plain_loop.RULES, *running.RULES)


def main(arguments: Sequence[str] | None = None) -> int:
    """List the lines of a script written for Accelerate that accel treats differently.

    Scripts are read, and never run. The exit status is 0 if no line is listed, and 1 otherwise.
    """
    given = parser().parse_args(arguments)
    found = {path: check(path.read_text(encoding="utf-8"), str(path)) for path in given.scripts}
    if given.json:
        rows = [{"file": str(path), **each._asdict()} for path, findings in found.items() for each in findings]
        print(json.dumps(rows, indent=2))  # noqa: T201
    else:
        for path, findings in found.items():
            print(text(path, findings))  # noqa: T201
    return int(any(found.values()))


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(prog="accel check-script", description=main.__doc__)
    page.add_argument("scripts", nargs="+", type=Path, metavar="SCRIPT", help="script to read")
    page.add_argument("--json", action="store_true", help="print the lines as JSON")
    return page


def check(source: str, name: str = "script") -> list[Finding]:
    """The differences that a script has to expect, by line. Raises `ValueError` if it is no Python."""
    try:
        script = Script(source, name)
    except SyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno}: this is no Python: {error.msg}.") from error
    found = {finding for rule in _RULES for finding in rule(script)}
    return sorted(found, key=lambda each: (each.line, each.rule, each.before))


def text(path: Path, findings: Sequence[Finding]) -> str:
    """The findings of a script for a reader."""
    if not findings:
        return f"{path}: nothing that is known to be different."
    lines = []
    for each in findings:
        mark = "  [through accel-compat too]" if each.compat else ""
        lines += [
            f"{path}:{each.line}: {each.rule}{mark}",
            f"    in Accelerate: {each.before}",
            f"    here: {each.here}",
        ]
    through = sum(each.compat for each in findings)
    lines.append(f"\n{path}: {len(findings)} differences with accel_core, {through} of them through accel-compat too.")
    return "\n".join(lines)

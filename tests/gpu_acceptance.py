"""What a person with accelerators runs first: every promise that only hardware can show, in ten minutes.

    nox -s gpu                                                  installs what it needs, and runs it
    python tests/gpu_acceptance.py                              on one device, and on all of this machine
    python tests/gpu_acceptance.py --only numerics,watch        some topics, or single checks
    python tests/gpu_acceptance.py --list                       what there is, and what each needs
    accel launch tests/gpu_acceptance.py --folder shared        on the processes that were launched, also of several machines

One line a check: PASS, FAIL or SKIP, with the reason. Each check runs in processes of its own, with a limit of time, so that a
hang or a crash is a line like another. The exit status is the number of those that failed, 100 at most. `--report` writes all
that is needed to find out why, as JSON: send it. Without an accelerator, the CPU is what is checked.

The checks stand in `acceptance/checks`, a module a topic. Another one is a function there with the decorator `check`.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from acceptance.registry import TOPICS, chosen
from acceptance.session import Session


def main() -> int:
    options = arguments()
    for topic in [*TOPICS, *options.checks]:
        import_module(f"acceptance.checks.{topic}" if topic in TOPICS else topic)
    checks = chosen(options.only, options.leave_out)
    if options.list:
        print(*(f"{each.name:<34}{each.needs:<34}{each.summary}" for each in checks), sep="\n")
        return 0
    session = Session(options)
    session.run(checks)
    if options.report:
        session.write(options.report)
    return session.conclude()


def arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", type=names, default=[], help=f"topics ({', '.join(TOPICS)}), or checks, by commas")
    parser.add_argument("--leave-out", type=names, default=[], help="topics or checks that do not run")
    parser.add_argument("--list", action="store_true", help="show the checks, and run none")
    parser.add_argument(
        "--report", type=Path, help="write results, versions, devices and outputs to this file, as JSON"
    )
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU, although there are accelerators")
    parser.add_argument("--devices", type=int, help="how many take part; not given: all, and on a CPU two processes")
    parser.add_argument("--quick", action="store_true", help="leave out what takes long, for a run in CI")
    parser.add_argument("--folder", type=Path, help="for checkpoints; several machines share it. Not given: a new one")
    parser.add_argument("--patience", type=float, default=1.0, help="a factor for every limit of time")
    parser.add_argument(
        "--import", dest="imports", type=names, default=[], help="modules that every process imports first"
    )
    parser.add_argument("--checks", type=names, default=[], help="modules with further checks")
    found = parser.parse_args()
    if found.list and found.report:
        parser.error("--list runs nothing that could be reported: leave one of the two out")
    return found


if __name__ == "__main__":
    sys.exit(main())

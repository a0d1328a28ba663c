"""`accel deepspeed build`: DeepSpeed's C++ operators, compiled before a run needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from accel_core.api.launcher import format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the C++ operators of DeepSpeed before a run."""
    given = parser().parse_args(arguments)
    return _list(given.names) if given.list else _build(given.names)


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(prog="accel deepspeed", description=main.__doc__)
    commands = page.add_subparsers(dest="command", metavar="build", required=True)
    text = "compile the operators named, or those that the optimizer Adam needs on this machine"
    command = commands.add_parser("build", help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument(
        "names", nargs="*", metavar="OPERATOR", help="operator to compile, such as cpu_adam; --list shows all"
    )
    command.add_argument(
        "--list", action="store_true", help="show which are compiled, missing, or impossible here; compile nothing"
    )
    return page


def _list(names: Sequence[str]) -> int:
    from accel_deepspeed.operators import OperatorError, examine, operator_names

    try:
        rows = [examine(name) for name in names or operator_names()]
    except OperatorError as error:
        _report(error)
        return 1
    print(format_table(("operator", "state", "where, or why not"), rows))  # noqa: T201
    return 0


def _build(names: Sequence[str]) -> int:
    from accel_deepspeed.operators import OperatorError, build, default_names, examine

    try:
        wanted = names or [name for name in default_names() if examine(name).state != "impossible"]
        for name in wanted:
            found = examine(name)
            if found.state == "missing":
                _report(f"{name}: compiling, a minute or several …")
            seconds = build(name, _report)
            print(f"{name}: {found.state if found.state == 'built' else 'compiled'} in {seconds:.0f} s, {found.place}")  # noqa: T201
    except OperatorError as error:
        _report(error)
        return 1
    return 0


def _report(text: object) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201

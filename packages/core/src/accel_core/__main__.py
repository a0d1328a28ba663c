"""`python -m accel_core`: installed `plugins` and their state; contents of a `checkpoint`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from accel_core.base.errors import PluginError
from accel_core.plugins.explain import format_table, offer_state
from accel_core.plugins.offers import find_default, list_offers


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status, 2 for a command that does not exist."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["checkpoint"]:
        try:
            command = find_default("accel.commands", "checkpoint", "python -m accel_core checkpoint").load()
        except PluginError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 2
        return int(command(given[1:]))
    parser = argparse.ArgumentParser(prog="python -m accel_core", description="Looks at installations and checkpoints.")
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("plugins", help="list every installed plugin, importing each to see whether it works")
    commands.add_parser("checkpoint", help="show or verify what save_state() wrote")
    if parser.parse_args(given).command is None:
        parser.print_help()
        return 0
    offers = list_offers()
    rows = [(one.group, one.name, one.distribution, one.version, offer_state(one, offers, load=True)) for one in offers]
    print(format_table(("group", "name", "distribution", "version", "state"), rows))  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m accel_core plugins`: what is installed, and whether it works."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from accel_core.plugins.explain import state, table
from accel_core.plugins.offers import list_offers


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. A command that does not exist exits with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m accel_core", description="Looks into an installation of accel-core."
    )
    commands = parser.add_subparsers(dest="command", title="commands")
    help_text = "list every installed plugin, importing each to see whether it works"
    commands.add_parser("plugins", help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    if parser.parse_args(arguments).command is None:
        parser.print_help()
    else:
        print(_plugins())  # noqa: T201
    return 0


def _plugins() -> str:
    offers = list_offers()
    rows = [
        (offer.group, offer.name, offer.distribution, offer.version, state(offer, offers, load=True))
        for offer in offers
    ]
    return table(("group", "name", "distribution", "version", "state"), rows)


if __name__ == "__main__":
    raise SystemExit(main())

"""`accel plugins`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from accel_core.api.launcher import list_offers, offer_state
from accel_launch.output import say, table

_COLUMNS = ("group", "name", "distribution", "version", "state")


def main(arguments: Sequence[str] | None = None) -> int:
    """List the installed strategies, precisions, loaders, trackers and commands; test that each loads."""
    given = parser().parse_args(arguments)
    offers = list_offers()
    rows = [
        (offer.group, offer.name, offer.distribution, offer.version, offer_state(offer, offers, load=True))
        for offer in offers
    ]
    if given.json:
        say(json.dumps([dict(zip(_COLUMNS, row, strict=True)) for row in rows], indent=2))
    else:
        table(_COLUMNS, rows)
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(prog="accel plugins", description=main.__doc__)
    page.add_argument("--json", action="store_true", help="print JSON")
    return page

"""`accel env`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from accel_launch.output import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Print versions, devices and settings for a bug report, without apparent secrets."""
    from accel_launch.checking.environment import describe, text

    given = parser().parse_args(arguments)
    found = describe(given.config_file)
    say(json.dumps(found, indent=2, ensure_ascii=False) if given.json else f"```text\n{text(found)}\n```")
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(prog="accel env", description=main.__doc__)
    page.add_argument("--json", action="store_true", help="print JSON")
    page.add_argument("--config-file", metavar="FILE", help="show this configuration file instead of your own")
    return page

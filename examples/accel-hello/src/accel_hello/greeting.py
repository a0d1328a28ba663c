"""A command in ten lines: `accel hello`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Greet whoever is named."""
    parser = argparse.ArgumentParser(prog="accel hello", description=main.__doc__)
    parser.add_argument("name", nargs="?", default="world", help="who is greeted")
    print(f"Hello, {parser.parse_args(arguments).name}!")
    return 0

"""`accel checkpoint import`: finds an importer, prints the content, writes a neutral checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_checkpoint.importing.foreign import write_foreign
from accel_checkpoint.importing.opened import GROUP, find_foreign
from accel_core import CheckpointError
from accel_core.api.launcher import KNOWN_PROVIDERS, how_to_install, list_offers

if TYPE_CHECKING:
    from accel_checkpoint.importing.foreign import ForeignCheckpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a checkpoint of another library into one that loads here, under any strategy."""
    parser = argparse.ArgumentParser(prog="accel checkpoint import", description=main.__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder that the other library wrote")
    parser.add_argument("target", type=Path, nargs="?", metavar="TARGET", help="folder for the converted checkpoint")
    parser.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="optimizer of the run, such as torch.optim.AdamW, if SOURCE does not name it",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what is in SOURCE, and write nothing")
    given = parser.parse_args(arguments)
    if given.target is None and not given.dry_run:
        parser.error("TARGET is missing; or --dry-run, to see what is in SOURCE")
    try:
        foreign = open_foreign(given.source, given.optimizer)
        print(_description(given.source, foreign), flush=True)  # noqa: T201
        if not given.dry_run:
            write_foreign(foreign, given.target, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
            print(f"\nwritten: {given.target}", flush=True)  # noqa: T201
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


def open_foreign(folder: Path, optimizer: str | None = None) -> ForeignCheckpoint:
    """The checkpoint in a folder, by the first importer that knows it; else CheckpointError."""
    if not folder.is_dir():
        raise FileNotFoundError(2, "a checkpoint was to be imported, but there is no such folder", str(folder))
    found = find_foreign(folder, optimizer)
    if found is not None:
        return found
    installed = [offer.name for offer in list_offers(GROUP)]
    missing = [
        f"For {name}: {how_to_install(by)}." for name, by in KNOWN_PROVIDERS[GROUP].items() if name not in installed
    ]
    tried = f"Installed: {', '.join(installed) or 'none'}. {' '.join(missing)}"
    raise CheckpointError(f"A checkpoint was to be imported from {folder}, but no importer knows it. {tried}")


def _description(source: Path, foreign: ForeignCheckpoint) -> str:
    facts = {"checkpoint": str(source), "written by": foreign.origin, **foreign.facts}
    width = max(map(len, facts)) + 2
    lines = [f"{name:<{width}}{value}" for name, value in facts.items()]
    absent = f"{'not in it':<{width}}{', '.join(foreign.absent)}: load_state() leaves them as they are"
    return "\n".join([*lines, absent])

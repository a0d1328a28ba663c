"""`accel merge-weights`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from accel_launch.output import GOOD, console, is_plain, say


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the weights of a checkpoint as safetensors files, which any library loads."""
    from accel_core import export_weights

    given = parser().parse_args(arguments)
    with _progress() as report:
        options = {"model": given.model, "overwrite": given.force, "report": report}
        written = export_weights(given.checkpoint, given.output, given.max_shard_size, **options)
    tied = f", {written.aliases} more names of tied ones" if written.aliases else ""
    parts = f" and {len(written.files) - 1} parts" if len(written.files) > 1 else ""
    say(f"{written.tensors} tensors, {written.nbytes} bytes{tied}: {given.output / written.files[0]}{parts}", GOOD)
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(prog="accel merge-weights", description=main.__doc__)
    about = "a saved checkpoint, of any strategy and number of processes; or weights in one file or in parts"
    page.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=about)
    page.add_argument("output", type=Path, metavar="OUTPUT", help="folder for model.safetensors")
    about = "largest size of one file: 5GB is 5 * 10^9 bytes, 5GiB 5 * 2^30 (default: 5GB)"
    page.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help=about)
    page.add_argument("--model", type=int, metavar="N", help="number of the model, if the checkpoint has several")
    page.add_argument("--force", action="store_true", help="replace weights that are in OUTPUT already")
    return page


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A block with a callback that shows progress as a bar on a terminal; None elsewhere."""
    if is_plain(sys.stderr):
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task("")
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)

"""The output of commands: colour and tables that fit a terminal; whole plain lines elsewhere.

Plain means: no terminal, or `NO_COLOR` is set, or `TERM=dumb`. Then there is no control code, and
nothing is cut or wrapped, so that output in files and pipes can be read by programs. Text is never
taken for markup: brackets are brackets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

GOOD, BAD, DOUBTFUL = "green", "bold red", "yellow"
"""Styles for `say`."""

_MARKS = {GOOD: ("✓", "ok"), BAD: ("✗", "FAILED"), DOUBTFUL: ("!", "!")}


def is_plain(stream: TextIO | None = None) -> bool:
    """Whether what goes to `stream` (None: standard output) has to be plain text."""
    stream = stream or sys.stdout
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not stream.isatty()


def console(stream: TextIO | None = None) -> Console:
    """rich's console on `stream` (None: standard output), for what `say` and `table` cannot do."""
    from rich.console import Console

    stream = stream or sys.stdout
    plain = is_plain(stream)
    return Console(
        file=stream,
        force_terminal=False if plain else None,
        no_color=plain,
        width=10**6 if plain else None,
        soft_wrap=True,
        highlight=False,
        markup=False,
        emoji=False,
    )


def say(text: str = "", style: str = "") -> None:
    """Prints text to standard output at once; `style` (`GOOD`, or rich's) counts on terminals."""
    _print(text, style, sys.stdout)


def warn(text: str, style: str = "") -> None:
    """Prints text to standard error, at once: errors, notes, progress. `style` is as for `say`."""
    _print(text, style, sys.stderr)


def mark(style: str) -> str:
    """✓, ✗ or !, for `GOOD`, `BAD`, `DOUBTFUL`; words where standard output cannot show them."""
    symbol, word = _MARKS[style]
    try:
        symbol.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return word
    return symbol


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table to standard output; one row that says "none" if there is none."""
    from accel_core.api.launcher import format_table

    if is_plain():
        say("\n".join([*([title] if title else []), format_table(header, rows)]))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    for name in header:
        drawn.add_column(name, overflow="fold")
    for row in rows or [("none", *[""] * (len(header) - 1))]:
        drawn.add_row(*map(Text, row))
    console().print(drawn, soft_wrap=False)


def _print(text: str, style: str, stream: TextIO) -> None:
    if not style or is_plain(stream):
        encoding = stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        print(text, file=stream, flush=True)
        return
    console(stream).print(text, style=style)
    stream.flush()

"""Rows of the result: what was wanted beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch import Round

OURS = "accel"
PEERS = ("accelerate", "fabric")
COLUMNS = ("row", "gate", "figure", "interval", "raw", *PEERS, "verdict")


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Args:
        name: what is measured.
        figure: which of the figures of a round.
        limit: the gate: our median may not be above it. None: there is none, the row is for information.
        against: whether a figure stands alone (""), or as difference ("-") or ratio ("/") to that of `base` in its round.
        base: the raw loop that is compared with.
        unit: of the figure; "x" for a ratio.
        scale: from seconds to the unit.
        ours: the name under which ours was measured.
    """

    name: str
    figure: str
    limit: float | None = None
    against: str = ""
    base: str = "plain"
    unit: str = "µs"
    scale: float = 1e6
    ours: str = OURS

    def values(self, library: str, rounds: Sequence[Round]) -> list[float]:
        """The figure of each round that has this library; a peer need not have it."""
        compare: dict[str, Callable[[float, float], float]] = {
            "": lambda own, _: own * self.scale,
            "-": lambda own, base: (own - base) * self.scale,
            "/": lambda own, base: own / base,
        }
        have = [each for each in rounds if library in each and (not self.against or self.base in each)]
        if library != self.ours:
            have = [each for each in have if self.figure in each[library]]
        return [
            compare[self.against](each[library][self.figure], each[self.base][self.figure] if self.against else 0)
            for each in have
        ]

    def row(self, rounds: Sequence[Round]) -> dict[str, str]:
        """The cells, by column."""
        values = self.values(self.ours, rounds)
        if not values:  # what is compared with is not installed
            return dict.fromkeys(COLUMNS, "–") | {"row": self.name}
        low, middle, high = quartiles(values)
        more = self._more_digits(middle)
        bases = [measured[self.base] for measured in rounds if self.base in measured]
        raw = [figures[self.figure] * self.scale for figures in bases] if self.against else []
        cells = {
            "row": self.name,
            "gate": "" if self.limit is None else f"≤ {self._text(self.limit)}",
            "figure": self._text(middle, more),
            "interval": " … ".join(self._interval(low, high, more)),
            "raw": f"{four_digits(statistics.median(raw))} {self.unit}" if raw else "",
            "verdict": "" if self.limit is None else ("met" if middle <= self.limit else "MISSED"),
        }
        for peer in PEERS:
            figures = self.values(peer, rounds)
            cells[peer] = self._text(statistics.median(figures)) if figures else "–"
        return cells

    def _more_digits(self, middle: float) -> int:
        """How many digits more than usual show on which side of the gate the median is."""
        if self.limit is None or middle == self.limit:
            return 0
        return next((more for more in range(12) if self._text(middle, more) != self._text(self.limit, more)), 0)

    def _interval(self, low: float, high: float, more: int) -> tuple[str, str]:
        """Both ends, of which only one has the unit."""
        return self._text(low, more).removesuffix(f" {self.unit}"), self._text(high, more).removeprefix("× ")

    def _text(self, value: float, more: int = 0) -> str:
        if self.against == "/":
            return f"× {value:.{3 + more}f}"
        if self.against == "-":
            return f"{value:+.{1 + more}f} {self.unit}"
        return f"{value:.{3 + more}g} {self.unit}".strip()


def four_digits(value: float) -> str:
    """Four digits of a number, and all of those before its point; no power of ten."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The interquartile interval with the median in its middle."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """A table that is readable in a terminal and as Markdown."""
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in COLUMNS}
    lines = [{column: column for column in COLUMNS}, {column: "-" * widths[column] for column in COLUMNS}, *rows]
    return "\n".join(
        "| " + " | ".join(line[column].ljust(widths[column]) for column in COLUMNS) + " |" for line in lines
    )

"""Tables and histograms to record: as they are given, and as trackers get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_BINS = 512


@dataclass(frozen=True)
class Table:
    """A table as a tracker gets it.

    Args:
        columns: their names, all different texts.
        rows: each with one cell per column: None, a boolean, a number or a text.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Bins:
    """A histogram as a tracker gets it: `counts[i]` finite values lie in [edges[i], edges[i + 1]), the last bin included its end.

    Args:
        counts: one per bin, at least one bin.
        edges: one more than counts, increasing.
        total, total_of_squares: sums over the finite values.
        nonfinite: how many values were inf or nan, and are in no bin.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    total: float
    total_of_squares: float
    nonfinite: int = 0


class Histogram:
    """A histogram of values, to be logged like a number: `accelerator.log({"weights": Histogram(layer.weight)})`.

    Nothing is computed where it is logged: the values are copied, on their device if they are on
    one, and counted by the tracker's thread. The bins are of equal width, from the least finite
    value to the greatest; if all are the same they reach half of it to both sides. What cannot be
    counted is left out, which is said once: complex numbers, texts, and a tensor that lies on
    several ranks.

    Args:
        values: a tensor, an array, or a sequence of numbers or of tensors, of any shapes and with
            any number of elements, also none.
        bins: how many, from 1 to 512, which is the most that services hold.

    Raises:
        ValueError: for bins that are no such number.
    """

    def __init__(self, values: Any, bins: int = 64) -> None:
        if type(bins) is not int or not 1 <= bins <= MOST_BINS:
            raise ValueError(f"Histogram(bins={bins!r}): expected an integer from 1 to {MOST_BINS}.")
        self.values = values
        self.bins = bins

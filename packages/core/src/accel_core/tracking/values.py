"""Tables and histograms to record: as they are given, and as trackers get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_BINS = 512


@dataclass(frozen=True)
class Table:
    """A table for a tracker: unique column names; cells of None, booleans, numbers or texts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Bins:
    """A tracker's histogram: `counts[i]` finite values in [edges[i], edges[i + 1]), last end too.

    `total` and `total_of_squares` are sums over the finite values; `nonfinite` ones are in no bin.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    total: float
    total_of_squares: float
    nonfinite: int = 0


class Histogram:
    """A histogram to log as a number: `accelerator.log({"weights": Histogram(layer.weight)})`.

    `values` is a tensor, an array, or a sequence of numbers or of tensors, of any shapes; they are
    copied on their device, and counted by the tracker's thread, in 1 to 512 `bins` of equal width.
    Complex numbers, texts, and a tensor that lies on several ranks are left out, with a warning.
    """

    def __init__(self, values: Any, bins: int = 64) -> None:
        if type(bins) is not int or not 1 <= bins <= MOST_BINS:
            raise ValueError(f"Histogram(bins={bins!r}): expected an integer from 1 to {MOST_BINS}.")
        self.values = values
        self.bins = bins

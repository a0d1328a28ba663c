"""What trackers are handed: values by joined names, tables, and the counts of histograms."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_core.tracking.countable import as_tensor
from accel_core.tracking.device_copy import Mark, copied_to_host, fetched, mark
from accel_core.tracking.scalars import (
    PLAIN,
    UnreadableError,
    clean,
    describe,
    plain_value,
    readable_here,
    said,
    written,
)

__all__ = ["Bins", "Flat", "Histogram", "Table", "as_table", "describe", "flatten"]

_PART = 1 << 20  # how many values are counted at a time: in float64 these are 8 MiB
_LARGEST = 1.7976931348623157e308  # of a float


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


MOST_BINS = 512


class Histogram:
    """How often which values occur, to be logged like a number: `accelerator.log({"weights": Histogram(layer.weight)})`.

    Nothing is computed where it is logged: the values are copied, on their device if they are on one, and counted by the
    tracker's thread. The bins are of equal width, from the least finite value to the greatest; if all are the same they reach half of it
    to both sides. What cannot be counted is left out, which is said once: complex numbers, texts, and a tensor that lies on several ranks.

    Args:
        values: a tensor, an array, or a sequence of numbers or of tensors, of any shapes and with any number of elements, also none.
        bins: how many, from 1 to 512, which is the most that services hold.

    Raises:
        ValueError: for bins that are no such number.
    """

    def __init__(self, values: Any, bins: int = 64) -> None:
        if type(bins) is not int or not 1 <= bins <= MOST_BINS:
            raise ValueError(f"Histogram(bins={bins!r}): expected an integer from 1 to {MOST_BINS}.")
        self.bins = bins
        self._values: Any = values
        self._mark: Mark = None
        self._result: Bins | None = None
        self._lock: threading.Lock | None = None  # of a copy

    def copied(self) -> Histogram:
        """The same of the values as they are now, whatever becomes of them. Waits for no device.

        Raises:
            TypeError: if they cannot be counted.
        """
        copy = Histogram(as_tensor(self._values), self.bins)
        copy._mark = None if copy._values.is_cpu else mark(copy._values.device)
        copy._lock = threading.Lock()
        return copy

    @property
    def elements(self) -> int:
        """How many there are, in a copy that is not counted yet."""
        return self._values.numel() if isinstance(self._values, torch.Tensor) else 0

    def resolve(self) -> Bins:
        """Counts, in a copy once. Waits for the device, so it is for another thread than the training's."""
        if self._lock is None:
            return self.copied().resolve()
        with self._lock:
            if self._result is None:
                self._result = _counted(copied_to_host(self._values, self._mark), self.bins)
                self._values = self._mark = None
            return self._result


@dataclass(frozen=True)
class Flat:
    """Values by name. The names of nested dicts are joined by "/".

    Args:
        numbers_and_texts: int, float (also nan and inf), and text.
        histograms: yet to be counted.
        others: what is neither: None, lists, objects of a service's own, and `LeftOut` for what was not taken.
    """

    numbers_and_texts: dict[str, int | float | str] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    others: dict[str, object] = field(default_factory=dict)


def flatten(tree: Mapping[str, Any]) -> Flat:
    """Nested values, as `Snapshot.resolve` returns them, by joined names. True and False become 1 and 0.

    Raises:
        ValueError: if two values get one name.
    """
    flat = Flat()
    names: set[str] = set()
    for name, value in _leaves(tree, ""):
        if name in names:
            raise ValueError(
                f"Two values to be logged have the name {name!r}, because the names of nested dicts are joined by '/': one stands in a "
                f"dict, and one has the '/' in its own name. Rename one of them."
            )
        names.add(name)
        if type(value) in PLAIN:
            flat.numbers_and_texts[name] = int(value) if type(value) is bool else value
        elif isinstance(value, Histogram):
            flat.histograms[name] = value
        else:
            flat.others[name] = value
    return flat


def _leaves(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if type(value) is dict:
            yield from _leaves(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


def as_table(columns: Iterable[Any] | None = None, data: Iterable[Any] | None = None, dataframe: Any = None) -> Table:
    """A table of plain values, taken now. Waits for a device where cells are tensors on it, once for all of one dtype.

    Args:
        columns: names of the columns.
        data: rows with one cell per column. None, booleans, numbers and texts are kept, tensors of one element become numbers,
            and all else the text that `str` makes of it.
        dataframe: instead of both, one of pandas or polars, or what else has `columns`, and `itertuples` or `rows`.

    Raises:
        TypeError: if the columns or the rows are none, or the dataframe is not, or a cell cannot be read.
        ValueError: if neither or both were given, for two columns of one name, and for a row with too many or too few cells.
    """
    given = (columns is not None, data is not None, dataframe is not None)
    if given not in {(True, True, False), (False, False, True)}:
        names = [name for name, is_given in zip(("columns", "data", "dataframe"), given, strict=True) if is_given]
        raise ValueError(
            f"log_table() was given {' and '.join(names) or 'no values'}. Give columns=['a', 'b'] and data=[[1, 2], [3, 4]], or "
            f"dataframe=... alone."
        )
    if dataframe is not None:
        columns, data = _content(dataframe)
    assert columns is not None
    assert data is not None
    names = [str(plain_value(each)) for each in _listed(columns, "columns", "a list of names, such as ['a', 'b']")]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"log_table() was given two columns of the name {', '.join(map(repr, twice))}. Rename one.")
    rows = [
        _listed(row, f"row {index} of data", "a list with one cell per column")
        for index, row in enumerate(_listed(data, "data", "a list of rows, such as [[1, 2], [3, 4]]"))
    ]
    for index, row in enumerate(rows):
        if len(row) != len(names):
            raise ValueError(
                f"log_table() was given {len(names)} columns ({', '.join(names)}), but row {index} of data has {len(row)} cells. Give "
                f"each row one cell per column, None where there is nothing."
            )
    cells = (tuple(map(_cell, row, names, itertools.repeat(index))) for index, row in enumerate(fetched(rows)))
    return Table(tuple(names), tuple(cells))


def _content(dataframe: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    columns = getattr(dataframe, "columns", None)
    if columns is not None and hasattr(dataframe, "itertuples"):
        return columns, dataframe.itertuples(index=False, name=None)
    if columns is not None and callable(getattr(dataframe, "rows", None)):
        return columns, dataframe.rows()
    raise TypeError(
        f"log_table(dataframe=...) was given {describe(dataframe)}: expected a dataframe of pandas or polars. Give columns=... and "
        f"data=... instead."
    )


def _listed(value: Any, what: str, expected: str) -> list[Any]:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        try:
            return readable_here(value).tolist()
        except UnreadableError as error:
            raise TypeError(f"log_table() was given as {what} {error}.") from None
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"log_table() was given {describe(value)} as {what}: expected {expected}.")
    return list(value)


def _cell(value: Any, column: str, row: int) -> Any:
    if value is None:
        return None
    try:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = readable_here(value).item()
        try:
            found = plain_value(value)
        except OverflowError:  # of a number that no float can hold
            found = written(value) if isinstance(value, int) else str(value)
        return found if type(found) in PLAIN else clean(str(found))
    except UnreadableError as error:
        raise TypeError(f"log_table() was given in row {row} under {column!r} {error}.") from None
    except Exception as error:
        raise TypeError(
            f"log_table() was given {describe(value)} in row {row} under {column!r}, which cannot be read: {said(error)}."
        ) from error


def _counted(values: torch.Tensor, bins: int) -> Bins:
    flat = values.reshape(-1)
    parts: Callable[[], Iterator[torch.Tensor]] = lambda: map(_finite, flat.split(_PART))  # noqa: E731
    low, high, total, squares, count = math.inf, -math.inf, 0.0, 0.0, 0
    for part in parts():
        if part.numel():
            low, high = min(low, part.min().item()), max(high, part.max().item())
            total += part.sum().item()
            squares += part.square().sum().item()
            count += part.numel()
    edges = _edges(low, high, bins) if count else _edges(0.0, 1.0, bins)
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device="cpu")
    counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
    for part in parts():
        counts += torch.bincount(torch.bucketize(part, inner, right=True), minlength=bins)
    return Bins(tuple(counts.tolist()), edges, total, squares, flat.numel() - count)


def _finite(part: torch.Tensor) -> torch.Tensor:
    exact = part.to(torch.float64)
    return exact[exact.isfinite()]


def _edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    """Equally far apart from `low` to `high`, or further where floats are too coarse for that."""
    margin = 0.0 if low < high else (max(abs(low), abs(high)) / 2 or 0.5)
    while True:
        first, last = max(low - margin, -_LARGEST), min(high + margin, _LARGEST)
        shares = [index / bins for index in range(1, bins)]
        edges = (first, *(first * (1 - share) + last * share for share in shares), last)
        if all(left < right for left, right in itertools.pairwise(edges)):
            return edges
        margin = max(2 * margin, bins * math.ulp(max(abs(low), abs(high))))

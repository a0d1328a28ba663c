"""Tables of plain values, out of columns and rows or of a dataframe."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_core import Table
from accel_trackers.recording.device_copy import fetched
from accel_trackers.recording.scalars import (
    PLAIN,
    UnreadableError,
    clean,
    describe,
    plain_value,
    readable_here,
    said,
    written,
)


def as_table(columns: Iterable[Any] | None = None, data: Iterable[Any] | None = None, dataframe: Any = None) -> Table:
    """A table of plain values, taken now. Waits for a device where cells are tensors on it, once for all of one dtype.

    Args:
        columns: names of the columns.
        data: rows with one cell per column. None, booleans, numbers and texts are kept, tensors of
            one element become numbers, and all else the text that `str` makes of it.
        dataframe: instead of both, one of pandas or polars, or what else has `columns`, and
            `itertuples` or `rows`.

    Raises:
        TypeError: if the columns or the rows are none, or the dataframe is not, or a cell cannot be
            read.
        ValueError: if neither or both were given, for two columns of one name, and for a row with
            too many or too few cells.
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

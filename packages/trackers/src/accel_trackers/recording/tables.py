"""Tables of plain values, out of columns and rows or of a dataframe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_core import Table
from accel_trackers.recording.values import PLAIN, clean, describe, local, plain_value, said


def as_table(columns: Iterable[Any] | None = None, data: Iterable[Any] | None = None, dataframe: Any = None) -> Table:
    """A table of plain values, of columns and data, or of a dataframe. Waits for tensors' devices.

    None, booleans, numbers and texts are kept; tensors of one element become numbers, and all else
    texts by `str`. A dataframe is one of pandas or polars, or another with `columns`, and
    `itertuples` or `rows`. TypeError or ValueError for no table, with the row and the column.
    """
    if dataframe is not None and columns is None and data is None:
        if not hasattr(dataframe, "columns") or not (hasattr(dataframe, "itertuples") or hasattr(dataframe, "rows")):
            raise TypeError(
                f"log_table(dataframe=...) was given {describe(dataframe)}: expected a dataframe of pandas or polars. Give columns=... "
                f"and data=... instead."
            )
        columns = dataframe.columns
        pandas = hasattr(dataframe, "itertuples")
        data = dataframe.itertuples(index=False, name=None) if pandas else dataframe.rows()
    elif dataframe is not None or columns is None or data is None:
        raise ValueError("log_table() takes columns=['a', 'b'] and data=[[1, 2], [3, 4]], or dataframe=... alone.")
    names = [str(plain_value(each)) for each in _listed(columns, "columns", "a list of names, such as ['a', 'b']")]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"log_table() was given two columns of the name {', '.join(map(repr, twice))}. Rename one.")
    rows = []
    for index, row in enumerate(_listed(data, "data", "a list of rows, such as [[1, 2], [3, 4]]")):
        cells = _listed(row, f"row {index} of data", "a list with one cell per column")
        if len(cells) != len(names):
            raise ValueError(
                f"log_table() was given {len(names)} columns ({', '.join(names)}), but row {index} of data has {len(cells)} cells. Give "
                f"each row one cell per column, None where there is nothing."
            )
        rows.append(tuple(_cell(cell, name, index) for cell, name in zip(cells, names, strict=True)))
    return Table(tuple(names), tuple(rows))


def _listed(value: Any, what: str, expected: str) -> list[Any]:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return local(value).tolist()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"log_table() was given {describe(value)} as {what}: expected {expected}.")
    return list(value)


def _cell(value: Any, column: str, row: int) -> Any:
    if value is None:
        return None
    try:
        is_number = isinstance(value, torch.Tensor) and value.numel() == 1
        found = plain_value(local(value).item() if is_number else value)
        return found if type(found) in PLAIN else clean(str(found))
    except Exception as error:
        asked = f"log_table() was given {describe(value)} in row {row} under {column!r}"
        raise TypeError(f"{asked}, which cannot be read: {said(error)}.") from error

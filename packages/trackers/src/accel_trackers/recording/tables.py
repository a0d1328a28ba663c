"""Tables of plain values, out of columns and rows or of a dataframe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_core import Table
from accel_trackers.recording.values import PLAIN, clean, local, plain_value


def as_table(columns: Iterable[Any] | None = None, data: Iterable[Any] | None = None, dataframe: Any = None) -> Table:
    """A table of plain values, of columns and data, or of a dataframe. Waits for tensors' devices.

    None, booleans, numbers and texts are kept; tensors of one element become numbers, and all else
    texts by `str`. A dataframe is one of pandas or polars, or another with `columns`, and
    `itertuples` or `rows`. ValueError for columns of one name, and for a row of another length.
    """
    if dataframe is not None and columns is None and data is None:
        columns = dataframe.columns
        pandas = hasattr(dataframe, "itertuples")
        data = dataframe.itertuples(index=False, name=None) if pandas else dataframe.rows()
    elif dataframe is not None or columns is None or data is None:
        raise ValueError("log_table() takes columns=['a', 'b'] and data=[[1, 2], [3, 4]], or dataframe=... alone.")
    names = tuple(clean(str(plain_value(each))) for each in columns)
    if len(set(names)) < len(names):
        raise ValueError(f"log_table() was given two columns of one name: {', '.join(names)}. Rename one.")
    rows = []
    for index, row in enumerate(local(data).tolist() if isinstance(data, torch.Tensor) else data):
        cells = () if isinstance(row, (str, Mapping)) else tuple(row)
        if len(cells) != len(names):
            raise ValueError(f"log_table(): row {index} of data is {row!r:.100}, expected a cell for each of {names}.")
        rows.append(cells)
    numbers = _numbers(rows)
    return Table(names, tuple(tuple(_cell(numbers.get(id(cell), cell)) for cell in row) for row in rows))


def _numbers(rows: Iterable[tuple[Any, ...]]) -> dict[int, Any]:
    """The values of tensors of one element, by `id`: one copy from a device per dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for cell in (cell for row in rows for cell in row if isinstance(cell, torch.Tensor) and cell.numel() == 1):
        groups.setdefault((cell.device, cell.dtype), []).append(cell)
    copied = {key: torch.stack([local(each).detach().reshape(()) for each in group]) for key, group in groups.items()}
    return {
        id(each): value
        for key, group in groups.items()
        for each, value in zip(group, copied[key].tolist(), strict=True)
    }


def _cell(value: Any) -> Any:
    found = plain_value(value)
    return found if found is None or type(found) in PLAIN else clean(str(found))

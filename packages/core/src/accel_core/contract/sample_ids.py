"""Sample ids of a batch: made on demand from what its loader noted when it yielded it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from accel_core.contract.loader_progress import Rows

Drawn = Any
"""An index batch, one index where there are no batches, or `Positions`; None: not known."""


class Positions(NamedTuple):
    """Consecutive samples of an epoch, numbered from 0 over all ranks: what a batch of a stream consists of."""

    first: int
    size: int


@dataclass(frozen=True)
class SampleIds:
    """The samples of one batch on one rank, row by row.

    Args:
        ids: what the sampler drew for each row; or the numbers of the samples in the epoch, None
            for rows that fill up.
        kind: "index": indices (or keys) of the dataset; "position": numbers in the order of a
            stream.
        real: how many of them are real, the first ones; those behind only fill up the batch.
    """

    ids: tuple[Any, ...]
    kind: Literal["index", "position"]
    real: int

    def describe(self, rows: Iterable[int] | None = None, most: int = 16) -> str:
        """`index 3, 8, 1 (fills up)`: the samples in these rows, or in all of them; no more than `most` are spelled out."""
        chosen = list(range(len(self.ids)) if rows is None else rows)
        shown = [self._named(row) for row in chosen[:most]]
        more = f" and {len(chosen) - most} more" if len(chosen) > most else ""
        return f"{self.kind} {', '.join(shown)}{more}"

    def _named(self, row: int) -> str:
        known = "" if self.ids[row] is None else f"{self.ids[row]} "
        return known.strip() if row < self.real else f"{known}(fills up)"


def sample_ids(drawn: Drawn, rows: Rows | None) -> SampleIds | None:
    """The ids of the samples in a batch, from what the loader noted and its rows; None if the loader does not know them."""
    if drawn is None:
        return None
    if isinstance(drawn, Positions):
        missing = 0 if rows is None or rows.rows is None else rows.rows - drawn.size
        ids: tuple[Any, ...] = (*range(drawn.first, drawn.first + drawn.size), *[None] * missing)
    elif isinstance(drawn, torch.Tensor):
        ids = tuple(drawn.flatten().tolist())
    else:
        ids = tuple(drawn) if isinstance(drawn, Sequence) and not isinstance(drawn, (str, bytes)) else (drawn,)
    kind: Literal["index", "position"] = "position" if isinstance(drawn, Positions) else "index"
    return SampleIds(ids, kind, len(ids) if rows is None else min(rows.real, len(ids)))

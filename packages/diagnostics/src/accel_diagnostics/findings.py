"""What is told of a value that is not finite: where it is, and the samples of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel_core.api.loader import Positions

if TYPE_CHECKING:
    from accel_core import Rows
    from accel_core.api.diagnostics import Drawn

Kind = Literal["input", "parameter", "output", "loss", "gradient", "not reproduced"]
"""The place of the first value that is not finite; see `Finding.kind`."""


@dataclass(frozen=True)
class Finding:
    """The place where a rank found the first value that is not finite.

    Args:
        kind: where it is; "not reproduced": repeating the micro-batches gave no such value.
        module: its path in the user's model; None where no module is to blame.
        name: which input, parameter, output or gradient.
        step, micro_batch: how many steps were taken in this process; which one of the window.
        nan, inf, values: how many of the values are NaN, how many infinite, and how many there are.
        low, high: the extreme finite values among the module's inputs; None: there is none.
        samples: of the micro-batch, one entry per loader in iteration; None: not known.
        rows: the rows with such values, where the batch has rows.
    """

    rank: int
    kind: Kind
    module: str | None
    module_class: str
    name: str
    step: int
    micro_batch: int
    nan: int = 0
    inf: int = 0
    values: int = 0
    low: float | None = None
    high: float | None = None
    samples: tuple[SampleIds | None, ...] = ()
    rows: tuple[int, ...] | None = None
    note: str = ""

    @property
    def offending(self) -> tuple[Any, ...] | None:
        """The ids of the samples in `rows`; None if they are not known."""
        if self.rows is None or len(self.samples) != 1 or self.samples[0] is None:
            return None
        return tuple(self.samples[0].ids[row] for row in self.rows)

    @property
    def order(self) -> tuple[bool, int, int]:
        """The sort key of findings: reproduced ones first, then micro-batch, then rank."""
        return self.kind == "not reproduced", self.micro_batch, self.rank


@dataclass(frozen=True)
class SampleIds:
    """Indices, keys or stream positions of a rank's samples; after `real` ones, filling."""

    ids: tuple[Any, ...]
    kind: Literal["index", "position"]
    real: int

    def describe(self, rows: Iterable[int] | None = None, most: int = 16) -> str:
        """`index 3, 8, 1 (fills up)`: the samples in these rows (None: all), at most `most`."""
        chosen = list(range(len(self.ids)) if rows is None else rows)
        known = ["" if self.ids[row] is None else f"{self.ids[row]} " for row in chosen[:most]]
        shown = [text if row < self.real else f"{text}(fills up)" for row, text in zip(chosen, known, strict=False)]
        more = f" and {len(chosen) - most} more" if len(chosen) > most else ""
        return f"{self.kind} {', '.join(map(str.strip, shown))}{more}"


def sample_ids(drawn: Drawn, rows: Rows | None) -> SampleIds | None:
    """The ids of a batch's samples, from the loader's notes and rows; None if not known."""
    if drawn is None:
        return None
    if isinstance(drawn, Positions):
        missing = 0 if rows is None or rows.rows is None else rows.rows - drawn.size
        ids: tuple[Any, ...] = (*range(drawn.first, drawn.first + drawn.size), *[None] * missing)
    elif isinstance(drawn, torch.Tensor):
        ids = tuple(drawn.flatten().tolist())
    else:
        ids = tuple(drawn) if isinstance(drawn, Sequence) and not isinstance(drawn, (str, bytes)) else (drawn,)
    real = len(ids) if rows is None else min(rows.real, len(ids))
    return SampleIds(ids, "position" if isinstance(drawn, Positions) else "index", real)

"""Findings about losses and gradients that are not finite, and the error that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from accel_core.contract.loader_progress import SampleIds

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


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite; raised on all ranks, with each one's finding or None."""

    def __init__(self, findings: Sequence[Finding | None], message: str) -> None:
        super().__init__(message)
        self.findings = tuple(findings)

    @property
    def first(self) -> Finding:
        """The earliest finding, of those reproduced if any: by micro-batch, then by rank."""
        return min((finding for finding in self.findings if finding is not None), key=lambda each: each.order)

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[tuple[Finding | None, ...], str]]:
        return type(self), (self.findings, str(self))

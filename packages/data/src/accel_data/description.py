"""The description of a loader: its batch size in every sense, and the steps of an epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoaderDescription:
    """The batch sizes of a loader, and its steps; None where a number varies or is not known.

    Args:
        per_rank_batch: rows of a batch on one rank.
        global_batch: rows of a batch over all ranks.
        effective_batch: rows of an accumulation window over all ranks: of one optimizer step.
        accumulation: batches of a window.
        ranks: how many ranks read different parts.
        samples: samples in the dataset.
        batches: of an epoch, on the rank that has most of them.
        steps: optimizer steps of an epoch: its windows, of which the last may be short.
        reading: how the ranks come to their parts.
        ending: how an incomplete last global batch is handled.
    """

    per_rank_batch: int | None
    global_batch: int | None
    effective_batch: int | None
    accumulation: int
    ranks: int
    samples: int | None
    batches: int | None
    steps: int | None
    reading: str
    ending: str

    def __str__(self) -> str:
        def shown(number: int | None, unknown: str) -> str:
            return unknown if number is None else str(number)

        return (
            f"batch per rank {shown(self.per_rank_batch, 'varies')}, global batch {shown(self.global_batch, 'varies')} on "
            f"{self.ranks} data-parallel rank(s), effective batch {shown(self.effective_batch, 'varies')} with "
            f"accumulation {self.accumulation}; {shown(self.batches, 'unknown')} batches per rank and "
            f"{shown(self.steps, 'unknown')} steps per epoch over {shown(self.samples, 'an unknown number of')} "
            f"samples; {self.ending}; {self.reading}"
        )

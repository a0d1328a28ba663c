"""What an estimate says, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StrategyEstimate:
    """Bytes of the rank that holds most, for one strategy in one dtype.

    Args:
        strategy: its name.
        dtype: the name of the precision.
        ranks: how many processes train.
        weights: parameters, buffers and masters that a rank keeps.
        gradients: at most, after the backward. None: it is not trained.
        optimizer: state, from step to step. None: it is not trained.
        communication: buffers and gathered parameters, at most. None: it is not trained.
        activations: of forward and backward, at most; temporary results are in. None: unknown.
        moments: all that is alive in "forward", "backward" and "step" at most. Without activations
            these are lower bounds.
        notes: what a reader should know of this row.
    """

    strategy: str
    dtype: str
    ranks: int
    weights: int
    gradients: int | None
    optimizer: int | None
    communication: int | None
    activations: int | None
    moments: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes at most. It is less than the sum of the parts, which are not there all at once."""
        return max(self.moments.values())

    @property
    def complete(self) -> bool:
        """Whether activations are in; otherwise `peak` is a lower bound."""
        return self.activations is not None

    def fits(self, memory: int) -> bool | None:
        """Whether it fits into so many bytes on each rank. None: that depends on what is unknown."""
        if self.peak > memory:
            return False
        return True if self.complete else None


@dataclass(frozen=True)
class MemoryEstimate:
    """An estimate for a model: see `estimate_memory`.

    Args:
        model: how it is called.
        parameters: how many elements its parameters have.
        trained: how many of them get gradients.
        optimizer: its name.
        device: "accelerator" or "cpu".
        memory: bytes of each of them, for `fits`.
        rows: one for each dtype and strategy.
        assumptions: the formulas, by what they are for.
    """

    model: str
    parameters: int
    trained: int
    optimizer: str
    device: str
    memory: int
    rows: tuple[StrategyEstimate, ...]
    assumptions: Mapping[str, str] = field(repr=False, default_factory=dict)

    def row(self, strategy: str, dtype: str) -> StrategyEstimate:
        """The row of a strategy in a dtype. Raises `KeyError` if it was not asked for."""
        for each in self.rows:
            if (each.strategy, each.dtype) == (strategy, dtype):
                return each
        raise KeyError((strategy, dtype))

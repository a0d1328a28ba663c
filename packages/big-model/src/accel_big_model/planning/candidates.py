"""Ways to train a model, simplest first, and what each takes on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_big_model.estimate.result import StrategyEstimate

Estimator = Callable[[str, bool], "StrategyEstimate"]
"""`estimator(strategy, activation_checkpointing)`."""


@dataclass(frozen=True)
class Candidate:
    """A way to train: what it is called, the options of a run, and what it takes.

    Args:
        name: as it is shown.
        options: keys and values of a configuration file, but for devices and precision.
        estimate: bytes on the device of the rank that holds most.
        host: bytes of main memory that each rank takes instead of the device's.
    """

    name: str
    options: Mapping[str, Any]
    estimate: StrategyEstimate = field(repr=False)
    host: int = 0


def list_candidates(estimator: Estimator, devices: int, has_units: bool) -> Iterator[Candidate]:
    """Candidates, simplest first; each is estimated when it is asked for."""
    simplest = "single" if devices == 1 else "ddp"
    yield Candidate(simplest, {"strategy": simplest}, estimator(simplest, False))
    if devices > 1:
        yield Candidate("fsdp", {"strategy": "fsdp"}, estimator("fsdp", False))
    if not has_units:
        return
    again = estimator("fsdp", True)
    options: dict[str, Any] = {"activation_checkpointing": True}
    yield Candidate("fsdp, activation checkpointing", {"strategy": "fsdp", "fsdp": options}, again)
    offloaded = offload(again)
    host = again.weights + (again.gradients or 0) + (again.optimizer or 0)
    options = {**options, "cpu_offload": True}
    yield Candidate(
        "fsdp, activation checkpointing, CPU offload", {"strategy": "fsdp", "fsdp": options}, offloaded, host
    )


def offload(row: StrategyEstimate) -> StrategyEstimate:
    """A row of "fsdp" whose parts, gradients and state are in main memory: arithmetic, not measured."""
    kept = row.weights + (row.optimizer or 0)
    moments = {name: max(size - kept, 0) for name, size in row.moments.items() if name != "step"}
    return replace(row, weights=0, gradients=0, optimizer=0, moments={**moments, "step": 0})

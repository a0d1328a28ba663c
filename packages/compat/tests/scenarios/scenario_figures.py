"""How near two figures have to be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from scenario_launches import on_processor_of_the_peer

EQUAL = 1e-6
"""Of the larger one, for figures of the same operations in the same order."""
SHARDED = 1e-5
"""Gradients are summed over shards, not over the buckets of a whole model: another order of the same float32 numbers, step after step."""
SHARDED_BF16 = 5e-3
"""FSDP computes and reduces in bfloat16, of which one unit of the last place is 0.4 %; DDP reduces gradients of float32 weights."""

CLIPPED_BF16 = 2e-3
"""Norms of gradients may differ in the last place, for they are summed in another order. Another factor of clipping rounds weights
to the other neighbour now and then. Without clipping the figures are equal."""


OTHER_PROCESSOR, OTHER_PROCESSOR_BF16 = 1e-4, 0.1
"""The peer's figures are of one processor. Others sum in another order, and round products of bfloat16 at other places."""


def tolerance(scenario: str) -> float:
    if not on_processor_of_the_peer():
        return OTHER_PROCESSOR_BF16 if scenario.endswith("bf16") else OTHER_PROCESSOR
    if "fsdp" not in scenario:
        clipped = scenario.startswith("zero2") and scenario.endswith("bf16") and "unclipped" not in scenario
        return CLIPPED_BF16 if clipped else EQUAL
    return SHARDED_BF16 if scenario.endswith("bf16") else SHARDED


def differences(scenario: str, found: dict[str, Any], peer: dict[str, Any]) -> Iterator[str]:
    """A line for every figure that is not the peer's."""
    allowed = tolerance(scenario)
    for name, theirs in peer.items():
        ours = found.get(name)
        if not near(ours, theirs, allowed):
            yield f"{name} is {ours}, in the peer {theirs} (of which {allowed:g} may differ)"


def near(ours: Any, theirs: Any, allowed: float) -> bool:
    if isinstance(theirs, list):
        return (
            isinstance(ours, list) and len(ours) == len(theirs) and all(map(near, ours, theirs, [allowed] * len(ours)))
        )
    if isinstance(theirs, float):
        return isinstance(ours, float) and math.isclose(ours, theirs, rel_tol=allowed, abs_tol=allowed)
    return bool(ours == theirs)

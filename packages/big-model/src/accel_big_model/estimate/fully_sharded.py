"""Strategy "fsdp": parameters, gradients and state are shared out by rows, units are gathered in turn.

As torch's `fully_shard` does it: the result of an all-gather is copied into the parameters, and is
freed when the next unit has been copied; the next unit is gathered ahead; what is reduced is a copy
of a unit's gradients, which is freed when the next unit is reduced; the root stays gathered from
the beginning of the forward to the end of the backward. When the copy is reduced, the gradients are
freed, and each rank's part is written: on accelerators that is less than before. On CPUs gloo copies
what it reduces once more, so that it is more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from accel_big_model.estimate.shapes import ROOT, ParameterShape, bytes_of

if TYPE_CHECKING:
    from accel_big_model.estimate.result import StrategyEstimate
    from accel_big_model.estimate.strategies import Facts


def fully_sharded(facts: Facts, strategy: str = "fsdp") -> StrategyEstimate:
    """The estimate of "fsdp"; of one of several ranks that share a layer, if `facts` are of that."""
    shape, dtype = facts.shape, facts.dtype
    cost = facts.cost([each.shard(facts.ranks) for each in shape.trained], dtype)
    weights = bytes_of(shape.parameters, dtype, facts.ranks) + shape.buffers
    gradients = bytes_of(shape.trained, dtype, facts.ranks)
    kept = weights + cost.state
    units = _Units(facts)
    backward = list(_backward(facts, units))
    return facts.row(
        strategy,
        weights=weights,
        gradients=gradients,
        optimizer=cost.state,
        communication=max([units.forward, *(buffers for _, buffers in backward)]),
        timeline=facts.gathered,
        moments={
            "forward": kept + units.forward + facts.gathered.forward,
            "backward": kept + max((alive for alive, _ in backward), default=0),
            "step": kept + gradients + cost.temporary,
        },
    )


def tensor_and_data(facts: Facts) -> StrategyEstimate:
    """Matrices divided among `facts.tensor` ranks, the rest of the ranks as under "fsdp"."""
    part = replace(facts, shape=facts.shape.cut(facts.tensor), ranks=facts.ranks // facts.tensor)
    note = f"{facts.tensor} tensor-parallel × {part.ranks} sharding ranks; an upper bound"
    return replace(fully_sharded(part, "tensor"), ranks=facts.ranks, notes=(note, "activations are an upper bound"))


class _Units:
    """The bytes of units when they are gathered, and as they are reduced."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.members: dict[str, list[ParameterShape]] = {}
        for each in facts.shape.parameters:
            self.members.setdefault(each.unit, []).append(each)
        self.of = {each.name: each.unit for each in facts.shape.parameters}

    def gathered(self, unit: str) -> int:
        return self.in_gathered_dtype(self.members.get(unit, ()))

    def in_gathered_dtype(self, parameters: Sequence[ParameterShape]) -> int:
        own, compute = self._facts.dtype, self._facts.precision.compute
        return sum(each.numel * (compute if compute and each.autocast else own).itemsize for each in parameters)

    def reduced(self, unit: str) -> int:
        return bytes_of(self.trained(unit), self._facts.dtype)

    def sharded(self, unit: str) -> int:
        return bytes_of(self.trained(unit), self._facts.dtype, self._facts.ranks)

    def trained(self, unit: str) -> list[ParameterShape]:
        return [each for each in self.members.get(unit, ()) if each.trained]

    @property
    def forward(self) -> int:
        """The root; and of two units in turn, both results and the second one's parameters."""
        root = self.gathered(ROOT)
        largest = max((self.gathered(unit) for unit in self.members if unit != ROOT), default=0)
        return max(2 * root, root + 3 * largest)


def _backward(facts: Facts, units: _Units) -> Iterator[tuple[int, int]]:
    """At each part of the backward: bytes beside what is kept; those of buffers and parameters."""
    order = list(dict.fromkeys(units.of[each.parameter] for each in facts.gathered.backward))
    waiting = {unit: {each.name for each in units.trained(unit)} for unit in units.members}
    named = {each.name: each for each in facts.shape.trained}
    whole, sharded, previous = dict[str, int](), 0, 0
    for segment in facts.gathered.backward:
        unit = units.of[segment.parameter]
        root = units.gathered(ROOT) if waiting.get(ROOT) else 0
        ahead = _ahead(order, unit, units)
        buffers = root + ahead + previous + (units.gathered(unit) if unit != ROOT else 0)
        yield buffers + sharded + sum(whole.values()) + segment.peak, buffers
        waiting[unit].discard(segment.parameter)
        whole[unit] = whole.get(unit, 0) + units.in_gathered_dtype([named[segment.parameter]])
        if not waiting[unit]:
            previous = units.reduced(unit)
            buffers = (root if unit != ROOT else 0) + ahead + previous
            yield buffers + sharded + sum(whole.values()) + segment.left, buffers
            del whole[unit]
            sharded += units.sharded(unit)
            of_gloo = 0 if facts.accelerator else units.reduced(unit)
            yield buffers + of_gloo + sharded + sum(whole.values()) + segment.left, buffers + of_gloo


def _ahead(order: Sequence[str], unit: str, units: _Units) -> int:
    """Bytes of the unit that is gathered ahead."""
    later = [each for each in order[order.index(unit) + 1 :] if each != ROOT]
    return units.gathered(later[0]) if later else 0

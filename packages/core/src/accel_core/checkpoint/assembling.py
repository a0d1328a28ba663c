"""Whole tensors out of what the ranks have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_core.checkpoint.agreement import exchange
from accel_core.checkpoint.boxes import Box, uncovered
from accel_core.checkpoint.layouts import Alias, Elementwise, Entry, Opaque, State
from accel_core.collectives import gather
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_core.world import World


class Weights(Mapping[str, Any]):
    """The state of a model, of which a value is only gathered when it is read.

    Unless they are replicated, reading a parameter is a collective: every rank reads the same names in the same order.

    Args:
        state: of the model.
        world: the processes.
        replicated: whether every rank has all of everything.
    """

    def __init__(self, state: State, world: World, *, replicated: bool) -> None:
        self._state = state
        self._world = world
        self._replicated = replicated

    def __getitem__(self, name: str) -> Any:
        entry = self._state[name]
        entry = self._state[entry.of] if isinstance(entry, Alias) else entry
        own = _own(entry)
        return own if own is not None and self._replicated else whole(name, entry, self._world)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def whole(name: str, entry: Entry, world: World) -> Any:
    """The value of an entry: live memory where every rank has all of it, else gathered on every rank.

    A collective for an `Elementwise` entry.

    Raises:
        CollectiveMismatchError: on every rank, if another one reads something else, or nothing.
    """
    assert not isinstance(entry, Alias), "the entry that it stands for is asked for"
    if isinstance(entry, Opaque):
        return entry.value
    if not isinstance(entry, Elementwise):
        return entry.data
    everyone = exchange(world, f"to read {name!r}", [piece.box for piece in entry.pieces])
    if all(Box.whole(entry.shape) in boxes for boxes in everyone):
        return _own(entry)
    return _gathered(entry, everyone, world)


def _own(entry: Entry) -> Any:
    """The value of an entry that this rank has all of; None if it has not."""
    if not isinstance(entry, Elementwise):
        return entry.value if isinstance(entry, Opaque) else getattr(entry, "data", None)
    return next((piece.data for piece in entry.pieces if piece.box == Box.whole(entry.shape)), None)


def _gathered(entry: Elementwise, everyone: Sequence[Sequence[Box]], world: World) -> torch.Tensor:
    gap = uncovered(entry.shape, {box for boxes in everyone for box in boxes})
    if gap is not None:
        raise CheckpointError(
            f"A tensor of the shape {list(entry.shape)} was to be put together, but of what the ranks have of it {gap}. Correct "
            f"the model_state of the strategy."
        )
    parts = [piece.data.detach().reshape(-1) for piece in entry.pieces]
    empty = torch.empty(0, dtype=entry.dtype, device=parts[0].device if parts else world.device)
    flat = gather(torch.cat([empty, *parts]), world)
    result = torch.empty(entry.shape, dtype=entry.dtype, device=flat.device)
    start = 0
    for box in (box for boxes in everyone for box in boxes):
        result[box.slices] = flat[start : start + box.numel].view(box.sizes)
        start += box.numel
    return result


def gathered(state: State, world: World, prefix: str = "") -> dict[str, Any]:
    """All of a state in the CPU memory of the main process, and nothing on the others. A collective.

    One tensor after another is put together, on every rank. Ties stay ties.

    Args:
        state: of a model.
        world: the processes.
        prefix: only what has a name that begins with it, under the rest of the name.
    """
    weights = Weights(state, world, replicated=False)
    found: dict[str, Any] = {}
    for name in weights:
        entry = state[name]
        kept = entry.of if isinstance(entry, Alias) else name
        if name.startswith(prefix):
            tied = isinstance(entry, Alias) and kept.removeprefix(prefix) in found
            value = found[kept.removeprefix(prefix)] if tied else _on_main(weights, name, world)
            found[name.removeprefix(prefix)] = value
    return found if world.is_main else {}


def _on_main(weights: Weights, name: str, world: World) -> Any:
    value = weights[name]
    if not world.is_main:
        return None
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value

"""Layouts of saved state on the ranks: declared by the code that made them, not guessed.

A *state* maps names to entries, presented by every rank that has them, and live: `data` is
the memory that training uses, or a view of it; checkpoints are written from it, and read into it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

WHOLE = "whole"
"""The part of an opaque entry that is not cut."""


@dataclass(frozen=True)
class Box:
    """A region of a global shape: `offsets`, `sizes`, a number per dim; `Box((), ())` if 0-d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements; 1 for the box of a 0-d tensor."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether it has no element."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes this region out of the whole tensor, as a view."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """The region that both have, in the same global shape; None if they share no element."""
        pairs = [*zip(self.slices, other.slices, strict=True)]
        starts = tuple(max(mine.start, theirs.start) for mine, theirs in pairs)
        stops = (min(mine.stop, theirs.stop) for mine, theirs in pairs)
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if min(sizes, default=1) > 0 else None

    def relative_to(self, outer: Box) -> Box:
        """This region, with offsets relative to `outer`, which contains it: slices of its data."""
        return Box(tuple(map(operator.sub, self.offsets, outer.offsets)), self.sizes)

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box, and an empty one within its bounds."""
        pairs = zip(self.slices, other.slices, strict=True)
        return all(mine.start <= theirs.start and theirs.stop <= mine.stop for mine, theirs in pairs)

    def __str__(self) -> str:
        """The box in the form of an index: `[0:4, 2:3]`."""
        return f"[{', '.join(f'{each.start}:{each.stop}' for each in self.slices)}]"


class Piece(NamedTuple):
    """A part of a tensor on a rank: `data` of shape `box.sizes`, any device, any strides."""

    box: Box
    data: torch.Tensor


@dataclass(frozen=True)
class Elementwise:
    """A tensor of which this rank has some boxes, or none.

    Args:
        shape, dtype: of the whole tensor.
        pieces: what is here. Over the ranks the boxes cover the tensor; a box may be on several
            ranks, boxes that are not equal do not overlap.
        versioned: whether changes in place raise `_version`; others are never copied lazily.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    versioned: bool = True

    @classmethod
    def whole(cls, data: torch.Tensor) -> Elementwise:
        """A tensor that this rank has all of."""
        shape = tuple(data.shape)
        return cls(shape, data.dtype, (Piece(Box.whole(shape), data),))


@dataclass(frozen=True)
class Replicated:
    """A tensor equal on all ranks that present it, or that counts on the lowest rank."""

    data: torch.Tensor


@dataclass(frozen=True)
class Partial:
    """A term: the ranks' mean of `data` counts. Exact only on as many ranks as saved it."""

    data: torch.Tensor


@dataclass(frozen=True)
class Opaque:
    """A value that is saved and loaded whole: whatever the codec takes, tensor subclasses included.

    Args:
        signature: what has to be equal for it to be loaded: class, shapes and dtypes, say.
        part: which part of the whole this rank has; ranks with the same word have the same.
        assign: puts a value that was loaded into the place of `value`.
    """

    value: Any
    signature: str
    part: str = WHOLE
    assign: Callable[[Any], None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Alias:
    """Another name for the entry `of`."""

    of: str


Entry = Elementwise | Replicated | Partial | Opaque | Alias
"""The state that a rank presents under one name."""

State = Mapping[str, Entry]
"""The entries of a model or an optimizer, by name."""

GradientState = Mapping[str, Sequence[Elementwise | Partial]]
"""By parameter, the terms of its gradient: what was sent is `Elementwise`, the rest `Partial`."""


def memory_of(entry: Elementwise | Replicated | Partial) -> list[torch.Tensor]:
    """The tensors of an entry that are on this rank, live."""
    return [piece.data for piece in entry.pieces] if isinstance(entry, Elementwise) else [entry.data]


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer on this rank; every tensor is live.

    Args:
        kind: the class of the optimizer: "module:QualName".
        groups: its `param_groups`, the same on all ranks, with "names" instead of "params"; of an
            optimizer that is captured whole, these alone.
        values: by the name of a parameter, the values of its state that hold no tensors.
        entries: "<parameter>/<key>" for tensors; "<parameter>" alone where its whole state is
            opaque: a dict of "state" by key, and "laid_out", the keys of those laid out like it.
        whole: its `state_dict()`, for an optimizer that defines that itself; None otherwise.
    """

    kind: str
    groups: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    whole: Any = None


class SavedEntry(NamedTuple):
    """An entry of a checkpoint: "elementwise", "replicated" or "opaque"; signatures are by part."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    signatures: Mapping[str, str]


class SavedOptimizer(Protocol):
    """An optimizer's state in a checkpoint: the first four as in `OptimizerState`, of all ranks.

    `described` gives every entry. `read` fills the tensors of an entry in place; for an `Opaque`,
    it returns the value of its part.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def groups(self) -> list[dict[str, Any]]: ...  # noqa: D102
    @property
    def values(self) -> dict[str, dict[str, Any]]: ...  # noqa: D102
    @property
    def whole(self) -> Any: ...  # noqa: D102
    def described(self) -> Mapping[str, SavedEntry]: ...  # noqa: D102
    def read(self, name: str, entry: Entry) -> Any: ...  # noqa: D102

"""Boxes: rectangular regions of a tensor's global shape, in which strategies say which part of a tensor a rank has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A region of a global shape: from `offsets`, `sizes` long, one number per dim. A 0-d tensor has one box, `Box((), ())`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

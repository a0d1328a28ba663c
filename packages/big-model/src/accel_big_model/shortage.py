"""What did not fit, where, and why: the words of the log, of warnings and of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from accel_big_model.sizes import get_max_layer_size
from accel_core.api.component import listed

if TYPE_CHECKING:
    import torch

    from accel_big_model.memory import Place

OFFLOADED = ("cpu", "disk")
"""The places that are no accelerators."""


class Room(NamedTuple):
    """The memory of one place, at one moment of planning."""

    place: Place
    limit: int
    used: int
    kept: int
    """Bytes for the largest layer that has no place yet: one that is offloaded computes here."""
    layer: str
    """The name of that layer."""

    @property
    def free(self) -> int:
        """Bytes that a module may take."""
        return self.limit - self.used - self.kept

    def refuses(self, name: str, size: int) -> str:
        """Says why a module did not fit."""
        kept = (
            f", {in_words(self.kept)} kept for {self.layer or 'a layer'}, the largest that waits" if self.kept else ""
        )
        return (
            f"{name} ({in_words(size)}) does not fit on {self.place!r}: {in_words(max(self.free, 0))} free, of "
            f"{in_words(self.limit)} with {in_words(self.used)} used{kept}"
        )


def in_words(size: int) -> str:
    """Bytes to read: "300 bytes", "1.50 GiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


def left_on_disk(placed: Mapping[str, Place], sizes: Mapping[str, int], refused: Sequence[str]) -> str | None:
    """The warning about what stays on disk, with the reasons for the first part; None: nothing does."""
    names = [name for name, place in placed.items() if place == "disk"]
    if not names:
        return None
    total = sum(sizes.get(name, 0) for name in names)
    reasons = "".join(f"\n  {reason}." for reason in refused if reason.startswith(f"{names[0]} ("))
    return (
        f"{listed(names)} ({in_words(total)}) will be read from disk for each call.{reasons}\n"
        f"Give max_memory= larger limits, or load the weights in a smaller dtype=."
    )


def check_layers(
    placed: Mapping[str, tuple[nn.Module | torch.Tensor, Place]],
    limits: Mapping[Place, int],
    used: Mapping[Place, int],
    sizes: Mapping[str, int],
    no_split: Sequence[str],
) -> None:
    """Raises `ValueError` if the largest offloaded layer has no room where it would compute."""
    main = next((place for _, place in placed.values() if place not in OFFLOADED), "cpu")
    offloaded = ("disk",) if main == "cpu" else OFFLOADED
    parts = [(name, part) for name, (part, place) in placed.items() if place in offloaded]
    largest, names = get_max_layer_size(parts, sizes, no_split)
    free = limits.get(main, 0) - used.get(main, 0)
    if largest <= free or main not in limits:  # nobody limited the memory where it would compute
        return
    layer = dict(_layers(parts)).get(names[0])
    kind = type(layer).__name__ if isinstance(layer, nn.Module) else "tensor"
    split = f", leave {kind!r} out of no_split_module_classes=" if kind in no_split else ""
    raise ValueError(
        f"The memory does not suffice for the largest layer: {names[0]} ({kind}) takes {in_words(largest)}, and {main!r}, where it would "
        f"compute, has {in_words(max(free, 0))} for it: a limit of {in_words(limits.get(main, 0))}, {in_words(used.get(main, 0))} "
        f"used. Give max_memory= larger limits{split}, or load the weights in a smaller dtype=."
    )


def _layers(parts: Sequence[tuple[str, nn.Module | torch.Tensor]]) -> list[tuple[str, nn.Module | torch.Tensor]]:
    found = list(parts)
    for name, part in parts:
        if isinstance(part, nn.Module):
            found += [(f"{name}.{inner}", module) for inner, module in part.named_modules() if inner]
    return found

"""Values by joined names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_trackers.recording.histograms import CopiedHistogram
from accel_trackers.recording.scalars import PLAIN


@dataclass(frozen=True)
class Flat:
    """Values by name. The names of nested dicts are joined by "/".

    Args:
        numbers_and_texts: int, float (also nan and inf), and text.
        histograms: yet to be counted.
        others: what is neither: None, lists, objects of a service's own, and `LeftOut` for what was
            not taken.
    """

    numbers_and_texts: dict[str, int | float | str] = field(default_factory=dict)
    histograms: dict[str, CopiedHistogram] = field(default_factory=dict)
    others: dict[str, object] = field(default_factory=dict)


def flatten(tree: Mapping[str, Any]) -> Flat:
    """Nested values, as `Snapshot.resolve` returns them, by joined names. True and False become 1 and 0.

    Raises:
        ValueError: if two values get one name.
    """
    flat = Flat()
    names: set[str] = set()
    for name, value in _leaves(tree, ""):
        if name in names:
            raise ValueError(
                f"Two values to be logged have the name {name!r}, because the names of nested dicts are joined by '/': one stands in a "
                f"dict, and one has the '/' in its own name. Rename one of them."
            )
        names.add(name)
        if type(value) in PLAIN:
            flat.numbers_and_texts[name] = int(value) if type(value) is bool else value
        elif isinstance(value, CopiedHistogram):
            flat.histograms[name] = value
        else:
            flat.others[name] = value
    return flat


def _leaves(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if type(value) is dict:
            yield from _leaves(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value

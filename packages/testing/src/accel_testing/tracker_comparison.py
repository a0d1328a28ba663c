"""Whether what was read back is what was recorded. See `accel_testing.tracker_suite`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_testing.suite import require

if TYPE_CHECKING:
    from accel_core import Bins, Table

Records = Iterable[tuple[int, Mapping[str, Any]]]
Same = Callable[[Any, Any], bool]


def compare(
    found: Mapping[str, Sequence[tuple[int, Any]]],
    expected: Records,
    same: Same,
    what: str,
    optional: Records = (),
) -> None:
    """Fails unless each name has these records, in any order, and maybe the optional ones.

    `found`: name → pairs of a step and what was read; names without an expected record are not
    looked at. `what` was done, for the message.
    """
    for name in {name: None for _, values in expected for name in values}:
        left = list(found.get(name, ()))
        lost = _take(left, [(step, values[name]) for step, values in expected if name in values], same)
        _take(left, [(step, values[name]) for step, values in optional if name in values], same)
        require(
            not (lost or left),
            f"{what}: of {name!r} {len(lost)} records did not come back, such as {lost[:3]!r:.300}, and {len(left)} came that "
            f"were not logged so, such as {left[:3]!r:.300}.",
        )


def _take(left: list[tuple[int, Any]], records: list[tuple[int, Any]], same: Same) -> list[tuple[int, Any]]:
    """Takes records away from what is left, and returns those that are not there."""
    lost = []
    for step, value in records:
        match = next((n for n, (at, found) in enumerate(left) if at == step and same(value, found)), None)
        if match is None:
            lost.append((step, value))
        else:
            del left[match]
    return lost


def in_precision(dtype: torch.dtype) -> Same:
    """Compares numbers as they are in this dtype; nan is nan."""

    def same(value: float, found: object) -> bool:
        if isinstance(found, bool) or not isinstance(found, int | float):
            return False
        pair = torch.tensor([value, found], dtype=dtype)
        return bool(pair[0] == pair[1] or pair.isnan().all())

    return same


def alike(value: Any, found: Any) -> bool:
    """Whether what was found is the value, or spells it."""
    if isinstance(found, str):
        return found in {str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)}
    return bool(found == value) and (found is None) is (value is None)


def same_image(image: torch.Tensor, found: torch.Tensor | tuple[int, int]) -> bool:
    """Compares pixels, or sizes where these alone were found."""
    if isinstance(found, torch.Tensor):
        return torch.equal(image, found)
    return tuple(image.shape[:2]) == tuple(found)


def same_table(table: Table, found: Table) -> bool:
    """Compares columns and cells."""
    rows = [*map(list, table.rows)], [*map(list, found.rows)]
    fits = tuple(table.columns) == tuple(found.columns) and [*map(len, rows[0])] == [*map(len, rows[1])]
    return fits and all(
        alike(cell, other) for row, its in zip(*rows, strict=True) for cell, other in zip(row, its, strict=True)
    )


def same_bins(number: Same) -> Same:
    """Compares counts, and edges as numbers."""

    def same(bins: Bins, found: Bins) -> bool:
        edges = len(bins.edges) == len(found.edges) and all(map(number, bins.edges, found.edges))
        return edges and list(bins.counts) == list(found.counts)

    return same


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested dicts, with their names joined by "/"."""
    return [
        leaf
        for name, value in config.items()
        for leaf in (flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else [(prefix + name, value)])
    ]

"""The tables of families that installed distributions offer, by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from accel_core import PluginError
from accel_megatron.conversion.table import GROUP, Family


def find_family(model_type: str) -> Family:
    """The table of a `model_type`. `PluginError` if nobody offers it, or several do, or it is none."""
    points = entry_points(group=GROUP)
    found = {(point.value, _offered_by(point)): point for point in points if point.name == model_type}
    if not found:
        known = ", ".join(sorted({point.name for point in points})) or "none"
        raise PluginError(
            f"A transformers model of the type {model_type!r} was to be converted, but no installed distribution says how: the "
            f"families known are {known}. Write its table, an accel_megatron.Family, and offer it under the entry point "
            f'[project.entry-points."{GROUP}"] {model_type} = "your_module:FAMILY" (docs/how-to/convert-megatron-weights.md).'
        )
    if len(found) > 1:
        raise PluginError(
            f"A transformers model of the type {model_type!r} was to be converted, and several distributions say how: "
            f"{', '.join(sorted(f'{value} of {by}' for value, by in found))}. Uninstall all but one."
        )
    (point,) = found.values()
    family = point.load()
    if not isinstance(family, Family) or family.model_type != model_type:
        shown = f"one of {family.model_type!r}" if isinstance(family, Family) else f"a {type(family).__name__}"
        raise PluginError(
            f"The entry point {model_type!r} of the group {GROUP!r}, {point.value} of {_offered_by(point)}, should be the "
            f"accel_megatron.Family of this type, but it is {shown}. Correct it there."
        )
    return family


def _offered_by(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"

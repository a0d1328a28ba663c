"""Record in a manifest of the run that saved a checkpoint: for people, and for messages.

Of the training, it says by `shards` whose random streams a rank takes. Trackers go on with the run
that it names.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_core import World
    from accel_core.api.checkpoint import Accumulation, Explanation, Prepared


IMPORTED = "imported"
"""The member of a record that was made of another library's checkpoint: {"origin", "facts", "absent"}."""


def absent_of(record: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of units that a checkpoint lacks because its library saves none."""
    return frozenset(record.get(IMPORTED, {}).get("absent", ()))


def position_of(record: Mapping[str, Any], unit: str) -> Mapping[str, int] | None:
    """The position of a loader in an imported checkpoint that says no more of it; or None."""
    kind, _, number = unit.partition(".")
    positions = record.get(IMPORTED, {}).get("positions", ())
    return positions[int(number)] if kind == "loader" and int(number) < len(positions) else None


def set_up(world: World, explanation: Explanation) -> dict[str, Any]:
    """The constants of a run, as JSON: world, versions, options and components with sources."""
    explained = explanation.as_dict()
    world_of = {"size": world.size, "source": world.source, "device": world.device.type}
    versions = {"accel-core": version("accel-core"), "torch": torch.__version__}
    return {**versions, "world": world_of, "components": explained["parts"], "options": explained["settings"]}


def progress_of(prepared: Prepared, accumulation: Accumulation, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of a run, as JSON: backwards, the window, and positions of loaders, by states."""
    window = {"open": accumulation.open, "position": accumulation.position, "steps": accumulation.steps}
    positions = [_position(loader, objects[f"loader.{number}"]) for number, loader in enumerate(prepared.loaders)]
    return {"backwards": accumulation.total_backwards, "window": window, "positions": positions}


def _position(loader: Any, state: Any) -> dict[str, int | None] | None:
    """Epoch and samples, of a loader that says them, and the rows of a batch over all ranks."""
    names = ("seed", "epoch", "samples")
    if not all(type(state.get(name)) is int for name in names):
        return None
    return {**{name: state[name] for name in names}, "global_batch": getattr(loader, "total_batch_size", None)}


def warn_of_absent(record: Mapping[str, Any], units: Sequence[str]) -> None:
    """Warns of the units of the run that a load leaves alone: an imported checkpoint lacks them."""
    absent = absent_of(record)
    left = [unit for unit in units if unit.partition(".")[0] in absent and position_of(record, unit) is None]
    left += ["the random streams"] if "random" in absent else []
    if left:
        warnings.warn(
            f"load_state() reads a checkpoint that was imported from {record[IMPORTED]['origin']}, and leaves as they are what is "
            f"not in it: {', '.join(left)}. Put loaders and schedules where they belong: "
            f"accelerator.skip_first_batches(), scheduler.step().",
            stacklevel=2,
        )


def warn_of_batches(record: Mapping[str, Any], prepared: Prepared, accumulation: Accumulation) -> None:
    """Warns if an optimizer's step will use more or fewer samples than in the saved run."""
    steps = record.get("window", {}).get("steps", 1)
    for number, (loader, saved) in enumerate(zip(prepared.loaders, record.get("positions", ()), strict=False)):
        own, other = getattr(loader, "total_batch_size", None), (saved or {}).get("global_batch")
        if own is None or other is None:
            continue
        here, there = own * accumulation.steps, other * steps
        if here != there:
            warnings.warn(
                f"load_state() goes on with {here} samples in a step of the optimizer, and the run that was saved had {there} "
                f"(loader {number}, over all ranks and micro-batches): what is left has {there / here:.3g} times as many steps, so a "
                f"schedule that counts steps does not end with the training. Keep the global batch, by split_batches=True, another "
                f"batch_size or gradient_accumulation_steps; or make the schedule for the steps that are left.",
                stacklevel=2,
            )
            return

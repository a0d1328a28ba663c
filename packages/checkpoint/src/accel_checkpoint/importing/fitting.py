"""How what another library saved is matched with a run: models, parameters, positions of loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_checkpoint.record import IMPORTED, position_of
from accel_checkpoint.run_state import MODEL
from accel_core.api.layouts import Alias, Entry

if TYPE_CHECKING:
    from torch.optim import Optimizer


def units_here(record: Mapping[str, Any], models: int, left: Sequence[int]) -> dict[int, str]:
    """The unit in a checkpoint of each model, but for those `left` to hooks.

    Where hooks of another library took models out, its files have the numbers of the others.
    """
    here = [number for number in range(models) if number not in left]
    apart = IMPORTED in record and record["models"] == len(here)
    return {number: f"{MODEL}.{place if apart else number}" for place, number in enumerate(here)}


def names_here(
    optimizer: Optimizer, names: Mapping[int, str], states: Mapping[int, Mapping[str, Entry]]
) -> dict[str, str]:
    """Names of parameters in a run by those in files: by their places in groups, or by tied names.

    `states` are the entries of the models, under the names of units.
    """
    found = {
        f"loose.{number}.{position}": names.get(id(parameter), f"loose.{number}.{position}")
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }
    for number, entries in states.items():
        for name, entry in entries.items():
            if isinstance(entry, Alias):
                found[f"{number}.{name.partition('/')[2]}"] = f"{number}.{entry.of.partition('/')[2]}"
    return found


def state_of_position(record: Mapping[str, Any], unit: str, loader: Any) -> dict[str, Any]:
    """By its unit, the state of a loader of which an imported checkpoint has but the position."""
    position = position_of(record, unit)
    state = loader.state_dict() if position is not None and hasattr(loader, "total_batch_size") else {}
    if position is None or "samples" not in state:
        return {}
    samples, epoch = position["batches"] * loader.total_batch_size, position.get("epoch", state["epoch"])
    return {unit: {**state, "epoch": epoch, "samples": samples}}


def other_schedule(unit: str, scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """A line if the saved state is one of another class of schedule, as its members show."""
    here, there = ({name for name in each if not name.startswith("_")} for each in (scheduler.state_dict(), saved))
    if here <= there or there <= here:  # versions of one class may differ in these
        return []
    return [
        f"{unit} is a {type(scheduler).__name__} with {sorted(here)}, and the checkpoint has a schedule with {sorted(there)}"
    ]

"""The generators of samplers and iterable datasets, whose states are part of a loader's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_data.loader_state import EpochProgress, Start

Synchronise = Callable[[list[torch.Generator]], None]
"""Makes random streams equal to those of rank 0; a collective."""


def given_generators(holder: Any) -> list[torch.Generator]:
    """The generators of a sampler, of a batch sampler and its sampler, or a dataset; each once."""
    found: list[torch.Generator] = []
    for each in (holder, getattr(holder, "sampler", None)):
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def between_epochs(given: list[torch.Generator], *, begun: bool = False) -> dict[str, Any]:
    """The extra entries of a loader's state between two epochs: the states of its generators.

    `begun`: nothing will be drawn from them before the order of the next epoch.
    """
    states = [generator.get_state() for generator in given]
    return {"generators": {"begun": begun, "states": states}} if given else {}


def check_between(given: list[torch.Generator], extras: Mapping[str, Any]) -> None:
    """Raises what `restore_between` would raise; generators of nobody take the states."""
    saved = extras.get("generators")
    if saved is not None:
        states = [torch.Generator().set_state(state) for state in saved["states"]]
        if not saved["begun"]:
            _check_number(states, given)


def restore_between(given: list[torch.Generator], extras: dict[str, Any]) -> dict[str, Any]:
    """Puts generators where they were between two epochs, and returns what else was in the state.

    What is drawn from there to the order is drawn as it was in the run that was saved. Those of a
    begun epoch are left for `settle`.
    """
    saved = extras.get("generators")
    if saved is None or saved["begun"]:
        return extras
    _set_states(given, saved)
    return {name: value for name, value in extras.items() if name != "generators"}


def settle(
    given: list[torch.Generator],
    start: Start,
    progress: EpochProgress,
    synchronise: Synchronise | None,
    beside: torch.Generator | None,
) -> None:
    """Brings generators where they are to be when an order is drawn, and notes where that is.

    They, and `beside`, are made equal on all ranks, unless `synchronise` is None.
    """
    if synchronise is not None:
        synchronise(given if beside is None else [*given, beside])
    saved = start.extras.get("generators")
    if saved is not None:
        _set_states(given, saved)
    progress.extras = {**progress.extras, **between_epochs(given, begun=True)}


def _set_states(generators: list[torch.Generator], saved: dict[str, Any]) -> None:
    states = saved["states"]
    _check_number(states, generators)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _check_number(states: Sequence[Any], generators: Sequence[torch.Generator]) -> None:
    if len(states) != len(generators):
        raise ValueError(
            f"load_state_dict() was given a state with {len(states)} generators of a sampler or dataset, this loader's has "
            f"{len(generators)}. Build it as in the run that was saved, with generator=torch.Generator() if it had one."
        )

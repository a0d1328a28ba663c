"""The identity of a loader, saved with a position so that no other loader loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_core.api.component import was_chosen

if TYPE_CHECKING:
    from accel_data.loader_state import Start

VERSION = 1
_NUMBERS = ("seed", "loader", "epoch", "samples")
_IDENTITY = (*_NUMBERS, "version", "length", "order", "workers")


@dataclass
class Identity:
    """The identity of a loader, saved with its positions. Copies that share its epochs share it.

    The seed is the run's, or that of a state that was loaded; `number`: loaders prepared before;
    `order`: the classes of samplers, or of an iterable dataset; `workers`: among how many the order
    of an iterable dataset is made, None where it does not depend on that.
    """

    seed: int
    number: int
    length: int | None
    order: str
    workers: int | None

    def state(self, position: Start) -> dict[str, Any]:
        """A state: numbers, and tensors of bytes where a generator or dataset has a state."""
        return {
            "version": VERSION,
            "seed": self.seed,
            "loader": self.number,
            "epoch": position.epoch,
            "samples": position.samples,
            "length": self.length,
            "order": self.order,
            "workers": self.workers,
            **position.extras,
        }

    def check(self, state: object) -> dict[str, Any]:
        """The state, if it is of this loader; TypeError if of none, ValueError if of another."""
        checked = _checked_form(state)
        self._check_order(checked)
        self._check_run(checked)
        return checked

    def _check_order(self, state: Mapping[str, Any]) -> None:
        """Raises for a position in an order that this loader's dataset and samplers do not have."""
        if state.get("length") != self.length:
            raise ValueError(
                f"load_state_dict() was given the state of a dataset with {_samples(state.get('length'))}; this loader's "
                f"has {_samples(self.length)}. Load it into the loader of the dataset that was saved, or begin a new "
                f"epoch without a state."
            )
        if state.get("order") != self.order:
            raise ValueError(
                f"load_state_dict() was given a position in the order of {state.get('order')}, this loader's is that of "
                f"{self.order}. Build the loader with the sampler, or the dataset, of the run that was saved."
            )
        workers = (len(state.get("lanes", ())) if self.workers else 0) or state.get("workers") or 1
        if state["samples"] and workers != (self.workers or 1):
            raise ValueError(
                f"load_state_dict() was given a position in the order that {workers} worker(s) make of an IterableDataset, "
                f"this loader has {self.workers}. Use num_workers as in the run that was saved."
            )
        if state["samples"] and self.workers is not None and "lanes" in state:
            raise ValueError(
                f"load_state_dict() was given a position in the {workers} streams of a dataset that splits itself over its "
                f"workers, as ranks have shared them out with dispatch_batches=False; this loader reads them whole. Go on with "
                f"several ranks and dispatch_batches=False, or begin a new epoch without a state."
            )

    def _check_run(self, state: Mapping[str, Any]) -> None:
        """Raises for the position of another loader, or of another run that was seeded."""
        if state["loader"] != self.number:
            raise ValueError(
                f"load_state_dict() was given the state of loader {state['loader']}, counted from 0 in the order of "
                f"prepare(); this is loader {self.number}, whose order is another. Prepare the loaders in the same order "
                f"as in the run that was saved, and give each its own state."
            )
        if state["seed"] != self.seed and was_chosen(self.seed) and was_chosen(state["seed"]):
            raise ValueError(
                f"load_state_dict() was given a state of a run with seed {state['seed']}, this run has seed {self.seed}, so "
                f"it would go on in another order. Type set_seed({state['seed']}) before the loader is prepared, or set no "
                f"seed: then that of the state is taken."
            )


def extras_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state other than position and identity."""
    return {name: value for name, value in state.items() if name not in _IDENTITY}


def _checked_form(state: object) -> dict[str, Any]:
    if not isinstance(state, Mapping) or not all(_is_number(state.get(name)) for name in _NUMBERS):
        raise TypeError(
            f"load_state_dict() was given a {type(state).__name__} that is no state of a loader: it needs whole numbers "
            f"{', '.join(_NUMBERS)}, none negative. Pass what state_dict() of a prepared loader returned."
        )
    if state.get("version") != VERSION:
        raise ValueError(
            f"load_state_dict() was given a state of version {state.get('version')!r}; this accel-data reads version "
            f"{VERSION}. Install the accel-data that saved it, or a newer one."
        )
    return dict(state)


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0


def _samples(length: object) -> str:
    return "no known length" if length is None else f"{length} samples"

"""The facts that the jobs of the precision suite return, and that the suite compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_core import PrecisionPolicy
    from accel_testing.models import Gradients, State
    from accel_testing.shared_launch import Raised


@dataclass(frozen=True)
class Description:
    """The policy of a precision before it has trained."""

    policy: Any
    again: Any  # that of another one, made in the same way
    copied: Any  # that of a pickled copy, or how pickling was refused


@dataclass(frozen=True)
class Refused:
    """A strategy did not take the policy."""

    message: str
    text: str


@dataclass(frozen=True)
class Observed:
    """The dtypes that were met in one forward and backward."""

    policy: PrecisionPolicy
    count: int  # of the data-parallel shards
    given: dict[str, torch.dtype]  # the dtype of each leaf that the model was given
    seen: dict[str, torch.dtype]  # of each leaf as the first layer received it, and of what that made
    made: dict[str, torch.dtype]  # of each leaf that the model made
    returned: dict[str, torch.dtype]  # of each leaf as the loop received it
    parameters: set[torch.dtype]
    gradients: set[torch.dtype]  # empty without a backward
    travelled: set[torch.dtype]  # the narrow dtypes that hold all numbers of all gradients exactly


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    index: int  # of this rank's shard
    count: int  # of the shards
    losses: list[float]  # this rank's loss of each step, the mean over its window
    skipped: list[bool]  # whether a step was left out
    state: State  # of the model


@dataclass(frozen=True)
class Overflow:
    """A step whose gradient is not finite on one rank, between two others."""

    scales: bool  # whether somebody scales losses, or may leave steps out
    states: list[State]  # before it, after it, and after the step that follows
    rates: list[float]  # the learning rate at these moments
    skipped: list[bool]  # what `optimizer_step_was_skipped` said at these moments


@dataclass(frozen=True)
class Clipped:
    """Gradients of one step."""

    count: int  # of the shards
    norm: float  # what `clip_grad_norm_` returned
    gradients: Gradients  # after clipping


@dataclass(frozen=True)
class Unscaled:
    """Gradients around `unscale_gradients`."""

    count: int  # of the shards
    once: Gradients  # after it
    twice: Gradients  # after it was called again, and nothing was left to be clipped
    pending: Gradients  # those of an open window
    untouched: Gradients  # the same after it was called there
    closed: Gradients  # those of the whole window, unscaled


@dataclass(frozen=True)
class Several:
    """Two models with an optimizer each."""

    # What was special in a step → for both optimizers how far it moved, and how far it moves a model by itself.
    updates: dict[str, list[tuple[float, float]]]
    # Where losses are scaled, of both models: before, after an overflow in the second, after one in the first, and after none.
    states: list[list[State]]


@dataclass(frozen=True)
class Moment:
    """The state of a run at one moment."""

    state: State  # of the model
    scale: float  # by what a loss is multiplied
    remembered: Any  # what the precision gives to be saved


@dataclass(frozen=True)
class Named:
    """The user's model after preparation: names, parameters that do not train, and a copy."""

    parameters: list[str]
    state: list[str]  # of its state; empty where the strategy gives it to the main process only
    still: dict[str, list[str]]  # by the order of preparing the optimizer: what two steps have left as it was
    # The class of a pickled copy of the undressed model and the names of its state, or how that failed.
    copied: tuple[str, list[str]] | Raised


@dataclass(frozen=True)
class Explained:
    """The descriptions of a precision that has prepared a model."""

    full: bool  # whether it is full precision, and nothing else
    details: dict[str, str]  # its own words
    text: str  # those of `explain()`


@dataclass(frozen=True)
class SideBySide:
    """Two Accelerators that train by turns."""

    index: int  # of this rank's shard
    count: int  # of the shards
    full: list[float]  # losses in full precision
    alone: list[float]  # losses of the precision by itself
    beside: list[float]  # the same beside full precision

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
    """The policy of a precision before it has trained.

    Args:
        policy: what it calls its policy.
        again: the policy of another one, made in the same way.
        copied: the policy of a pickled copy, or how pickling was refused.
    """

    policy: Any
    again: Any
    copied: Any


@dataclass(frozen=True)
class Refused:
    """A strategy did not take the policy.

    Args:
        message: its words.
        text: the whole traceback.
    """

    message: str
    text: str


@dataclass(frozen=True)
class Observed:
    """The dtypes that were met in one forward and backward.

    Args:
        policy: what was declared.
        count: of the data-parallel shards.
        given: the dtype of each leaf that the model was given.
        seen: that of each leaf as the first layer received it, and of what that made.
        made: that of each leaf that the model made.
        returned: that of each leaf as the loop received it.
        parameters: those of the parameters.
        gradients: those of the gradients; empty without a backward.
        travelled: the narrow dtypes that hold all numbers of all gradients exactly.
    """

    policy: PrecisionPolicy
    count: int
    given: dict[str, torch.dtype]
    seen: dict[str, torch.dtype]
    made: dict[str, torch.dtype]
    returned: dict[str, torch.dtype]
    parameters: set[torch.dtype]
    gradients: set[torch.dtype]
    travelled: set[torch.dtype]


@dataclass(frozen=True)
class Trained:
    """A run that has ended.

    Args:
        index: of this rank's shard.
        count: of the shards.
        losses: this rank's loss of each step, the mean over its window.
        skipped: whether a step was left out.
        state: of the model.
    """

    index: int
    count: int
    losses: list[float]
    skipped: list[bool]
    state: State


@dataclass(frozen=True)
class Overflow:
    """A step whose gradient is not finite on one rank, between two others.

    Args:
        scales: whether somebody scales losses, or may leave steps out.
        states: before it, after it, and after the step that follows.
        rates: the learning rate at these moments.
        skipped: what `optimizer_step_was_skipped` said at these moments.
    """

    scales: bool
    states: list[State]
    rates: list[float]
    skipped: list[bool]


@dataclass(frozen=True)
class Clipped:
    """Gradients of one step.

    Args:
        count: of the shards.
        norm: what `clip_grad_norm_` returned.
        gradients: after clipping.
    """

    count: int
    norm: float
    gradients: Gradients


@dataclass(frozen=True)
class Unscaled:
    """Gradients around `unscale_gradients`.

    Args:
        count: of the shards.
        once: after it.
        twice: after it was called again, and nothing was left to be clipped.
        pending: those of an open window.
        untouched: the same after it was called there.
        closed: those of the whole window, unscaled.
    """

    count: int
    once: Gradients
    twice: Gradients
    pending: Gradients
    untouched: Gradients
    closed: Gradients


@dataclass(frozen=True)
class Moment:
    """The state of a run at one moment.

    Args:
        state: of the model.
        scale: by what a loss is multiplied.
        remembered: what the precision gives to be saved.
    """

    state: State
    scale: float
    remembered: Any


@dataclass(frozen=True)
class Named:
    """The user's model after preparation: names, parameters that do not train, and a copy.

    Args:
        parameters: their names.
        state: the names of its state; empty where the strategy gives it to the main process only.
        still: for each order of preparing the optimizer, the parameters that two steps have left as
            they were.
        copied: the class of a pickled copy of the undressed model and the names of its state, or
            how that failed.
    """

    parameters: list[str]
    state: list[str]
    still: dict[str, list[str]]
    copied: tuple[str, list[str]] | Raised


@dataclass(frozen=True)
class Explained:
    """The descriptions of a precision that has prepared a model.

    Args:
        full: whether it is full precision, and nothing else.
        details: its own words.
        text: those of `explain()`.
    """

    full: bool
    details: dict[str, str]
    text: str


@dataclass(frozen=True)
class SideBySide:
    """Two Accelerators that train by turns.

    Args:
        index: of this rank's shard.
        count: of the shards.
        full: losses in full precision.
        alone: losses of the precision by itself.
        beside: the same beside full precision.
    """

    index: int
    count: int
    full: list[float]
    alone: list[float]
    beside: list[float]

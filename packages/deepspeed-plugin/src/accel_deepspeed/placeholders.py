"""`DummyOptim` and `DummyScheduler`: stand-ins for the optimizer and schedule of a configuration.

Both are what the core takes for an optimizer and a scheduler, before they are prepared and after.
`accel_deepspeed.configured_objects.realise` makes them real, in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch import nn

DEFAULT_LR = 0.001

_WAITING = "_accel_deepspeed_waiting"
_MAKER = "_accel_deepspeed_maker"

Maker = Callable[["DummyScheduler"], Any]
"""Makes the schedule for which a `DummyScheduler` stands."""


class DummyOptim(Optimizer):
    """A stand-in for the optimizer of the section `optimizer`; once prepared, that optimizer.

    Options that are given here go where the section has "auto", or nothing. A group's own options
    stay its own.

    Args:
        params: parameters, or groups of them, as for any optimizer of torch.
        lr: the learning rate.
        weight_decay: the weight decay.
        kwargs: further options of the optimizer that the section names.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = DEFAULT_LR,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        groups = list(params)
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs
        self.own_options = [set(group) for group in groups if isinstance(group, dict)] or [set()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, **kwargs})  # type: ignore[arg-type]  # checked by torch

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and remembers which options it brings."""
        if _is_placeholder(self) and len(self.own_options) == len(self.param_groups):
            self.own_options.append(set(param_group))
        Optimizer.add_param_group(self, param_group)  # not super(): see `step`

    def step(self, closure: Any = None) -> Any:
        """Steps as the configured optimizer; raises as long as there is none."""
        if _is_placeholder(self):
            raise RuntimeError(
                "DummyOptim.step() was called, but it stands for the optimizer that a DeepSpeed configuration names. Prepare it, "
                "with its model, by Accelerator(strategy=DeepSpeed(config=...)); other strategies need a real optimizer."
            )
        # Called by a reference to this method that is older than the class which the optimizer has now.
        return type(self).step(self, closure)


class DummyScheduler:
    """A stand-in for the section `scheduler`; steps by it once its optimizer is prepared.

    What is given here goes where the section has "auto", or nothing.

    Args:
        optimizer: the optimizer, a `DummyOptim` or any other.
        total_num_steps: of `scheduler.step()`, in the whole run.
        warmup_num_steps: of them, how many at the beginning raise the learning rate.
        lr_scheduler_callable: makes the schedule from the optimizer, in place of a section.
        kwargs: further options of the schedule that the section names.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        self._schedule: Any = None
        known = vars(optimizer)
        if _MAKER in known:
            self.begin(known[_MAKER])
        known.setdefault(_WAITING, weakref.WeakSet()).add(self)

    def begin(self, make: Maker) -> None:
        """Makes the schedule, unless there is one."""
        if self._schedule is None:
            self._schedule = make(self)

    @property
    def schedule(self) -> Any:
        """The schedule itself.

        Raises:
            RuntimeError: its optimizer is not prepared under DeepSpeed.
        """
        if self._schedule is None:
            raise RuntimeError(
                "DummyScheduler stands for the schedule of a DeepSpeed configuration, and its optimizer is not prepared yet. "
                "Prepare model and optimizer by Accelerator(strategy=DeepSpeed(config=...)) first; other strategies need a "
                "real scheduler."
            )
        return self._schedule

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances the schedule by one step."""
        self.schedule.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        rates: list[float] = self.schedule.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        state: dict[str, Any] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the state of the schedule."""
        self.schedule.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._schedule is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._schedule, name)


def _is_placeholder(optimizer: object) -> bool:
    return isinstance(optimizer, DummyOptim)


def begin_schedules(optimizer: Optimizer, make: Maker) -> None:
    """Makes the schedules that wait for an optimizer, and those that will be asked for later."""
    vars(optimizer)[_MAKER] = make
    for scheduler in list(vars(optimizer).get(_WAITING, ())):
        scheduler.begin(make)


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a `DummyScheduler` drives the optimizer."""
    return bool(vars(optimizer).get(_WAITING))

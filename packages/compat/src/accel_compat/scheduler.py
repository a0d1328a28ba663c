"""`AcceleratedScheduler`: the type of prepared LR schedulers, and a class for wrappers of engines."""

from __future__ import annotations

from typing import Any

import accel_core
from accel_core.api.component import ClassOverride, override_class


class _Prepared(ClassOverride):
    """What a prepared scheduler answers that looks for a wrapper."""

    _is_accelerate_prepared = True

    @property
    def scheduler(self) -> Any:
        """The scheduler itself: nothing is wrapped."""
        return self


class _Schedulers(type):
    def __instancecheck__(cls, instance: object) -> bool:
        if cls is AcceleratedScheduler and isinstance(instance, accel_core.AcceleratedScheduler):
            return True
        return super().__instancecheck__(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is AcceleratedScheduler:  # called itself, it makes the scheduler one that waits for its optimizers
            return answering(accel_core.AcceleratedScheduler(*args, **kwargs))
        return super().__call__(*args, **kwargs)


class AcceleratedScheduler(metaclass=_Schedulers):
    """The type of a prepared scheduler, which keeps its own class; a subclass wraps what an engine drives.

    Called, it is `accel_core.AcceleratedScheduler`. Objects of subclasses have `scheduler` and `optimizers`, and pass on.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the scheduler."""
        self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def answering(scheduler: Any) -> Any:
    """The scheduler, with the attribute `scheduler`."""
    if not hasattr(scheduler, "scheduler"):
        override_class(scheduler, _Prepared)
    return scheduler

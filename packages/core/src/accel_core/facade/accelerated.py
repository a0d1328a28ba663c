"""The classes that prepared optimizers and schedulers are instances of.

Preparing wraps nothing: it gates the user's own object, in place (see
`accel_core.loop.optimizer_gate` for why). So these classes are answers to `isinstance`, and calls
of them gate one object without an Accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_core.contract.loader_progress import Feed
from accel_core.loop.accumulation import Accumulation
from accel_core.loop.optimizer_gate import SKIPPED, OptimizerGate, gate_of, place_state
from accel_core.loop.scheduler_gate import SchedulerRule, gate_scheduler, is_scheduler, rule_on


class _GatedOptimizers(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return gate_of(instance) is not None if cls is AcceleratedOptimizer else super().__instancecheck__(instance)


class AcceleratedOptimizer(Optimizer, metaclass=_GatedOptimizers):
    """The type of a prepared optimizer: `isinstance(optimizer, AcceleratedOptimizer)`.

    True from `Accelerator.prepare` until `free_memory`; copies are not prepared. It has an
    attribute `step_was_skipped`, and otherwise everything that the user's own class has.

    Called, it makes one optimizer such an instance without an Accelerator, in place, and returns
    it. Its steps are then held back by no window.

    Args:
        optimizer: any of torch's.
        device_placement: whether the state that it has already is moved to the device of its
            parameters.
        scaler: a loss scaler: `step()` steps and updates it. Scale the loss with it before the
            backward.

    Raises:
        TypeError: if the optimizer or the scaler is of another type.
        ValueError: if an Accelerator has prepared the optimizer.
    """

    def __new__(  # type: ignore[misc]  # an instance all the same, by the metaclass
        cls, optimizer: Optimizer, device_placement: bool = True, scaler: torch.amp.GradScaler | None = None
    ) -> Optimizer:
        """Makes `optimizer` an instance of this class in place, and returns it."""
        if cls is not AcceleratedOptimizer:
            _refuse_subclass(cls, "optimizer")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"AcceleratedOptimizer() was given a {type(optimizer).__name__}, expected a torch.optim.Optimizer."
            )
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"AcceleratedOptimizer(scaler={scaler!r}) is a {type(scaler).__name__}, expected a torch.amp.GradScaler or None."
            )
        gate = gate_of(optimizer)
        if gate is not None:
            _refuse_prepared(optimizer, gate)
            gate.keeps = ""  # replaced by what is given now
            gate.remove(optimizer)
        if device_placement:
            place_state(optimizer)
        hooks = _Alone(scaler)
        gate = OptimizerGate(optimizer, Accumulation(1, Feed(1), hooks.rescale), hooks, None, needs_backward=False)
        gate.keeps = "" if scaler is None else f"scaler={type(scaler).__name__}(...)"
        return optimizer


class _GatedSchedulers(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return rule_on(instance) is not None if cls is AcceleratedScheduler else super().__instancecheck__(instance)


class AcceleratedScheduler(LRScheduler, metaclass=_GatedSchedulers):
    """The type of a prepared LR scheduler: `isinstance(scheduler, AcceleratedScheduler)`.

    True from `Accelerator.prepare` until `free_memory`; copies are not prepared. It has everything
    that the user's own class has.

    Called, it makes one scheduler such an instance without an Accelerator, in place, and returns
    it: it steps only if its optimizers have stepped.

    Args:
        scheduler: any of torch's, or what behaves like one.
        optimizers: the one that it drives, or a list of those for which it waits, that one among
            them.
        step_with_optimizer: False: `step()` is never held back.
        split_batches: one `step()` is one step for any number of processes, whether their batches
            are parts of one or not: both values mean the same.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the scheduler drives an optimizer that is not among `optimizers`, or an
            Accelerator has prepared it.
    """

    def __new__(
        cls,
        scheduler: Any,
        optimizers: Optimizer | Sequence[Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> Any:
        """Makes `scheduler` an instance of this class in place, and returns it."""
        if cls is not AcceleratedScheduler:
            _refuse_subclass(cls, "scheduler")
        if not is_scheduler(scheduler):
            raise TypeError(
                f"AcceleratedScheduler() was given a {type(scheduler).__name__}, expected an LR scheduler: an object with "
                f"step(), state_dict(), and the optimizer that it drives as `optimizer`."
            )
        for name, value in (("step_with_optimizer", step_with_optimizer), ("split_batches", split_batches)):
            if not isinstance(value, bool):
                raise TypeError(
                    f"AcceleratedScheduler({name}={value!r}) is a {type(value).__name__}: expected True or False."
                )
        others = _others(scheduler, optimizers)
        rule = rule_on(scheduler)
        if rule is not None and not rule.by_hand:
            raise ValueError(
                f"This {type(scheduler).__name__} is prepared by an Accelerator, which holds it back already. Use it as it is, "
                f"or call free_memory() of that Accelerator first."
            )
        gate_scheduler(scheduler, SchedulerRule(step_with_optimizer, others=others, by_hand=True))
        return scheduler


class _Alone:
    """The hooks of an optimizer without an Accelerator: those of torch's loss scaler, or none."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        scaler = self._scaler
        if scaler is None:
            return step()
        if isinstance(step, partial):
            raise RuntimeError(
                f"step() of a {type(optimizer).__name__} with a loss scaler was given arguments, but the scaler looks at the "
                f"gradients before the step, and a closure computes them in it. Call step() without arguments."
            )
        before = scaler.get_scale()
        result = scaler.step(optimizer)
        scaler.update()
        return SKIPPED if scaler.get_scale() < before else result

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def rescale(self, factor: float) -> NoReturn:
        raise AssertionError(f"a window of one micro-batch was to be shortened, by {factor}")


def _others(scheduler: Any, optimizers: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, Optimizer) for each in given):
        raise TypeError(
            f"AcceleratedScheduler(optimizers={optimizers!r}) is a {type(optimizers).__name__}, expected an optimizer or a list of "
            f"optimizers."
        )
    if not any(each is scheduler.optimizer for each in given):
        raise ValueError(
            f"This {type(scheduler).__name__} drives an optimizer that is not among the {len(given)} given as optimizers=, so it "
            f"would wait for steps that it has nothing to do with. Pass its own, scheduler.optimizer, too."
        )
    return tuple(each for each in given if each is not scheduler.optimizer)


def _refuse_prepared(optimizer: Optimizer, gate: OptimizerGate) -> None:
    if gate.owner() is not None:
        raise ValueError(
            f"This {type(optimizer).__name__} is prepared by an Accelerator, whose windows hold its steps back. Use it as it is, "
            f"or call free_memory() of that Accelerator first."
        )


def _refuse_subclass(cls: type, noun: str) -> NoReturn:
    raise TypeError(
        f"{cls.__name__}() was called, a subclass of {cls.__bases__[0].__name__}, which no {noun} is made from: prepared ones keep "
        f"their own class, and would not have what the subclass says. Subclass that of the {noun}, or torch's base class."
    )

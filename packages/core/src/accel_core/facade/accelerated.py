"""Answers to `isinstance` for prepared optimizers and schedulers, gated in place, not wrapped."""

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
from accel_core.loop.scheduler_gate import SchedulerRule, gate_scheduler, rule_on


class _Gated(type):
    def __instancecheck__(cls, instance: object) -> bool:
        found = vars(cls).get("_gate_on")  # of a subclass: its own instances
        return super().__instancecheck__(instance) if found is None else found(instance) is not None


class AcceleratedOptimizer(Optimizer, metaclass=_Gated):
    """The type of a prepared optimizer: `isinstance(optimizer, AcceleratedOptimizer)`.

    True from `Accelerator.prepare` until `free_memory`; copies are not prepared. It has an
    attribute `step_was_skipped`, and otherwise everything that the user's own class has.

    Called, it makes any of torch's optimizers such an instance in place, without an Accelerator,
    and returns it. `device_placement`: whether its state is moved to the device of its parameters;
    `scaler`: a loss scaler, which `step()` steps and updates. `ValueError` if it is prepared.
    """

    _gate_on = staticmethod(gate_of)

    def __new__(  # type: ignore[misc]  # an instance all the same, by the metaclass
        cls, optimizer: Optimizer, device_placement: bool = True, scaler: torch.amp.GradScaler | None = None
    ) -> Optimizer:
        """The optimizer itself, which is an instance of this class from now on."""
        _refuse_subclass(cls, AcceleratedOptimizer)
        gate = gate_of(optimizer)
        if gate is not None:
            if gate.owner() is not None:
                _refuse_prepared(optimizer)
            gate.keeps = ""  # replaced by what is given now
            gate.remove(optimizer)
        if device_placement:
            place_state(optimizer)
        hooks = _Alone(scaler)
        gate = OptimizerGate(optimizer, Accumulation(1, Feed(1), hooks.rescale), hooks, None, needs_backward=False)
        gate.keeps = "" if scaler is None else f"scaler={type(scaler).__name__}(...)"
        return optimizer


class AcceleratedScheduler(LRScheduler, metaclass=_Gated):
    """The type of a prepared LR scheduler, for `isinstance`, as `AcceleratedOptimizer` says.

    Called, it makes one scheduler such an instance in place, without an Accelerator, and returns
    it: it steps only if its own optimizer and all `optimizers` have stepped, unless
    `step_with_optimizer=False`. `split_batches` changes nothing. `ValueError` if it is prepared.
    """

    _gate_on = staticmethod(rule_on)

    def __new__(
        cls,
        scheduler: Any,
        optimizers: Optimizer | Sequence[Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,  # noqa: ARG004
    ) -> Any:
        """The scheduler itself, which is an instance of this class from now on."""
        _refuse_subclass(cls, AcceleratedScheduler)
        rule = rule_on(scheduler)
        if rule is not None and not rule.by_hand:
            _refuse_prepared(scheduler)
        given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        others = tuple(each for each in given if each is not scheduler.optimizer)
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
            what = f"step() of a {type(optimizer).__name__} with a loss scaler was given arguments, such as a closure,"
            raise RuntimeError(f"{what} which the scaler would drop. Call step() without arguments.")
        before = scaler.get_scale()
        result = scaler.step(optimizer)
        scaler.update()
        return SKIPPED if scaler.get_scale() < before else result

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def rescale(self, factor: float) -> NoReturn:
        raise AssertionError(f"a window of one micro-batch was to be shortened, by {factor}")


def _refuse_prepared(given: object) -> NoReturn:
    kind = type(given).__name__
    raise ValueError(f"This {kind} is prepared by an Accelerator. Call free_memory() of that one first.")


def _refuse_subclass(cls: type, kind: type) -> None:
    if cls is not kind:
        raise TypeError(f"{cls.__name__}() is a subclass of {kind.__name__}, but what is prepared keeps its own class.")

"""Gating LR schedulers: one `scheduler.step()` is one step per real optimizer step.

Instance attributes would appear in the scheduler's `state_dict`: so the gate is a class override,
and the rule lives on the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from accel_core.base.class_override import ClassOverride, override_class, restore_class
from accel_core.loop.optimizer_gate import OptimizerGate, gate_of
from accel_core.options.resolution import flag

_RULE = "_accel_scheduler_rule"


@dataclass(frozen=True)
class SchedulerRule:
    """The rule for how many steps a call of `scheduler.step()` really makes."""

    with_optimizer: bool = True  # False: always once, whatever the optimizer does
    repeat: int = 1  # steps per real optimizer step
    per_micro_batch: bool = False  # whether it advances by the micro-batches of the window
    others: tuple[Optimizer, ...] = ()  # further optimizers that have to have stepped too
    stops: bool = False  # whether a schedule of a fixed length stays at its end instead of raising there
    by_hand: bool = False  # whether it was made for this scheduler alone

    def steps(self, gate: OptimizerGate) -> int:
        """The number of steps that a call makes now."""
        if not self.with_optimizer:
            return 1
        accumulation = gate.accumulation
        if accumulation.open or gate.was_skipped:
            return 0
        if self.others and any(getattr(other, "step_was_skipped", False) for other in self.others):
            return 0
        micro_batches = accumulation.size if accumulation.serial else 1  # 0: `accumulate` was never called
        return self.repeat * (micro_batches if self.per_micro_batch else 1)


def rule_of(with_optimizer: bool, processes: int | None, adjust: bool | None) -> SchedulerRule:
    """The rule that the Accelerator's arguments ask for; `processes`: the factor of steps."""
    with_optimizer = flag("step_scheduler_with_optimizer", with_optimizer, "", True).value
    if not with_optimizer and (processes or adjust):
        asked = "step_scheduler_per_process=True" if processes else "adjust_scheduler=True"
        what = f"step_scheduler_with_optimizer=False leaves scheduler.step() alone, and {asked} multiplies it."
        raise ValueError(f"{what} Leave one of them out.")
    return SchedulerRule(with_optimizer, processes or 1, bool(adjust), stops=bool(processes or adjust))


class _Gated(ClassOverride):
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps as often as the rule says; without a prepared optimizer it steps once."""
        optimizer = self.optimizer  # type: ignore[attr-defined]
        gate = gate_of(optimizer)
        rule = vars(optimizer).get(_RULE) if gate is not None else None
        # Schedules of a fixed length (OneCycleLR) raise beyond their last step; repeated steps must not run over it.
        total = getattr(self, "total_steps", None) if rule is not None and rule.stops else None
        for _ in range(1 if rule is None else rule.steps(gate)):
            if total is None or self.last_epoch < total - 1:  # type: ignore[attr-defined]
                super().step(*args, **kwargs)  # type: ignore[misc]


def is_scheduler(obj: object) -> bool:
    """Whether `obj` behaves like an LR scheduler: steps, has a state, and drives an optimizer."""
    return all(callable(getattr(obj, name, None)) for name in ("step", "state_dict")) and hasattr(obj, "optimizer")


def gate_scheduler(scheduler: Any, rule: SchedulerRule) -> None:
    """Holds `scheduler.step()` back with its optimizer; `ValueError` after another rule by hand."""
    old = rule_on(scheduler)
    asked = rule.with_optimizer, rule.others
    if old is not None and old.by_hand and not rule.by_hand and (old.with_optimizer, old.others) != asked:
        raise ValueError(
            f"This {type(scheduler).__name__} was made by AcceleratedScheduler() with "
            f"step_with_optimizer={old.with_optimizer} and {1 + len(old.others)} optimizer(s), which preparing would "
            f"undo. Leave one of the two out."
        )
    vars(scheduler.optimizer)[_RULE] = rule
    override_class(scheduler, _Gated)


def rule_on(scheduler: object) -> SchedulerRule | None:
    """The rule of a gated scheduler; None for any other, a copy of a gated one included."""
    optimizer: Any = scheduler.optimizer if isinstance(scheduler, _Gated) else None  # type: ignore[attr-defined]
    return None if optimizer is None else vars(optimizer).get(_RULE)


def ungate_scheduler(scheduler: Any) -> None:
    """Gives the scheduler its original class back."""
    restore_class(scheduler, _Gated)
    vars(scheduler.optimizer).pop(_RULE, None)

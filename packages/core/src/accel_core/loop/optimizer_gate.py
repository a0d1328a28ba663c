"""Gating optimizers: `step` and `zero_grad` do nothing while a window of accumulation is open.

Both are shadowed on the *instance*: a swapped class is bypassed by LR schedulers, recurses through
loss scalers and cannot be pickled, and a proxy makes fused optimizers compute wrong moments. They
are bound to the optimizer, for LR schedulers bind the `__func__` of `optimizer.step` to it again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_core.base.deprecation import level_of_the_user
from accel_core.base.suggestions import listed
from accel_core.loop.fused_backward import is_fused, no_step

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.loop.accumulation import Accumulation
    from accel_core.loop.preparation import Prepared

_GATE = "_accel_gate"
_SKIPPED = "step_was_skipped"
_SHADOWED = ("step", "zero_grad", "add_param_group", "__reduce_ex__", _SKIPPED)


SKIPPED: Final = object()
"""What the hook `optimizer_step` returns when the parameters were not changed (an overflow under loss scaling, say)."""


class SkippedIf(NamedTuple):
    """What it returns instead where the device alone knows, as for kernels that look by themselves."""

    skipped: torch.Tensor  # 0-d bool; asking for its value waits


class OptimizerGate:
    """The Accelerator's record of a prepared optimizer, whose steps it controls until `remove`.

    `relay` has the hooks `optimizer_step` and `unscale_gradients`; `prepared` is None without an
    Accelerator. `needs_backward`: whether gradients of a plain backward would be wrong. `engine` is
    the hook `apply_step`; None: the optimizer's own step is taken.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        relay: Any,
        prepared: Prepared | None,
        needs_backward: bool,
        engine: Callable[[Optimizer, Callable[[], Any]], Any] | None = None,
    ) -> None:
        self.accumulation = accumulation
        accumulation.optimizers += 1
        self._relay = relay
        # Weak: an optimizer that outlives its Accelerator does not keep everything that was prepared alive.
        self.owner: Callable[[], Prepared | None] = (lambda: None) if prepared is None else weakref.ref(prepared)
        self._keeps_elsewhere = prepared is not None and prepared.gradients.are_elsewhere
        self.keeps = ""  # what was configured for this optimizer alone, in words
        self.engine = engine
        self.checked = False  # whether what is done before the first step has been done
        self._frozen: dict[str, nn.Parameter] = {}  # held, but of a model that was frozen when it was prepared
        self._needs_backward = needs_backward or is_fused(optimizer)
        self._inside = self.was_skipped = False
        self.unscaled: bool | None = False  # None, by a precision: gradients were, and a backward added to them
        self.resume()
        self._own_step = no_step if is_fused(optimizer) else optimizer.step
        self._own_zero_grad = optimizer.zero_grad
        self._own_add_param_group = optimizer.add_param_group
        known = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        attributes: Any = vars(optimizer)
        self._shadowed = {name: attributes[name] for name in _SHADOWED if name in attributes}
        attributes |= {
            _GATE: self,
            "step": MethodType(_known_to_schedulers if known else _gated_step, optimizer),
            "zero_grad": MethodType(_gated_zero_grad, optimizer),
            "add_param_group": MethodType(_watched_add_param_group, optimizer),
            "__reduce_ex__": MethodType(_reduced_bare, optimizer),
            _SKIPPED: False,
        }

    def remove(self, optimizer: Optimizer) -> None:
        """Gives the optimizer its own methods back; `ValueError` if it has settings of its own."""
        if self.keeps:
            raise ValueError(
                f"This {type(optimizer).__name__} was given {self.keeps} by AcceleratedOptimizer(), and an Accelerator "
                f"has its own for all optimizers. Prepare it without, and choose Accelerator(mixed_precision=...)."
            )
        self.accumulation.optimizers -= 1
        attributes = vars(optimizer)
        for name in (_GATE, *_SHADOWED):
            attributes.pop(name, None)
        attributes.update(self._shadowed)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps, unless the window is open. Returns what the optimizer's step does, else None."""
        if self._inside:  # called by `optimizer_step`, a loss scaler for example
            return self._own_step(*args, **kwargs)
        accumulation = self.accumulation
        if accumulation.open:
            return None
        if not self.checked:
            self._check_first(optimizer)
        if self._frozen:
            self._check_frozen(optimizer)
        step: Callable[[], Any] = self._own_step
        if args or kwargs:
            if accumulation.steps > 1 and accumulation.serial > 0:
                what = f"optimizer.step(closure) was called in a window of {accumulation.size} micro-batches."
                raise RuntimeError(f"{what} Use gradient_accumulation_steps=1, and a closure over all of them.")
            checked = partial(self._checked, optimizer)
            step = partial(step, *map(checked, args), **{name: checked(given) for name, given in kwargs.items()})
        else:
            self._check_backward()
            self._check_gradients(optimizer)
        if self.engine is not None:
            engine, own = self.engine, step
            # A partial says that the step was given arguments.
            step = partial(engine, optimizer, own) if isinstance(own, partial) else lambda: engine(optimizer, own)
        self._inside = True
        try:
            result = self._relay.optimizer_step(optimizer, step)
        finally:
            self._inside = False
        self.settled = accumulation.serial
        self.seen_backwards = accumulation.total_backwards
        self.unscaled = False
        skipped: Any = result.skipped if isinstance(result, SkippedIf) else result is SKIPPED
        if skipped is not self.was_skipped:
            self.was_skipped = vars(optimizer)[_SKIPPED] = skipped
        return result if skipped is False else None

    def zero_grad(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, unless they belong to the open window."""
        accumulation = self.accumulation
        if self._inside or not accumulation.is_pending(self.settled):
            self._clear(optimizer, *args, **kwargs)
        elif not accumulation.open and accumulation.optimizers == 1 and accumulation.micro_backwards:
            self._clear(optimizer, *args, **kwargs)  # behind its backward, which was for no other optimizer
        elif not accumulation.open:
            self._clear_later(optimizer, args, kwargs)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds the group; its parameters are checked before the next step."""
        self._own_add_param_group(group)
        self.checked = False
        if (prepared := self.owner()) is not None:
            prepared.unchecked = True

    def resume(self) -> None:
        """The state of the optimizer was loaded: what happened here before is over."""
        self.unscaled = self.was_skipped = False
        self.settled = -1  # the window in which it stepped last
        self.seen_backwards = self.accumulation.total_backwards

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscales the gradients, once between two steps."""
        if not self.unscaled:
            self._relay.unscale_gradients(optimizer)
            self.unscaled = True

    def _clear_later(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # its closure would cost every call
        window = self.accumulation.serial
        drop = partial(self._clear, optimizer, *args, **kwargs)
        self.accumulation.defer(lambda: None if self.settled == window else drop())

    def _clear(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._own_zero_grad(*args, **kwargs)
        if self._keeps_elsewhere and (prepared := self.owner()) is not None:
            prepared.gradients.clear_kept(held_by(optimizer))
        self.unscaled = False  # a scaler that has not heard of a step complains by itself when it is to unscale again

    def _check_first(self, optimizer: Optimizer) -> None:
        prepared, accumulation = self.owner(), self.accumulation
        if prepared is not None:
            prepared.check_orphans()
            self._frozen = prepared.frozen_of(optimizer)
            prepared.await_copies()
        # Who accumulates without `accumulate` runs several backwards before the first step.
        outside = self.settled == -1 and accumulation.steps > 1 and not accumulation.serial
        if outside and accumulation.total_backwards - self.seen_backwards == 1:
            warnings.warn(
                f"gradient_accumulation_steps={accumulation.steps}, but optimizer.step() was called after one "
                f"backward, outside of accumulate(): every batch is a step. Write `with "
                f"accelerator.accumulate(model):` around the body of the loop.",
                stacklevel=level_of_the_user(),
            )
        self.checked = True

    def _check_frozen(self, optimizer: Optimizer) -> None:
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{type(optimizer).__name__} trains parameters that were unfrozen after prepare(): {listed(thawed)}. "
                f"Nobody averages their gradients. Unfreeze before prepare(); or call accelerator.free_memory(), and "
                f"prepare again."
            )

    def _check_gradients(self, optimizer: Optimizer) -> None:
        prepared = self.owner()
        # Inside `LocalSGD` each rank is meant to step by itself.
        if prepared is not None and prepared.check_gradients is not None and prepared.apart is None:
            prepared.check_gradients(optimizer)

    def _checked(self, optimizer: Optimizer, argument: Any) -> Any:
        def closure() -> Any:
            loss, prepared = argument(), self.owner()
            self._check_gradients(optimizer)
            joins = self.accumulation.feed.joining
            return loss if joins or prepared is None else prepared.mean_over_ranks(loss)

        return closure if callable(argument) else argument

    def _check_backward(self) -> None:
        accumulation = self.accumulation
        if accumulation.lacks_backward(self.settled):
            found = f"no accelerator.backward(loss) ran in this window of {accumulation.size} micro-batches"
        elif accumulation.lacks_synchronisation:
            raise RuntimeError(
                f"optimizer.step() was called, but the micro-batch that closes this window of {accumulation.size} ran "
                f"no backward, which averages the gradients. Leave the step out together with the backward, and call "
                f"optimizer.zero_grad()."
            )
        elif self._needs_backward and self.seen_backwards == accumulation.total_backwards:
            found = "no accelerator.backward(loss) ran since its last step"
        else:
            return
        raise RuntimeError(
            f"optimizer.step() was called, but {found}: gradients of a plain loss.backward() would be neither scaled "
            f"nor averaged over the window. Replace loss.backward() by accelerator.backward(loss)."
        )


_watched: weakref.WeakKeyDictionary[Prepared, tuple[Accumulation, bool]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_register = cache(register_optimizer_step_pre_hook)  # torch calls it before each step of any optimizer


def watch_unprepared(prepared: Prepared, accumulation: Accumulation, scales: bool) -> None:
    """Has other optimizers of prepared models warn, once, at a step for which gradients are not ready."""
    _watched[prepared] = accumulation, scales
    _register(_warn_if_unprepared)


def _warn_if_unprepared(optimizer: Optimizer, *_: object) -> None:
    if _GATE in optimizer.__dict__ or optimizer in _warned:
        return
    early = [each for each, (window, scales) in _watched.items() if window.open or (scales and window.backwards)]
    for prepared in early:
        # An optimizer inside of a prepared one, or around one, is held back with it.
        held_back = any(gate._inside for gate in prepared.gates()) or any(map(gate_of, vars(optimizer).values()))
        trains = any(not each.ids.isdisjoint(map(id, held_by(optimizer))) for each in prepared._training())
        if trains and not held_back:
            _warned.add(optimizer)
            what = f"{type(optimizer).__name__} trains a prepared model, but was not prepared: it steps inside windows,"
            warnings.warn(f"{what} and on scaled gradients. Pass it to prepare().", stacklevel=level_of_the_user())


def gate_of(optimizer: object) -> OptimizerGate | None:
    """The gate that a prepared optimizer wears, None if it wears none."""
    gate: OptimizerGate | None = getattr(optimizer, "__dict__", {}).get(_GATE)
    return gate


def held_by(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """The parameters in an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _gated_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    return vars(optimizer)[_GATE].step(optimizer, *args, **kwargs)


def _known_to_schedulers(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    return vars(optimizer)[_GATE].step(optimizer, *args, **kwargs)


# An LR scheduler wraps `optimizer.step` to learn that it was called, and warns at its first step if the mark of the wrapper
# is gone. It is still there, under ours.
_known_to_schedulers._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _gated_zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    vars(optimizer)[_GATE].zero_grad(optimizer, *args, **kwargs)


def _watched_add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
    vars(optimizer)[_GATE].add_param_group(param_group)


def _reduced_bare(optimizer: Optimizer, protocol: Any) -> Any:
    # A copy belongs to no Accelerator. torch's own optimizers leave instance attributes out, but a `__getstate__` of somebody
    # else's may give all of them, and then the copy would step through the gate of the original.
    parts = list(type(optimizer).__reduce_ex__(optimizer, protocol))
    if len(parts) > 2 and isinstance(parts[2], dict):
        before = vars(optimizer)[_GATE]._shadowed
        state = {name: value for name, value in parts[2].items() if not name.startswith("_accel_")}
        kept = state.keys() - (set(_SHADOWED) - before.keys())
        parts[2] = {name: before.get(name, value) for name, value in state.items() if name in kept}
    return tuple(parts)


def place_state(optimizer: Optimizer) -> None:
    """Moves an optimizer's state to the devices of its parameters; 0-d tensors where kernels read them there."""
    for group in optimizer.param_groups:
        steps_too = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            for name, value in (state := optimizer.state.get(parameter, {})).items():
                if isinstance(value, torch.Tensor) and (value.dim() or steps_too) and value.device != parameter.device:
                    state[name] = value.to(parameter.device)

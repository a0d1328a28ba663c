"""Dynamic loss scaling: small gradients survive float16, and overflowed steps are left out.

The loss is multiplied by a scale before its backward, and the gradients are divided by it before
the step. An overflow makes the scale smaller; many steps in a row without one make it larger
(Micikevicius et al., "Mixed Precision Training", 2018). The state machine is
`torch.amp.GradScaler`; here is when it is updated, and what it does with the pieces of a sharded
gradient.

**When the scale changes.** Once for all optimizers that step one after the other: what they found
is collected, and the scale changes just before the next loss is scaled. So every gradient that is
there when an optimizer steps has one scale, whichever of several steps first. Optimizers that step
by turns, each after a backward of its own, give one update per turn. One that waits meanwhile, with
gradients of the old scale, has them multiplied to match the new one, also those that the strategy
holds outside of `.grad`.

**What is unscaled.** The gradients of an optimizer, from the first clipping after a backward to the
step, or until they are cleared, by whomever. Meanwhile, a backward may run for other optimizers. If
it adds to these, the sum has no scale: the next clipping or step raises.

**What it costs.** One pass over the gradients, and one wait for the device per step, to learn
whether to leave it out. Where ranks hold parts of the parameters, also one all-reduce of one
number. Optimizers whose kernels take the scale and the overflow themselves (`fused=True`) need no
wait, unless an LR scheduler goes by whether they have stepped, or somebody asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler, OptState

from accel_core import SKIPPED
from accel_core.api.precision import Gradients, SkippedIf, held_by
from accel_core.api.strategy import gate_of
from accel_precision.handlers import GradScalerKwargs

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import World
    from accel_core.api.precision import Prepared

_STATE = {"scale", "growth_tracker"}
_Held = tuple["Optimizer", list[torch.Tensor], list[tuple[int, int]]]


class LossScaling:
    """A loss scale for any number of optimizers, on any kind of device.

    Its state is the scale, and how many steps in a row had no overflow; how it changes is said by
    the options alone. A copy has the same state, and belongs to no world.

    Args:
        options: see `GradScalerKwargs`.
    """

    def __init__(self, options: GradScalerKwargs) -> None:
        self.options = options
        self._scaler = _Scaler(options)
        self._owners: WeakSet[Prepared] = WeakSet()  # what prepared the optimizers that were seen

    def start(self, world: World, replicated: bool) -> None:
        """Puts the scale on the device of `world`.

        Args:
            world: the processes.
            replicated: whether all ranks see the same gradients. Otherwise, unscaling becomes a
                collective of all ranks, so that they leave out the same steps.
        """
        self._scaler.scale(torch.zeros((), device=world.device))
        if world.size > 1 and not replicated:
            self._scaler.agree = partial(_agree, world)

    @property
    def value(self) -> float:
        """The current loss scale; 1.0 if scaling is off. Waits for the device."""
        return self._scaler.get_scale()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies a loss of any shape; a 0-d result has at least single precision."""
        held = self._held() if self._scaler.stages else ()
        self._settle()
        scaled = self._scaler.scale(loss)
        if held and scaled.requires_grad:
            _behind_backward(scaled, partial(_mark_mixed, held))
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` in place, once between a backward and the step.

        Raises:
            RuntimeError: if a backward has added to gradients that were unscaled before.
        """
        if self.options.enabled:
            self._meet(optimizer)
            self._scaler.unscale_again(optimizer)

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Unscales what is not unscaled yet, and steps if the gradients are finite.

        Args:
            optimizer: whose gradients count.
            step: its own step.

        Returns:
            What `step` returned, or `accel_core.SKIPPED`, or where only the device knows, which.

        Raises:
            RuntimeError: if the step has a closure, or a backward has added to unscaled gradients.
        """
        if not self.options.enabled:
            return step()
        if isinstance(step, partial):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called with arguments under loss scaling, which looks at the gradients "
                f"before the step, and a closure computes them in it. Call step() without arguments, or choose "
                f"mixed_precision='bf16'."
            )
        self._meet(optimizer)
        if self._scaler.agree is None and _unscales_itself(optimizer):
            return SkippedIf(self._scaler.step_fused(optimizer, step))
        return SKIPPED if self._scaler.finish(optimizer) else step()

    def state_dict(self) -> dict[str, Any]:
        """The state that the next loss will see, without changing it. Empty if scaling is off."""
        return self._scaler.settled_state() if self.options.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over; steps that were taken before are forgotten.

        Raises:
            ValueError: if scaling is off here and was on there, or the reverse; if it is no state
                of a loss scale.
        """
        self._check_state(state)
        if self.options.enabled:
            # torch compares for equality: beyond the interval the scale would never grow again.
            tracker = min(state["growth_tracker"], self.options.growth_interval - 1)
            self._scaler.restart(float(state["scale"]), tracker)

    def __str__(self) -> str:
        options = self.options
        if not options.enabled:
            return "off"
        return (
            f"dynamic, {self.value:g} now; times {options.growth_factor:g} after {options.growth_interval} steps in a row "
            f"without overflow, times {options.backoff_factor:g} after one"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "state": self.state_dict()}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        LossScaling.__init__(self, kept["options"])
        self.load_state_dict(kept["state"])

    def _settle(self) -> None:
        """Updates the scale if optimizers have stepped."""
        if self._scaler.is_due:
            self._scaler.update_stepped(list(self._waiting()))

    def _waiting(self) -> Iterator[torch.Tensor]:
        """Gradients of optimizers that neither stepped nor unscaled, wherever they are kept."""
        recorded = self._scaler.stages
        for owner in self._owners:
            for optimizer in owner.optimizers:
                if id(optimizer) not in recorded:
                    yield from _gradients(optimizer)

    def _held(self) -> list[_Held]:
        """Optimizers whose unscaled gradients wait for their step. Forgets those that were cleared."""
        held = []
        for owner in self._owners:
            for optimizer in owner.optimizers:
                gate, waits = gate_of(optimizer), self._scaler.is_unscaled(optimizer)
                if gate is None or not (waits or gate.unscaled):
                    continue
                waiting = _gradients(optimizer) if waits and gate.unscaled is not False else []
                if waiting:
                    held.append((optimizer, waiting, _seen(waiting)))
                else:  # by hand, by the model, or by the optimizer; or they were clipped once more behind the step
                    self._scaler.drop(optimizer)
                    gate.unscaled = False
        return held

    def _meet(self, optimizer: Optimizer) -> None:
        """An optimizer is about to unscale, or to step."""
        gate = gate_of(optimizer)
        if gate is None:
            return
        if gate.unscaled is None:
            raise RuntimeError(
                f"The gradients of {type(optimizer).__name__} were unscaled, by clip_grad_norm_() say, and then a backward added "
                f"others, which are multiplied by the loss scale. Clip after the last backward before optimizer.step(); or "
                f"call optimizer.step() or optimizer.zero_grad() before the next backward."
            )
        owner = gate.owner()
        if owner is not None:
            self._owners.add(owner)  # which knows the optimizers beside this one, also those that have never stepped
        if not gate.unscaled:
            self._scaler.drop(optimizer)
        if self._scaler.has_stepped(optimizer) and gate.seen_backwards != gate.accumulation.total_backwards:
            self._settle()  # the loss of this backward was scaled on another rank, by a strategy that scales on some

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not self.options.enabled and state:
            raise ValueError(
                f"A loss scale of {state.get('scale')} was to be loaded, and loss scaling is off here (enabled=False). Leave "
                f"enabled=False out, as in the run that saved it."
            )
        if self.options.enabled and set(state) != _STATE:
            found = (
                f"the keys {', '.join(map(str, state))}" if state else "nothing, as a run with enabled=False saves it"
            )
            raise ValueError(
                f"The state of a loss scale was to be loaded, which has the keys {', '.join(sorted(_STATE))}; found {found}. "
                f"Load a checkpoint that was saved under loss scaling, or pass GradScalerKwargs(enabled=False)."
            )


class _Scaler(GradScaler):
    """torch's scaler, for gradients of any dtype, on several devices, and cut into pieces.

    What torch keeps under private names is touched in `stages`, `update_stepped` and
    `_unscale_grads_` alone; tried with 2.13.
    """

    def __init__(self, options: GradScalerKwargs) -> None:
        # The type of device serves torch only to switch the scaler off where CUDA is missing; the tensors say where they are.
        super().__init__(
            "cpu",
            options.init_scale,
            options.growth_factor,
            options.backoff_factor,
            options.growth_interval,
            options.enabled,
        )
        self.agree: Callable[[torch.Tensor], None] | None = None

    @property
    def stages(self) -> dict[int, dict[str, Any]]:
        """The records since the last update, by the optimizer's `id`: its stage, and any overflow.

        torch has no public way to say that an optimizer has stepped without calling `step`, which
        calls the optimizer's and does not tell whether it did.
        """
        return self._per_optimizer_states if self.is_enabled() else {}

    @property
    def is_due(self) -> bool:
        """Whether an optimizer has stepped since the last update."""
        return any(state["stage"] is OptState.STEPPED for state in self.stages.values())

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has stepped since the last update."""
        return self.stages[id(optimizer)]["stage"] is OptState.STEPPED

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has unscaled and not stepped."""
        state = self.stages.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def drop(self, optimizer: Optimizer) -> None:
        """Counts gradients that were unscaled, and have been dropped, as a step."""
        if self.is_unscaled(optimizer):
            # For their overflow: a loop that drops whatever is not finite would never see a smaller scale.
            self.stages[id(optimizer)]["stage"] = OptState.STEPPED

    def unscale_again(self, optimizer: Optimizer) -> None:
        """Unscales, also where gradients that were unscaled have been dropped without a step."""
        if self.has_stepped(optimizer):
            return  # what is there has been unscaled for that step
        if self.is_unscaled(optimizer):  # nobody watches over this optimizer
            self.drop(optimizer)
            state = self.stages.pop(id(optimizer))
            self.stages[id(state)] = state
        self.unscale_(optimizer)

    def finish(self, optimizer: Optimizer) -> bool:
        """The optimizer steps now. Returns whether it found an overflow. Waits for the device."""
        state = self.stages[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        state["stage"] = OptState.STEPPED
        return any(found.item() for found in state["found_inf_per_device"].values())

    def step_fused(self, optimizer: Any, step: Callable[[], Any]) -> torch.Tensor:
        """Steps, in kernels that unscale; returns whether they found an overflow. Does not wait."""
        state = self.stages[id(optimizer)]
        unscaled = state["stage"] is OptState.UNSCALED
        if not unscaled:
            self._check_inf_per_device(optimizer)
        [found] = state["found_inf_per_device"].values()
        own = getattr(optimizer, "grad_scale", None)  # of the user
        scale = own if unscaled else self._scale if own is None else self._scale * own
        optimizer.grad_scale, optimizer.found_inf = scale, found.clamp_(max=1.0)
        try:
            step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        state["stage"] = OptState.STEPPED
        skipped: torch.Tensor = found.bool()
        return skipped

    def update_stepped(self, waiting: Sequence[torch.Tensor]) -> None:
        """Updates the scale from the optimizers that stepped; unscaled gradients that wait stay so.

        Args:
            waiting: gradients that were scaled by the scale so far, and are multiplied in place to
                match the new one. Does not wait for the device.
        """
        unscaled = {key: state for key, state in self.stages.items() if state["stage"] is not OptState.STEPPED}
        for key in unscaled:
            del self.stages[key]
        assert self._scale is not None, "something was unscaled by it"
        before = self._scale.clone() if waiting else None
        self.update()
        self.stages.update(unscaled)
        if before is not None:
            factor = self._scale / before
            with torch.no_grad():
                for (device, _), gradients in _by_kind(waiting).items():
                    torch._foreach_mul_(gradients, factor.to(device))

    def settled_state(self) -> dict[str, Any]:
        """The scale and its tracker as they will be after the update that is due."""
        after: GradScaler = self
        if self.is_due:
            after = twin = _Scaler(GradScalerKwargs())
            twin.load_state_dict(self.state_dict())
            found = [each for state in self.stages.values() for each in _found(state)]
            twin.scale(torch.zeros((), device=found[0].device))
            twin.stages[0] = {
                "stage": OptState.STEPPED,
                "found_inf_per_device": {found[0].device: torch.stack(found).sum()},
            }
            twin.update()
        state = after.state_dict()
        return {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]}

    def restart(self, scale: float, tracker: int) -> None:
        """Goes on with a scale, and forgets what was recorded."""
        self.stages.clear()
        self.load_state_dict({**self.state_dict(), "scale": scale, "_growth_tracker": tracker})

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: ARG002
    ) -> dict[torch.device, torch.Tensor]:
        # Overridden as torch's own ShardedGradScaler does. torch's loop gives DTensors of several meshes and plain tensors to
        # one kernel, which refuses the mixture; it refuses float16 gradients; and for an optimizer without gradients, which a
        # shard may be, it records nothing.
        found = {found_inf.device: found_inf}
        with torch.no_grad():
            for (device, _), gradients in _by_kind(_gradients(optimizer)).items():
                if device not in found:
                    found[device] = torch.zeros_like(found_inf, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], inv_scale.to(device))
            for device, overflow in found.items():
                if device != found_inf.device:
                    found_inf += overflow.to(found_inf.device)
            if self.agree is not None:
                self.agree(found_inf)
        return {found_inf.device: found_inf}


def _unscales_itself(optimizer: Any) -> bool:
    """Whether the kernels of its own step leave it out by themselves, with all gradients in `.grad`."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not _reads_attributes(type(optimizer).step):
        return False
    gate = gate_of(optimizer)
    owner = None if gate is None else gate.owner()
    return (gate is None or gate.engine is None) and (owner is None or not owner.gradients.are_elsewhere)


@cache
def _reads_attributes(step: Any) -> bool:
    """Whether a step finds the scale where torch's fused ones do: older ones take the scaler as an argument."""
    return "grad_scaler" not in inspect.signature(step).parameters


@torch.no_grad()  # under which the memory of a DTensor is no part of a graph
def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    """This rank's gradients of an optimizer, live, wherever they are kept, or set aside during a window."""
    parameters = list(held_by(optimizer))
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Entries of one index are added first, for their sum may overflow where none of them does.
            parameter.grad = parameter.grad.coalesce()
    gate = gate_of(optimizer)
    owner = None if gate is None else gate.owner()
    gradients, own = Gradients() if owner is None else owner.gradients, {id(each) for each in parameters}
    aside = [gradient for parameter, gradient in gradients.aside if id(parameter) in own]
    return [_local(gradient) for gradient in (*gradients.tensors(parameters), *aside)]


def _seen(gradients: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """What changes with the gradients: where they are, and how often they were written to."""
    return [(gradient.data_ptr(), gradient._version) for gradient in gradients]


def _mark_mixed(held: Iterable[_Held]) -> None:
    """A backward has ended: optimizers whose unscaled gradients it has changed can neither step nor clip."""
    for optimizer, _, seen in held:
        gate = gate_of(optimizer)
        if gate is not None and _seen(_gradients(optimizer)) != seen:
            gate.unscaled = None


def _behind_backward(loss: torch.Tensor, call: Callable[[], None]) -> None:
    """Has `call` called at the end of the backward of `loss`."""
    engine: Any = torch.autograd.Variable._execution_engine
    # Queued from the queue: behind what strategies have queued, who deliver gradients at the end of a backward.
    loss.register_hook(lambda _: engine.queue_callback(lambda: engine.queue_callback(call)))


def _local(gradient: Any) -> torch.Tensor:
    """The real dense numbers of a gradient that are in the memory of this rank."""
    if gradient.is_sparse:
        gradient = gradient.values()
    elif hasattr(gradient, "to_local"):  # a DTensor, without importing what it comes from
        gradient = gradient.to_local()
    result: torch.Tensor = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return result


def _by_kind(gradients: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """By device and dtype, as the kernels over many tensors want it."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return found


def _found(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return list(state["found_inf_per_device"].values()) if state["stage"] is OptState.STEPPED else []


def _agree(world: World, found: torch.Tensor) -> None:
    with world.collective("unscale_gradients()"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=world.channel().group)

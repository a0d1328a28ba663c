"""Steps of the loop: accumulation windows, backwards, gradients, and contexts of model calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_core.facade.accelerator_parts import AcceleratorParts
from accel_core.facade.process_methods import shown
from accel_core.loading.index_source import has_state
from accel_core.loop import fused_backward
from accel_core.loop.accumulation import Accumulate
from accel_core.loop.forward_backward import default_inputs
from accel_core.loop.optimizer_gate import gate_of, held_by
from accel_core.loop.preparation import check_reading
from accel_core.options.handlers import GradientAccumulationPlugin

if TYPE_CHECKING:
    from accel_core.loop.forward_backward import Inputs, LossFn
    from accel_core.loop.profiling import ProfileKwargs
    from accel_core.options.handlers import AutocastKwargs


class LoopMethods(AcceleratorParts):
    """The methods of a training step."""

    step: int = shown("_accumulation.position", "Micro-batches of the open window so far; 0 when none is open.")
    step_scheduler_with_optimizer: bool = shown(
        "_parts.scheduler_rule.with_optimizer", "Whether `scheduler.step()` waits for the optimizer."
    )

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a window; assignable between two, or after an error, which ends one."""
        return self._accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        GradientAccumulationPlugin(num_steps=steps)  # which checks it
        self._accumulation.refuse_in_window("gradient_accumulation_steps", steps)
        given_up = self._accumulation.open
        self._accumulation.resize(steps)
        for optimizer in self._prepared.optimizers if given_up else ():
            optimizer.zero_grad()

    @property
    def scaler(self) -> Any:
        """The loss scaler, with `state_dict`, `load_state_dict` for checkpoints; None if none."""
        return next(iter(self._scales()), None) if self._parts.activation.owners["scale_loss"] else None

    @property
    def sync_gradients(self) -> bool:
        """Whether no window of accumulation is open: `optimizer.step()` would step now.

        A loop that counts its micro-batches itself, without `accumulate`, assigns it before each.
        """
        return not self._accumulation.open

    @sync_gradients.setter
    def sync_gradients(self, steps: bool) -> None:
        self._accumulation.hold(not steps)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer changed nothing (an overflow, say)."""
        return any(gate.was_skipped for gate in self._prepared.gates())

    def accumulate(self, *models: nn.Module, closes: bool | None = None) -> AbstractContextManager[None]:
        """One micro-batch of a window: gradients add up; the optimizer steps when it closes.

        A window has `gradient_accumulation_steps` micro-batches, fewer at the end of a prepared
        loader; its gradient is their mean. Gradients of `models` (none given: all prepared ones)
        stay local until it closes. `closes` is for loops that count themselves: whether this
        micro-batch closes the window; say it in all of them, and the same on every rank.
        """
        return Accumulate(self._accumulation, models or self._prepared.trained(), self._relay.no_sync, closes)

    def backward(self, loss: torch.Tensor, learning_rate: float | None = None, **kwargs: Any) -> None:
        """Replaces `loss.backward()`: scales for window and precision, synchronises when it closes.

        `loss` is a scalar, the mean over this rank's micro-batch; outside `accumulate` its gradient
        is divided by `gradient_accumulation_steps`. `learning_rate` is for optimizers that step in
        the backward; other keywords are those of `torch.Tensor.backward`. Raises `RuntimeError` in
        a larger world if an optimizer holds parameters of no prepared model.
        """
        if self._prepared.unchecked:
            self._prepared.check_orphans()
            check_reading(self._feed, self._layout.shard.count)
        if loss.dim() and loss.numel() != 1 and "gradient" not in kwargs:
            shape = tuple(loss.shape)
            raise ValueError(f"backward() was given a loss of shape {shape}, expected a scalar, e.g. loss.mean().")
        if learning_rate is not None or self._prepared.fused:
            owners = self._parts.activation.owners
            known = (self._prepared.optimizers, self._accumulation, self._world, owners)
            fused_backward.fused_backward(loss, learning_rate, *known, kwargs)
            return
        accumulation = self._accumulation
        accumulation.count_backward()
        relay = self._relay
        weight = accumulation.weight if accumulation.inside else 1.0 / accumulation.steps
        closes = not accumulation.open
        if closes and self._world.watch is not None:
            with self._world.watch.collective("backward()"):
                relay.backward(relay.scale_loss(loss), weight, closes, kwargs)
            relay.synchronise_gradients()  # behind the mark: a rank that has more to send than the others is told from them
            if (mark := self._world.mark) is not None:
                mark.record()
        else:
            relay.backward(relay.scale_loss(loss), weight, closes, kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """`backward(loss, learning_rate=learning_rate)` under its older name."""
        self.backward(loss, learning_rate=learning_rate)

    def forward_backward(
        self, model: nn.Module, micro_batches: Iterable[Any], loss_fn: LossFn, inputs: Inputs | None = None
    ) -> torch.Tensor:
        """Runs a whole window, so that batches of different sizes weigh what they hold. Collective.

        The gradient is that of (sum of losses) / (sum of weights) over the micro-batches of all
        ranks. `loss_fn(output, batch)` gives the loss *summed* over the micro-batch, 0-d, and its
        weight: over how many tokens or samples. `inputs(batch)` gives the model's arguments, a
        tuple and a dict; None: a mapping as keywords, of a tuple or list the first element. Returns
        the weighted mean loss, 0-d, detached, on `device`; nan if all weights are 0. In
        `torch.no_grad()` it is an evaluation: forwards alone, by pipelines too, and `loss_fn` is
        called where outputs are, on the last stage. Raises `ValueError` without a micro-batch,
        `RuntimeError` in a window or `join_uneven_inputs`.
        """
        fused_backward.refuse("forward_backward()", self._prepared.optimizers)
        if self._feed.joining:
            what = "forward_backward() counts its window over all ranks, and inside join_uneven_inputs() some may"
            raise RuntimeError(f"{what} have ended. Take the block away: numbers of micro-batches may differ.")
        if self._accumulation.inside or self._accumulation.open:
            asked = "forward_backward() runs a window of its own, but a window of accumulate() is open."
            raise RuntimeError(f"{asked} Take the call out of accumulate().")
        if self._prepared.unchecked:
            self._prepared.check_orphans()
            check_reading(self._feed, self._layout.shard.count)
        self._accumulation.whole_window()
        with self._world.collective("forward_backward()"):
            relay, inputs = self._relay, inputs or default_inputs
            mean = relay.forward_backward(model, micro_batches, loss_fn, inputs, relay.scale_loss)
        if (mark := self._world.mark) is not None:
            mark.record()
        if torch.is_grad_enabled():
            self._accumulation.count_backward()
        return mean

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Backwards of forwards inside leave gradients local, of `model` or of all trained ones.

        So does a later backward of such a forward, until `trigger_sync_in_backward`.
        """
        hook = self._relay.no_sync
        return _on_all(hook, self._prepared.trained()) if model is None else hook(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Has the next backward of `model` synchronise all gradients, despite `no_sync`."""
        return self._relay.trigger_sync_in_backward(model)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A block for unequal numbers of batches per rank. Collective at its end, if models join.

        A rank that has ended takes part in the others' steps with zeros, and in the end all are as
        the rank that went on longest. Windows close by count alone inside, and one that is open at
        the end is dropped with a warning. Make no other collectives there. `joinables`: the models
        that are trained, and others of torch's `Joinable`; `even_batches` overrides that option.
        """
        from accel_core.loop.uneven_inputs import as_joinables, evenness, joined

        joining = as_joinables(joinables) if self.use_distributed else []
        with ExitStack() as stack:
            stack.enter_context(evenness(self._feed, even_batches, bool(joining)))
            if joining:
                stack.enter_context(joined(joining, self._world, self._prepared, self._accumulation, self._scales()))
            yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scales gradients in place to a joint norm of at most `max_norm`, after unscaling them.

        Takes one parameter or any iterable of them. Returns the norm before clipping, 0-d, of order
        `norm_type`. While a window is open nothing is clipped, and the norm is that of this rank's
        pending gradients, still scaled. Collective under a strategy that shards gradients.
        """
        clipped, strategy = self._unscaled("clip_grad_norm_()", parameters), self._parts.strategy
        if self._clips_kept:
            if not strategy.replicates_parameters:
                raise RuntimeError(
                    f"clip_grad_norm_() was called, but nobody knows the norm of the gradients that {type(strategy).__name__} keeps: it has "
                    f"to implement the hook clip_gradients, or to declare replicates_parameters = True."
                )
            clipped = self._prepared.gradients.stand_ins(clipped)
        if not self._accumulation.open:
            return self._relay.clip_gradients(clipped, max_norm, norm_type)
        if self._parts.activation.owners["clip_gradients"] is None:
            return nn.utils.get_total_norm([each.grad for each in clipped if each.grad is not None], norm_type)
        return self._relay.clip_gradients(clipped, torch.inf, norm_type)  # the strategy's norm: nothing is larger

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps each gradient element to [-clip_value, clip_value], unless a window is open."""
        clipped = self._unscaled("clip_grad_value_()", parameters)
        if not self._accumulation.open:
            if self._prepared.gradients.are_elsewhere:
                clipped = self._prepared.gradients.stand_ins(clipped)
            nn.utils.clip_grad_value_(clipped, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Unscales gradients of one, several or all (None) optimizers, once between two steps."""
        given = self._prepared.optimizers if optimizer is None else optimizer
        for each in [given] if isinstance(given, Optimizer) else given:
            gate = gate_of(each)
            if gate is None:
                kind = type(each).__name__
                raise ValueError(f"unscale_gradients() was given a {kind} that is not prepared: use prepare().")
            if not self._accumulation.open:
                gate.unscale(each)

    def autocast(
        self, cache_enabled: bool | None = None, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
        """Runs a block in the precision's compute dtype; in full precision nothing happens.

        `cache_enabled`: whether weights that were cast are kept until the block ends (None: as the
        handler says); `autocast_handler`: options for this block instead of the Accelerator's.
        """
        compute = self._parts.precision.policy.compute
        if compute is None:
            return nullcontext()
        handler = autocast_handler or self._parts.autocast
        cache = handler.cache_enabled if cache_enabled is None else cache_enabled
        return torch.autocast(self.device.type, dtype=compute, enabled=handler.enabled, cache_enabled=cache)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Shares sequences out over context-parallel ranks; does nothing without such a strategy.

            with accelerator.maybe_context_parallel([ids, labels], [1, 1]):
                accelerator.backward(loss_fn(model(ids), labels))   # each rank has a part of every sequence

        `buffers` are changed in place; `buffer_seq_dims` has the dim of the sequence of each. Those
        in `no_restore_buffers` stay cut behind the block.
        """
        return self._relay.context_parallel(buffers or (), buffer_seq_dims or (), no_restore_buffers or ())

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Profiles a block with torch: `with accelerator.profile() as prof:`. No collective.

        `profile_handler` holds for this block instead of the one among `kwargs_handlers`.
        """
        from accel_core.loop.profiling import ProfileKwargs, profile

        return profile(profile_handler or self._parts.handlers.get(ProfileKwargs) or ProfileKwargs(), self._world)

    def _scales(self) -> list[Any]:
        return [self._parts.precision] if has_state(self._parts.precision) else []

    def _unscaled(self, call: str, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[Any]:
        """The parameters as a list, with gradients unscaled unless a window is open."""
        fused_backward.refuse(call, self._prepared.optimizers)
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self._accumulation.open and self._parts.activation.owners["unscale_gradients"] is not None:
            clipped = {id(parameter) for parameter in given}
            for optimizer in self._prepared.optimizers:
                gate = gate_of(optimizer)
                if gate is not None and any(id(parameter) in clipped for parameter in held_by(optimizer)):
                    gate.unscale(optimizer)
        return given


@contextmanager
def _on_all(hook: Callable[[nn.Module], AbstractContextManager[None]], models: Sequence[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(hook(model))
        yield

"""The DeepSpeed engine of one model, stepped by one optimizer of the user's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_checkpoint import flat_range, on_each_rank, pieces_of
from accel_core.api.component import flatten
from accel_core.api.layouts import Elementwise, GradientState, Partial
from accel_deepspeed import clipping, optimizer_double
from accel_deepspeed.communication import environment_of, shown_rank
from accel_deepspeed.engine_internals import (
    Fragment,
    Partitions,
    ShardedPartitions,
    begin_backward,
    end_backward,
    end_engine,
    partitions_of,
    shape_of,
)
from accel_deepspeed.flat_state import FlatState

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import World
    from accel_deepspeed.state_files import StateFiles

_live: list[ModelEngine] = []


def live_engines() -> list[ModelEngine]:
    """All engines of this process, of all its Accelerators, in the order of their making."""
    return _live.copy()


def engine_that_steps(parameter: torch.Tensor) -> ModelEngine | None:
    """The engine that steps a parameter from a part of it; None if there is none."""
    return next((engine for engine in _live if id(parameter) in engine.fragments), None)


class ModelEngine:
    """A model whose gradients DeepSpeed synchronises, and whose parameters it steps from stage 1.

    The user's loop says when: every backward is run by the strategy, which tells each engine of it.
    An engine takes part in a backward if the loss came through an output of its model.

    Args:
        model: of the user, trained, placed.
        optimizer: the one that holds all its trained parameters.
        steps: whether DeepSpeed steps it; in stage 0 it steps by itself.
        config: complete, for `deepspeed.initialize`.
        world: the processes.
        files: where masters and optimizer state are kept; None: in memory.

    Attributes:
        state: of the optimizer, in partitions; None in stage 0, where the user's own steps.
        fragments: by the `id` of a parameter that is stepped here, its part on this rank.
        gathered: what ranks have told each other of the gradients when they clipped them last, as
            `clipping.joint_norm` returns it.
        clipped: whether the loop has clipped the gradients, so that nothing else is to.
        has_gradients: whether a backward has synchronised since the last step.
        holds_back: whether there are gradients that no backward has sent.
        synchronises: whether the next backward does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: bool,
        config: Mapping[str, Any],
        world: World,
        files: StateFiles | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        double: Optimizer | None = None
        self._sources: Sequence[dict[str, Any]] = ()
        if steps:
            double, self._sources = optimizer_double.double_of(optimizer, list(model.parameters()))
        self.engine = _initialized(model, double, dict(config), world)
        self._prologue = self.engine._backward_prologue
        self.engine._backward_prologue = _nothing
        self.engine._backward_prologue_per_tensor = self._reached
        self._world = world
        self._shown_rank = shown_rank(world)
        self._partitions: Partitions | None = None
        self.state: FlatState | None = None
        self.fragments: Mapping[int, Fragment] = {}
        self._stepped: Collection[nn.Parameter] = ()
        if steps:
            self._partitions = partitions_of(self.engine)
            self._partitions.on_ready = self._begin
            if isinstance(self._partitions, ShardedPartitions):
                self._settle_masters(self._partitions, files)
            self.state = FlatState(optimizer, self._partitions, type(model).__name__, files)
            self.fragments, self._stepped = self.state.fragments, self.state.parameters.values()
        self._frozen = [
            each for each in model.parameters() if id(each) not in self.fragments and not each.requires_grad
        ]
        self._held = _count(optimizer)
        self._earlier: Sequence[torch.Tensor] = ()
        self.gathered: torch.Tensor | None = None
        self.clipped = False
        self._took_part = False
        self.has_gradients = self.holds_back = False
        self.synchronises = True
        self._publishing: torch.utils.hooks.RemovableHandle | None = None
        if self.state is not None and any(optimizer.state.get(parameter) for parameter in self._stepped):
            self.state.take_whole()
        _live.append(self)

    def _settle_masters(self, partitions: ShardedPartitions, files: StateFiles | None) -> None:
        if files is None:
            partitions.join_memory()
        else:
            on_each_rank(self._world, "for masters to be put into files", lambda: partitions.keep_in(files))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], synchronises: bool) -> Any:
        """Calls the model. Whether the backward behind it synchronises is decided here."""
        if not torch.is_grad_enabled():
            with self._shown_rank:
                return self.model(*args, **kwargs)
        self.synchronises = synchronises
        with self._shown_rank:
            output = self.engine(*args, **kwargs)
        if type(output) is not torch.Tensor:  # DeepSpeed looks into plain containers only
            for leaf in flatten(output)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._reached)
        return output

    def expect_backward(self) -> None:
        """A backward is about to run, perhaps through this model."""
        self._took_part = False
        begin_backward(self.engine, self.synchronises)

    def _reached(self, gradient: Any) -> Any:
        """Begins the backward at an output of the model. Returns the gradient undivided."""
        self._begin()
        return gradient

    def _begin(self) -> None:
        """Takes part in the backward, from an output, or from a gradient if outputs are hidden."""
        if not self._took_part:
            self._took_part = True
            if self.synchronises and self._partitions is not None:
                self._earlier = self._partitions.begin(self.gradients())
            self._prologue()

    def end_backward(self, failed: bool) -> None:
        """Ends the backward: sends gradients not held back. A collective if the model took part."""
        hidden = self._partitions is None and any(each.grad is not None for each in self.model.parameters())
        if (self._took_part or hidden) and not failed:
            if self.synchronises and self._partitions is not None:
                self._partitions.send_rest()
            self.engine._backward_epilogue()
            if self.synchronises:
                self.has_gradients, self.holds_back, self.gathered, self.clipped = True, False, None, False
                for gradient, earlier in zip(self.gradients(), self._earlier, strict=False):
                    gradient.add_(earlier)
            else:
                self.holds_back = True
        self._earlier = ()
        end_backward(self.engine)

    def gradients(self) -> Sequence[torch.Tensor]:
        """This rank's averaged gradients, flat and live; none before a backward synchronised."""
        if not self.has_gradients or self._partitions is None:
            return ()
        found, factor = self._partitions.gradients(), self._partitions.factor
        if factor is not None:
            clipping.scale(found, factor)
            self._partitions.factor = None
        return found

    def scale_in_step(self, factor: torch.Tensor) -> bool:
        """Has the step scale gradients, if only it has them in the precision of the masters."""
        partitions = self._partitions
        if partitions is None or all(
            g.dtype == m.dtype for g, m in zip(self.gradients(), partitions.masters, strict=True)
        ):
            return False
        partitions.factor = factor
        return True

    @property
    def used(self) -> int:
        """A hash of the parameters used since the last step; 0 where ranks may differ."""
        return 0 if self._partitions is None else self._partitions.used

    def sent_gradients(self, wanted: Collection[int]) -> Sequence[torch.Tensor]:
        """This rank's averaged gradients of parameters by `id`, live; whole partitions for all."""
        flat = self.gradients()
        if not flat or all(key in wanted for key in self.fragments):
            return flat
        kept = (fragment for key, fragment in self.fragments.items() if key in wanted)
        return [flat[fragment.group].narrow(0, fragment.offset, fragment.numel) for fragment in kept]

    def gradient_state(self) -> GradientState:
        """See the hook of that name."""
        found: dict[str, list[Elementwise | Partial]] = {}
        if self._partitions is not None and not (self.has_gradients or self.holds_back):
            return found
        flat = self.gradients()
        for name, parameter in self.model.named_parameters():
            fragment = self.fragments.get(id(parameter))
            terms: list[Elementwise | Partial] = []
            if flat and fragment is not None:
                shape, stop = shape_of(parameter), fragment.start + fragment.numel
                local = flat[fragment.group].narrow(0, fragment.offset, fragment.numel)
                pieces = tuple(pieces_of(flat_range(shape, fragment.start, stop), local))
                terms.append(Elementwise(shape, local.dtype, pieces))
            if parameter.grad is not None:
                sent = self._partitions is None and not self.holds_back
                terms.append(Elementwise.whole(parameter.grad) if sent else Partial(parameter.grad))
            if terms:
                found[name] = terms
        return found

    def drop_gradients(self) -> None:
        """Forgets all gradients, sent or not."""
        for parameter in self._stepped:
            parameter.grad = None
        if self._partitions is not None:
            self._partitions.drop()
            self._partitions.used, self._partitions.factor = 0, None
        self.has_gradients = self.holds_back = False

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a stepped parameter, flat, live, in the optimizer's precision."""
        assert self._partitions is not None, "in stage 0 nothing is stepped here"
        fragment = self.fragments[id(parameter)]
        return self._partitions.masters[fragment.group].detach().narrow(0, fragment.offset, fragment.numel)

    def expect_changes(self) -> None:
        """Has the next call of the model publish the masters, which somebody may change."""
        if self._publishing is None:
            self._publishing = self.model.register_forward_pre_hook(
                lambda module, *_: self.publish() if module is self.model else None,  # a deep copy has this hook too
                prepend=True,
            )

    def publish(self) -> None:
        """Gives the model the values of the masters. A collective."""
        if self._publishing is not None:
            self._publishing.remove()
            self._publishing = None
        if self._partitions is not None:
            self._partitions.publish()

    def step(self) -> bool:
        """Steps by synchronised gradients, if any. A collective. False if DeepSpeed skipped it."""
        self._check_unchanged()
        if not self.has_gradients:
            return True
        assert self._partitions is not None, "in stage 0 the user's optimizer steps"
        assert self.state is not None, "what is stepped here is in partitions"
        if isinstance(self._partitions, ShardedPartitions):
            self._compare(self._partitions)
        optimizer_double.copy_options(self._sources, self._partitions.inner)
        self.engine.step()
        optimizer_double.take_options(self._sources, self._partitions.inner)
        self.has_gradients, self._partitions.factor = False, None
        self.state.link_first()
        return bool(self.engine.was_step_applied())

    def _check_unchanged(self) -> None:
        """Raises if the trained parameters have changed since the engine was made."""
        added = _count(self.optimizer) - self._held
        thawed = sum(each.requires_grad for each in self._frozen)
        frozen = sum(not each.requires_grad for each in self._stepped)
        if added or thawed or frozen:
            found = [
                f"{number} of its parameters {what}"
                for number, what in (
                    (added, "were added to the optimizer"),
                    (thawed, "were unfrozen"),
                    (frozen, "were frozen"),
                )
                if number
            ]
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() was called for {type(self.model).__name__}, but {' and '.join(found)} after prepare(). "
                f"DeepSpeed lays the trained parameters out when it starts, and would go on with those. Choose them before prepare(); or "
                f"call accelerator.free_memory(), and prepare the model and its optimizer again."
            )

    def _compare(self, partitions: ShardedPartitions) -> None:
        """Raises on all ranks if used parameters differ. A collective unless clipping compared."""
        rows = [] if self.gathered is None else self.gathered.tolist()
        if len({used for _, used in rows}) != 1 or not all(math.isfinite(power) for power, _ in rows):
            power = clipping.power(partitions.gradients(), 2.0, self._world.device)
            rows = clipping.gather(power, partitions.used, clipping.group_of(self._world)).tolist()
        partitions.used, self.gathered = 0, None
        partitions.overflowed = not all(math.isfinite(power) for power, _ in rows)
        if len({used for _, used in rows}) > 1:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() was called for {type(self.model).__name__}, but the ranks have used different "
                f"parameters of it, or the same ones in another order. Under zero_stage=3 they gather parameters together, so what "
                f"they computed with is mixed up. Use zero_stage=2; or have all ranks run the same modules."
            )

    @contextmanager
    def engine_for_files(self, norm: float) -> Iterator[Any]:
        """DeepSpeed's engine, for its own checkpoints: with the present options, which a schedule has changed, and weights.

        Args:
            norm: to which the loop clips gradients; 0 if it does not.
        """
        if self._partitions is None:
            yield self.engine
            return
        optimizer_double.copy_options(self._sources, self._partitions.inner)
        if self._publishing is not None:
            self.publish()
        with self._partitions.clipping_in_files(norm):
            yield self.engine

    def adopt_loaded(self) -> None:
        """Takes over options and state that DeepSpeed has loaded by itself."""
        assert self._partitions is not None, "it steps here"
        assert self.state is not None, "what is stepped here is in partitions"
        optimizer_double.take_options(self._sources, self._partitions.inner)
        self.state.take_loaded()

    def close(self) -> None:
        """Ends the engine. The model stays what it is, in stage 3 shared out."""
        if self._publishing is not None:
            self._publishing.remove()
        if self in _live:
            _live.remove(self)
            end_engine(self.engine)
            self.engine = None


def _initialized(model: nn.Module, optimizer: Optimizer | None, config: dict[str, Any], world: World) -> Any:
    import deepspeed

    with environment_of(world):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _count(optimizer: Optimizer | None) -> int:
    return 0 if optimizer is None else sum(len(group["params"]) for group in optimizer.param_groups)


def _nothing() -> None:
    """Replaces the engine's work in a first backward, which `ModelEngine` does in every one."""

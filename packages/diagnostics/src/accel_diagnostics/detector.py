"""The first value that is not finite: where it came from.

A NaN is seen in the loss, or in the gradient, long after it was made: thousands of operations
later, and after the strategy has spread it to every rank. So the detector keeps, of every forward
of the open window, what it takes to repeat it: references to the inputs, the states of the random
streams, the buffers, and the gradient that arrived at the outputs. When the window closes, the
ranks agree by one small collective on whether anybody's loss or gradient is not finite. Mostly
nobody's is, and all of that is dropped. Else every rank repeats its own micro-batches with a look
at every module (`accel_diagnostics.replay`), and all ranks raise the same `NonFiniteError`.

Under loss scaling, gradients that overflow are the scaler's business, which leaves the step out;
there only the loss counts, as it was before it was scaled.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from accel_core import NonFiniteError
from accel_core.api.component import gather_objects, override_class
from accel_core.api.diagnostics import reduce_tree
from accel_diagnostics.batch_tracking import CountingFeed, Window
from accel_diagnostics.messages import describe_findings
from accel_diagnostics.recording import Forward, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Feed, Strategy, World
    from accel_core.api.checkpoint import Prepared
    from accel_core.api.diagnostics import Relay
    from accel_diagnostics.batch_tracking import Used
    from accel_diagnostics.findings import Finding
    from accel_diagnostics.replay import Replay

KEPT_WINDOWS = 4
"""A forward that no backward has reached is kept while so many windows close: a generator's, until its critic has stepped."""

KEPT_FORWARDS = 64
"""So many forwards are kept that no backward can reach, such as those of a model that is frozen."""


class NonFiniteDetector:
    """Watches the models and backwards of one Accelerator.

    It puts itself around the hooks of `relay`, of which `owners` says who owns each: where losses
    are scaled, gradients may overflow. ValueError is raised for a strategy that runs windows by
    itself, or whose ranks do not hold whole models.
    """

    def __init__(
        self,
        world: World,
        feed: Feed,
        prepared: Prepared,
        *,
        strategy: Strategy,
        relay: Relay,
        owners: Mapping[str, Any],
    ) -> None:
        _check_strategy(strategy, runs_windows=owners["forward_backward"] is not None)
        self._world = world
        self._feed = feed
        self._prepared = weakref.ref(prepared)  # which optimizers that hold the hooks do not keep alive
        self._scaled = owners["scale_loss"] is not None
        self._watchers: list[Watcher] = []
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._records: list[Forward] = []
        self._finite: dict[int, torch.Tensor] = {}  # of the losses of the window, by turn
        self._closed = 0
        self._first_turn = 0
        self._prune_at = KEPT_FORWARDS
        self._window: Window | None = None
        self.turn = 0
        self.in_backward = False
        self.replaying = False
        self._install(relay)

    def _install(self, relay: Relay) -> None:
        """Puts itself around the bound hooks, and has the feed count."""
        self._scale_loss: Callable[[torch.Tensor], torch.Tensor] = relay.scale_loss
        self._backward: Callable[[torch.Tensor, float, bool, dict[str, Any]], None] = relay.backward
        self._optimizer_step: Callable[[Optimizer, Callable[[], Any]], Any] = relay.optimizer_step
        self._forward_backward: Callable[..., torch.Tensor] = relay.forward_backward
        for hook in ("scale_loss", "backward", "optimizer_step", "forward_backward"):
            setattr(relay, hook, getattr(self, hook))
        override_class(self._feed, CountingFeed)

    def watch(self, model: nn.Module) -> None:
        """Begins to record the forwards of a model in training mode with gradients enabled.

        It is the one inside a wrapper: it is called again without the strategy's collectives.
        """
        if not any(watcher.watches(model) for watcher in self._watchers):
            self._watchers.append(Watcher(self, model))

    def release(self) -> None:
        """Takes the hooks off the models, and forgets what was recorded."""
        for watcher in self._watchers:
            watcher.remove()
        self._watchers.clear()
        self._forget()

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._world.device

    def record(self, forward: Forward) -> None:
        """A forward begins."""
        forward.turn = self.turn
        forward.window = self._closed
        forward.drawn = self._used()
        if len(self._records) >= self._prune_at:
            self._prune()
        self._records.append(forward)

    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Iterable[Any],
        loss_fn: Callable[..., Any],
        inputs: Callable[[Any], Any],
        scale_loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The hook; notes which micro-batch the model is called with."""
        self._window = window = Window(self._feed, micro_batches, inputs)
        try:
            return self._forward_backward(model, window, loss_fn, window.inputs, scale_loss)
        finally:
            self._window = None

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The hook, with a look at the loss that does not wait for the device."""
        self._finite[self.turn] = torch.isfinite(loss.detach()).all()
        return self._scale_loss(loss)

    def backward(self, loss: torch.Tensor, weight: float, closes: bool, options: dict[str, Any]) -> None:
        """The hook. A collective over the world when it closes a window.

        Then NonFiniteError is raised on every rank if a loss or gradient of it is not finite on
        any.
        """
        self.in_backward = True
        try:
            self._backward(loss, weight, closes, options)
        finally:
            self.in_backward = False
            self.turn += 1
        if closes:
            self._settle()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """The hook; counts the steps."""
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        return self._optimizer_step(optimizer, step)

    def _settle(self) -> None:
        gradients = [] if self._scaled else list(self._gradients())
        flags = [*self._finite.values(), *_finite_flags([gradient for _, gradient in gradients])]
        device = self._world.device
        finite = torch.stack(
            [torch.ones((), dtype=torch.bool, device=device), *(flag.to(device) for flag in flags)]
        ).all()
        if self._feed.joining:
            if not finite:  # ranks that have ended take part in no collective
                search = self._search(gradients)
                self._raise_found(
                    [self._look(search) or search.unseen("other ranks are not asked in join_uneven_inputs()")]
                )
        elif reduce_tree((~finite).to(torch.uint8), self._world, "max"):
            search = self._search(gradients)
            findings = gather_objects([self._look(search)], self._world)
            if not any(findings):
                findings = gather_objects([search.unseen()], self._world)
            self._raise_found(findings)
        self._closed += 1
        self._first_turn = self.turn
        self._finite.clear()
        self._drop([each for each in self._records if each.gradients or self._closed - each.window >= KEPT_WINDOWS])

    def _gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        prepared = self._prepared()
        assert prepared is not None, "the Accelerator calls this"
        for watcher in self._watchers:
            named = {id(parameter): (name, parameter) for name, parameter in watcher.parameters()}
            found = prepared.gradients.of(parameter for _, parameter in named.values())
            yield from ((named[id(parameter)][0], gradient) for parameter, gradient in found)

    def _raise_found(self, findings: list[Finding | None]) -> NoReturn:
        self._forget()
        raise NonFiniteError(findings, describe_findings(findings))

    def _search(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> Replay:
        """The search in this rank's own micro-batches, with these gradients as they are."""
        from accel_diagnostics.replay import Replay

        return Replay(
            rank=self._world.rank,
            step=max(self._steps.values(), default=0),
            first_turn=self._first_turn,
            last_turn=self.turn,
            records=self._records,
            bad_losses={turn for turn, finite in self._finite.items() if not finite},
            bad_gradients=[name for name, gradient in gradients if not torch.isfinite(_values(gradient)).all()],
        )

    def _look(self, search: Replay) -> Finding | None:
        self.replaying = True
        try:
            return search.run()
        finally:
            self.replaying = False

    def _used(self) -> Used:
        return self._feed.current_drawn() if self._window is None else self._window.used

    def _prune(self) -> None:
        """Drops forwards whose graphs ended without a backward; keeps the last without graph."""
        waiting = [record for record in self._records if not record.gradients]
        lone = [record for record in waiting if not record.graphs]
        self._drop([*lone[:-KEPT_FORWARDS], *(record for record in waiting if record.has_lost_graph)])
        self._prune_at = 2 * len(self._records) + KEPT_FORWARDS

    def _drop(self, records: Sequence[Forward]) -> None:
        dropped = set(map(id, records))
        for record in records:
            record.let_go()
        self._records = [record for record in self._records if id(record) not in dropped]

    def _forget(self) -> None:
        self._drop(self._records)
        self._finite.clear()
        self._first_turn = self.turn


def _check_strategy(strategy: Strategy, runs_windows: bool) -> None:
    if runs_windows or not strategy.replicates_parameters:
        lack = "runs windows by itself" if runs_windows else "does not say that every rank holds the whole model"
        raise ValueError(
            f"detect_nonfinite=True repeats a window on each rank alone, and the strategy {type(strategy).__name__} {lack}. Choose "
            f"strategy='ddp' or 'single', or leave detect_nonfinite out; a strategy whose ranks hold whole models declares "
            f"`replicates_parameters = True` in its class."
        )


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _finite_flags(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One 0-d flag per gradient, from its largest component: another norm may overflow."""
    held = [_values(gradient.detach()) for gradient in gradients]
    held = [gradient for gradient in held if gradient.numel()]
    if not held:
        return []
    return [torch.isfinite(norm).all() for norm in torch._foreach_norm(held, torch.inf)]

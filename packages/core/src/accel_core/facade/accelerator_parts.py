"""The parts of the Accelerator, and the state of its loop, for the methods of every topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core.collectives.stop_signals import Preemption, Trigger
from accel_core.contract.loader_progress import Feed
from accel_core.facade.process_methods import ProcessControl
from accel_core.loop.accumulation import Accumulation
from accel_core.loop.forward_backward import WindowLoop
from accel_core.loop.optimizer_gate import watch_unprepared
from accel_core.loop.preparation import Prepared

if TYPE_CHECKING:
    from accel_core.build import Assembly
    from accel_core.contract.default_components import Detector
    from accel_core.loop.run import Run


class AcceleratorParts(ProcessControl):
    """The base of the Accelerator's methods."""

    device_placement: bool

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self._world = world = parts.world
        self._layout = parts.layout
        self._project = parts.project
        self._trackers = parts.recorder
        self._relay = relay = parts.activation.relay
        owners, rules = parts.activation.owners, parts.accumulation
        self._needs_backward = any(owners[hook] for hook in ("backward", "scale_loss", "optimizer_step", "apply_step"))
        self._engine = relay.apply_step if owners["apply_step"] else None
        self._feed = Feed(rules.num_steps)
        self._feed.place_batch = parts.layout.place_batch
        hooks = (getattr(relay, name) if owners[name] else None for name in ("gradient_state", "check_gradients"))
        self._prepared = Prepared(world, *hooks)
        # Whether torch's own clipping has to be shown what a strategy keeps outside of `.grad`.
        self._clips_kept = owners["clip_gradients"] is None and self._prepared.gradients.are_elsewhere
        self._accumulation = Accumulation(
            rules.num_steps,
            self._feed,
            self._prepared.rescale,
            sync_with_dataloader=rules.sync_with_dataloader,
            sync_each_batch=rules.sync_each_batch,
            synchronises=world.size > 1 and owners["no_sync"] is not None,
            mean_over_steps=rules.mean_over == "steps",
        )
        collective = parts.strategy.forward_is_collective
        watch_unprepared(self._prepared, self._accumulation, self._needs_backward)
        parts.defaults.window_loop = WindowLoop(relay, self._prepared, world, parts.layout, together=collective)
        self._trigger = Trigger(world)
        self._preemption = Preemption(world)
        self._run_made: Run | None = None
        self._detector: Detector | None = None
        if parts.detector is not None:
            known = {"strategy": parts.strategy, "relay": relay, "owners": owners}
            self._detector = parts.detector(world, self._feed, self._prepared, **known)
        self._ended = False
        world.enter(self)

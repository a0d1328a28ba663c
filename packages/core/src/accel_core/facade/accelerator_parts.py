"""The attributes that the methods of the Accelerator use, whatever their topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core.facade.process_methods import ProcessControl

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from accel_core.build import Assembly
    from accel_core.collectives.stop_signals import Preemption
    from accel_core.collectives.triggers import Trigger
    from accel_core.contract.default_components import Detector, Recorder
    from accel_core.contract.layout import Layout
    from accel_core.contract.loader_progress import Feed
    from accel_core.loop.accumulation import Accumulation
    from accel_core.loop.preparation import Prepared
    from accel_core.loop.run import Run
    from accel_core.loop.scheduler_gate import SchedulerRule
    from accel_core.options.handlers import KwargsHandler, ProjectConfiguration
    from accel_core.plugins import Relay
    from accel_core.plugins.explain import Explanation


class AcceleratorParts(ProcessControl):
    """The base of the Accelerator's methods. `Accelerator` sets all of it; nothing is computed here."""

    device_placement: bool
    _parts: Assembly
    _layout: Layout
    _relay: Relay
    _feed: Feed
    _prepared: Prepared
    _accumulation: Accumulation
    _scheduler_rule: SchedulerRule
    _needs_backward: bool
    _engine: Callable[..., Any] | None
    _clips_kept: bool
    _dataloader_config: KwargsHandler | None
    _project: ProjectConfiguration
    _trackers: Recorder | None
    _detector: Detector | None
    _trigger: Trigger
    _preemption: Preemption | None
    _run_made: Run | None
    _explain: Callable[[], Explanation]

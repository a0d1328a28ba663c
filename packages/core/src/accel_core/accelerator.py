"""The object that the user holds. Every public name delegates to the part that does the work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from accel_core.build import assemble
from accel_core.facade.checkpoint_methods import CheckpointMethods
from accel_core.facade.collective_methods import CollectiveMethods
from accel_core.facade.loop_methods import LoopMethods
from accel_core.facade.older_arguments import chosen_strategy, refuse_unknown, renamed, warn_of_unread
from accel_core.facade.process_methods import shown
from accel_core.facade.recording_methods import RecordingMethods
from accel_core.options.resolution import flag
from accel_core.state import AcceleratorState

if TYPE_CHECKING:
    import os

    from typing_extensions import Unpack

    from accel_core.base.vocabulary import DistributedType, OlderArguments
    from accel_core.contract.precision_policy import Precision
    from accel_core.contract.strategy import Layout, Strategy
    from accel_core.options.handlers import (
        GradientAccumulationPlugin,
        KwargsHandler,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from accel_core.plugins.explain import Explanation
    from accel_core.tracking.tracker import GeneralTracker, Tracker


class Accelerator(CheckpointMethods, RecordingMethods, LoopMethods, CollectiveMethods):
    """One training loop on any hardware, under any strategy that is installed.

        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(batch), target))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    If you leave an argument out, accel takes it from outside: a launcher's command line, then the environment,
    then a launcher's file. Building the first one is a collective: it starts the process group.

    Args:
        device_placement: move models and batches to the device.
        split_batches: divide the batch of a loader among the processes. Otherwise each gets a whole batch.
        mixed_precision: number format to compute in: "no" for full precision, or the name of an installed
            precision; in Python also a `Precision`. Not given: ACCELERATE_MIXED_PRECISION, else "no".
        gradient_accumulation_steps: number of small batches whose gradients are added up before the weights
            change, at least 1. Not given: ACCELERATE_GRADIENT_ACCUMULATION_STEPS, else 1.
        cpu: train on the CPU even if there is an accelerator. Not given: ACCELERATE_USE_CPU, else False.
        strategy: way to divide the training among processes: the name of an installed one; in Python also a
            `Strategy`. Not given: ACCELERATE_STRATEGY, else "ddp", or "single" for one process.
        loader: way to give each process its part of the data: the name of an installed loader; in Python also an
            object. Not given: ACCELERATE_LOADER, else "sharded" if installed, else that of the core, for one process.
        plugins: objects with further hooks, such as observers.
        dataloader_config: all options of the loader as one object, as accel-data's `DataLoaderConfiguration`.
        dispatch_batches: let one process read the data and send the others their parts.
        even_batches: fill the last global batch with the first samples, so that all processes have equally
            many batches. Metrics leave these samples out.
        use_seedable_sampler: shuffle by `torch.randperm` with a seed for each epoch.
        rng_types: random streams that all processes take from process 0 when a loader is iterated: names of
            `RNGType`, or none. Not given: the default of the loader, "generator" for accel-data.
        gradient_accumulation_plugin: further options of accumulation, instead of the number of steps.
        step_scheduler_with_optimizer: False: `scheduler.step()` is never held back.
        step_scheduler_per_process: True: one `scheduler.step()` makes one step per process (unless
            `split_batches`), for schedules whose length was computed for one process.
        kwargs_handlers: option objects, at most one of a class, such as `AutocastKwargs`.
        dynamo_backend: compiler for models, such as "inductor". Not given: ACCELERATE_DYNAMO_BACKEND, else "no".
        dynamo_plugin: further options of `torch.compile`, instead of the backend.
        project_dir: folder for what a run writes, such as checkpoints. Not given: ACCELERATE_PROJECT_DIR, else none.
        project_config: where the project keeps what it writes; its folder agrees with `project_dir`.
        detect_nonfinite: stop at the first value that is infinite or not a number, and name module, process,
            step and samples (`NonFiniteError`). Every step waits for all processes; the one with such a value
            runs again, to find it. Not given: ACCELERATE_DETECT_NONFINITE, else False.
        log_with: services and files that record the run: names of installed trackers, or "all" for every
            one that works here; in Python also `Tracker` objects. Not given: ACCELERATE_LOG_WITH, else none.

    Raises:
        NotInstalledError: a name is served by a distribution that is not installed; says which.
        PluginError: components cannot be found, loaded, or active together.
        WorldError: the launcher, the devices and the options contradict each other.
    """

    state: AcceleratorState = shown("_state", "The set-up, read-only; `state.<name>_plugin` is a strategy.")
    layout: Layout = shown("_layout", "The part of the data that this process reads, and the ranks that share it out.")
    distributed_type: DistributedType = shown("_state.distributed_type", "The strategy's word for how it distributes.")
    project_configuration: ProjectConfiguration = shown("_project", "The project's folders and rules for checkpoints.")
    project_dir: str | os.PathLike[str] | None = shown("_project.project_dir", "The folder of the project, if any.")
    logging_dir: str | os.PathLike[str] | None = shown("_project.logging_dir", "The folder for logs, if any.")
    mixed_precision: str = shown("_parts.mixed_precision", 'The name of the precision: "no" for full precision.')

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | Precision | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        *,
        strategy: str | Strategy | None = None,
        loader: object = None,
        plugins: Sequence[object] = (),
        dataloader_config: KwargsHandler | None = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        rng_types: Sequence[str] | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        step_scheduler_per_process: bool = False,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        detect_nonfinite: bool | None = None,
        log_with: str | Tracker | GeneralTracker | Sequence[str | Tracker | GeneralTracker] | None = None,
        **older_names: Unpack[OlderArguments],
    ) -> None:
        given, older = dict(locals()), dict(older_names)
        given["strategy"], configured = chosen_strategy(strategy, older)
        given |= renamed(older, given)
        refuse_unknown(type(self), older)
        self.device_placement = flag("device_placement", device_placement, "", True).value
        warn_of_unread()
        parts = assemble(given)
        super().__init__(parts)
        self._dataloader_config = dataloader_config
        name = parts.choices[0].selected.name
        strategies = MappingProxyType(configured or {name: parts.strategy})
        self._state = AcceleratorState(parts.world, parts.mixed_precision, strategies, name)
        self._relay.start(self._world, self._layout, parts.strategy.replicates_parameters)

    def explain(self) -> Explanation:
        """The active set-up: every choice with its source, every hook with its owner. Print it."""
        return self._parts.explain(self._prepared.loaders)

    def end_training(self, *, failed: bool | None = None) -> None:
        """Ends the run: listeners, trackers, and a process group started here that no other uses.

        Collective; an asynchronous save is waited for, and signals do again what they did before.
        It may be repeated, and a script that does not call it ends cleanly too. `failed`: whether
        trackers record the run as failed; None: if an exception is on its way (an `except` that
        ends a run well says False). Raises `CheckpointError` or `OSError` on every rank if an
        asynchronous save failed, `TrackerError` for a tracker, under `TrackingKwargs(strict=True)`.
        """
        if not self._ended:
            self._ended = True
            with ExitStack() as last_to_first:
                if self._trackers is not None:  # last, for other ranks do not wait long for this one
                    last_to_first.callback(self._trackers.finish, failed)
                last_to_first.callback(self._world.leave, self)
                last_to_first.callback(self._relay.finish)
                last_to_first.callback(self._prepared.release_models, self._relay.release_model)
                last_to_first.callback(self._preemption.close)
                self.wait_for_checkpoint()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # a handle on running processes: a trainer's copy works with the same ones

    def __reduce__(self) -> NoReturn:
        what = "An Accelerator cannot be pickled: it is a handle on running processes."
        raise TypeError(f"{what} Build one in the new process.")

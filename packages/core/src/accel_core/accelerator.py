"""The object that the user holds. Every public name is a few lines that delegate to the part that does the work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from accel_core.build import Arguments, assemble, explained
from accel_core.collectives.triggers import Trigger
from accel_core.contract.loader_progress import Feed
from accel_core.facade.checkpoint_methods import CheckpointMethods
from accel_core.facade.collective_methods import CollectiveMethods
from accel_core.facade.loader_settings import LoaderSettings
from accel_core.facade.loop_methods import LoopMethods
from accel_core.facade.older_arguments import (
    chosen_strategy,
    refuse_unknown,
    renamed,
    warn_of_unread,
)
from accel_core.facade.recording_methods import RecordingMethods
from accel_core.loop.accumulation import Accumulation
from accel_core.loop.forward_backward import WindowLoop
from accel_core.loop.preparation import (
    Prepared,
)
from accel_core.loop.scheduler_gate import rule_of
from accel_core.options.handlers import resolve_project
from accel_core.options.resolution import as_text, flag, resolve
from accel_core.state import AcceleratorState, PartialState

if TYPE_CHECKING:
    import os

    from typing_extensions import Unpack

    from accel_core.base.vocabulary import DistributedType, OlderArguments
    from accel_core.build import Assembly
    from accel_core.collectives.stop_signals import Preemption
    from accel_core.contract.default_components import Detector
    from accel_core.contract.layout import Layout
    from accel_core.contract.precision_policy import Precision
    from accel_core.contract.strategy import Strategy
    from accel_core.facade.older_arguments import ChosenStrategy
    from accel_core.loop.run import Run
    from accel_core.options.handlers import (
        GradientAccumulationPlugin,
        KwargsHandler,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from accel_core.plugins.explain import Explanation
    from accel_core.tracking.tracker import GeneralTracker, Tracker


class Accelerator(CheckpointMethods, RecordingMethods, LoopMethods, LoaderSettings, CollectiveMethods):
    """One training loop on any hardware, under any strategy that is installed.

        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(batch), target))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    What is not given here is taken from outside of the code: the command line of a launcher, then
    environment variables, then a launcher's configuration file.

    Building one is a collective when it starts the process group: the first one, on every rank that
    the launcher started.

    Args:
        device_placement: whether models and batches are moved to the device.
        split_batches: whether a loader's batch size is that of the whole world, instead of each rank's
            own. Served by the loader component.
        mixed_precision: "no", or the name of an installed precision, or a `Precision`. Not given:
            ACCELERATE_MIXED_PRECISION, else "no".
        gradient_accumulation_steps: micro-batches in a window of `accumulate`, at least 1. Not
            given: ACCELERATE_GRADIENT_ACCUMULATION_STEPS, else 1.
        cpu: whether to train on the CPU although there is an accelerator. The number of processes is
            always what the launcher started. Not given: ACCELERATE_USE_CPU, else False.
        strategy: the name of an installed strategy, or a `Strategy` object. Not given:
            ACCELERATE_STRATEGY, else "ddp" in a world larger than one and "single" otherwise.
            `<name>_plugin=object` is the same under an older name.
        loader: the name of an installed loader component, or such an object. Not given:
            ACCELERATE_LOADER, else "sharded" if it is installed, else the core's own, which serves
            one process.
        plugins: objects with further hooks, such as observers.
        dataloader_config: the options of the loader component as one object, such as accel-data's
            `DataLoaderConfiguration`, instead of the loose ones. It is complete: variables of the
            environment for its fields are refused beside it.
        dispatch_batches: whether one rank reads a loader and sends the others their parts. Served by
            the loader component.
        even_batches: whether loaders fill the last global batch from the first samples, so that all
            ranks have equally many batches; metrics leave the filling out. Served by the loader
            component.
        use_seedable_sampler: whether loaders shuffle by `torch.randperm`, seeded by epoch.
            Served by the loader component.
        rng_types: which random streams all ranks take from rank 0 whenever a loader is iterated: names
            of `RNGType`; an empty list: none. Not given: as the loader component says, "generator" by
            that of accel-data. Served by the loader component.
        gradient_accumulation_plugin: further options of accumulation, instead of the number of steps.
        step_scheduler_with_optimizer: False: `scheduler.step()` is never held back.
        step_scheduler_per_process: True: one `scheduler.step()` makes one step per process (unless
            `split_batches`), for schedules whose length was computed for one process.
        kwargs_handlers: option objects, at most one of a class: `DistributedDataParallelKwargs`,
            `InitProcessGroupKwargs`, `AutocastKwargs`, `ProfileKwargs`.
        dynamo_backend: backend of `torch.compile` for prepared models. Not given:
            ACCELERATE_DYNAMO_BACKEND, else "no".
        dynamo_plugin: further options of `torch.compile`, instead of the backend.
        project_dir: the folder of the project; where `project_config` names one, the two have to agree.
            Not given: ACCELERATE_PROJECT_DIR, else none.
        project_config: where the project keeps what it writes, as a `ProjectConfiguration`.
        detect_nonfinite: whether, when a loss or a gradient of a window is inf or nan, the window runs
            once more under observation, and all ranks raise `NonFiniteError` with the module, the rank,
            the step and the samples. Costs a collective per window. Not given:
            ACCELERATE_DETECT_NONFINITE, else False.
        log_with: what records the run: the name of an installed tracker, a `Tracker` or
            `GeneralTracker` object, a list of these, or "all" for every one that can be used here.
            Recording begins with `init_trackers`. Not given: ACCELERATE_LOG_WITH, else none.

    Raises:
        NotInstalledError: a name is served by a distribution that is not installed; says which.
        PluginError: components cannot be found, loaded, or active together.
        WorldError: the launcher, the devices and the options contradict each other.
    """

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
        older = dict(older_names)
        chosen = chosen_strategy(strategy, older)
        kwargs_handlers = renamed(older, "kwargs_handlers", kwargs_handlers, None)
        step_with_optimizer = renamed(older, "step_scheduler_with_optimizer", step_scheduler_with_optimizer, True)
        refuse_unknown(type(self), older)
        placement = flag("device_placement", device_placement, "", True).value
        warn_of_unread()
        project = resolve(project_dir, "ACCELERATE_PROJECT_DIR", as_text, None)
        self._project = resolve_project(project.value, project_config, project.source)
        parts = assemble(
            Arguments(
                mixed_precision=mixed_precision,
                gradient_accumulation_steps=gradient_accumulation_steps,
                gradient_accumulation_plugin=gradient_accumulation_plugin,
                cpu=cpu,
                dynamo_backend=dynamo_backend,
                dynamo_plugin=dynamo_plugin,
                detect_nonfinite=detect_nonfinite,
                log_with=log_with,
                strategy=chosen.active,
                loader=loader,
                dataloader_config=dataloader_config,
                loader_options={
                    "split_batches": split_batches,
                    "dispatch_batches": dispatch_batches,
                    "even_batches": even_batches,
                    "use_seedable_sampler": use_seedable_sampler,
                    "rng_types": rng_types,
                },
                plugins=plugins,
                handlers=() if kwargs_handlers is None else kwargs_handlers,
            )
        )
        self.device_placement = placement
        self._dataloader_config = dataloader_config
        splits = getattr(parts.loader, "split_batches", False)
        self._scheduler_rule = rule_of(
            step_with_optimizer,
            parts.world.size if step_scheduler_per_process and not splits else None,
            parts.accumulation.adjust_scheduler,
        )
        self._take(parts)
        self._state = _state_of(parts, chosen)
        self._trackers = self._make_recorder(parts)
        self._explain = partial(explained, parts, {**parts.options, "project_dir": project}, self._trackers)
        self._relay.start(self._world, self._layout, parts.strategy.replicates_parameters)

    def _take(self, parts: Assembly) -> None:
        """Takes the parts, and makes what the loop keeps its state in."""
        self._parts = parts
        self._world = parts.world
        self._layout = parts.layout
        self._relay = parts.activation.relay
        owners = parts.activation.owners
        self._needs_backward = any(owners[hook] for hook in ("backward", "scale_loss", "optimizer_step", "apply_step"))
        self._engine = self._relay.apply_step if owners["apply_step"] else None
        steps = parts.accumulation.num_steps
        assert steps is not None, "the plugin checks it"
        self._feed = Feed(steps)
        self._prepared = Prepared(
            self._world,
            self._relay.gradient_state if owners["gradient_state"] else None,
            self._relay.check_gradients if owners["check_gradients"] else None,
        )
        # Whether torch's own clipping has to be shown what a strategy keeps outside of `.grad`.
        self._clips_kept = owners["clip_gradients"] is None and self._prepared.gradients.are_elsewhere
        self._accumulation = Accumulation(
            steps,
            self._feed,
            self._prepared.rescale,
            sync_with_dataloader=parts.accumulation.sync_with_dataloader,
            sync_each_batch=parts.accumulation.sync_each_batch,
            synchronises=self._world.size > 1 and owners["no_sync"] is not None,
            mean_over_steps=parts.accumulation.mean_over == "steps",
        )
        parts.defaults.window_loop = WindowLoop(
            self._relay,
            self._prepared,
            self._world,
            self._layout,
            together=parts.strategy.forward_is_collective,
        )
        self._trigger = Trigger(self._world)
        self._preemption: Preemption | None = None
        self._run_made: Run | None = None
        self._detector: Detector | None = None
        if parts.detector is not None:
            self._detector = parts.detector(
                self._world, self._feed, self._prepared, strategy=parts.strategy, relay=self._relay, owners=owners
            )
        self._ended = False
        self._world.enter(self)

    @property
    def state(self) -> AcceleratorState:
        """The set-up as one read-only object; print it. Strategies under older names are `state.<name>_plugin`."""
        return self._state

    @property
    def layout(self) -> Layout:
        """The part of the data that this process reads, and the ranks with which it shares the data out."""
        return self._layout

    @property
    def distributed_type(self) -> DistributedType:
        """The strategy's word for how training is distributed: `DistributedType.NO` for `single`."""
        return self._state.distributed_type

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The folders of the project, and the settings of its checkpoints."""
        return self._project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """The folder of the project; None if none was given."""
        return self._project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder for logs: `project_dir` unless the project configuration says otherwise."""
        return self._project.logging_dir

    @property
    def mixed_precision(self) -> str:
        """The name of the precision: "no" for full precision."""
        return self._parts.mixed_precision

    def explain(self) -> Explanation:
        """The active set-up: every choice with its source, every hook with its owner. Print it."""
        return self._explain()

    def end_training(self, *, failed: bool | None = None) -> None:
        """Ends the run: listeners and trackers finish, and the process group ends if it was started here and nobody else uses it.

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
                if self._preemption is not None:
                    last_to_first.callback(self._preemption.close)
                self.wait_for_checkpoint()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # a handle on running processes: a trainer's copy works with the same ones

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "An Accelerator cannot be pickled: it is a handle on running processes. Pickle models, optimizers and loaders, "
            "and build an Accelerator in the new process."
        )


def _state_of(parts: Assembly, chosen: ChosenStrategy) -> AcceleratorState:
    name = parts.choices[0].selected.name
    given = chosen.configured or {name: parts.strategy}
    processes = PartialState.of(parts.world)
    return AcceleratorState.of(processes, parts.mixed_precision, given, next(iter(given)), name)

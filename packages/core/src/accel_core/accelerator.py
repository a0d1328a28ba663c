"""The object that the user holds. Every public name is a few lines that delegate to the part that does the work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accel_core.base.deprecation import Deprecation
from accel_core.build import Arguments, assemble
from accel_core.collectives import metrics, reduce_gather
from accel_core.collectives.run_seed import agree_seed
from accel_core.collectives.triggers import Trigger
from accel_core.contract.hook_specs import LAYOUT_HOOKS
from accel_core.contract.loader_progress import Feed, RunningLoader
from accel_core.contract.precision_policy import remove_policy
from accel_core.facade.older_arguments import (
    checked_placement,
    chosen_strategy,
    refuse_keywords,
    refuse_unknown,
    renamed,
    warn_of_unread,
)
from accel_core.facade.process_methods import ProcessControl
from accel_core.loading.batch_stream import as_data_loader
from accel_core.loop import fused_backward, gradients
from accel_core.loop.accumulation import Accumulate, Accumulation
from accel_core.loop.forward_backward import WindowLoop, default_inputs
from accel_core.loop.optimizer_gate import OptimizerGate, gate_of, place_state
from accel_core.loop.parameter_replacement import ParameterReplacement
from accel_core.loop.preparation import (
    ORDER,
    Prepared,
    PreparedModel,
    PrepareRequest,
    check_device_map,
    check_device_placement,
    check_reading,
    check_state_kept,
    has_device_map,
    held_by,
    kind_of,
    require,
    stays_in_place,
    warn_of_empty,
)
from accel_core.loop.scheduler_gate import gate_scheduler, is_scheduler, rule_of
from accel_core.options.handlers import GradientAccumulationPlugin
from accel_core.options.project import resolve_project
from accel_core.options.resolution import as_text, flag, resolve
from accel_core.state import AcceleratorState, PartialState

if TYPE_CHECKING:
    import os
    import signal

    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Unpack

    from accel_core.base.vocabulary import DistributedType, OlderArguments
    from accel_core.build import Assembly
    from accel_core.collectives.reduce_gather import Reduction
    from accel_core.collectives.stop_signals import Preemption
    from accel_core.contract.detector import Detector
    from accel_core.contract.layout import Layout
    from accel_core.contract.precision_policy import Precision
    from accel_core.contract.recorder import Recorder
    from accel_core.contract.strategy import Strategy
    from accel_core.contract.tensor_layouts import State
    from accel_core.facade.older_arguments import ChosenStrategy
    from accel_core.loop.forward_backward import Inputs, LossFn
    from accel_core.loop.profiling import ProfileKwargs
    from accel_core.loop.run import Asynchronous, LoadHook, Run, SaveHook
    from accel_core.options.handlers import AutocastKwargs, KwargsHandler, TorchDynamoPlugin
    from accel_core.options.project import ProjectConfiguration
    from accel_core.plugins.explain import Detail, Explanation
    from accel_core.tracking.handle import TrackerHandle
    from accel_core.tracking.tracker import GeneralTracker, Tracker

    Placements = Sequence[bool] | None

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_CHECK_BREAKPOINT = Deprecation("check_breakpoint()", "check_trigger()", removed_in="1.0")


class Accelerator(ProcessControl):
    """One training loop on any hardware, under any strategy that is installed.

        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(batch), target))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    What is not given here is taken from outside of the code, in this order: the command line of a launcher, environment variables,
    a launcher's configuration file; see `accel_core.options.option_sources`, also for the options of a strategy or a precision that is chosen by
    name.

    Building one is a collective when it starts the process group: the first one, on every rank that the launcher started.

    Args:
        device_placement: whether models and batches are moved to the device.
        split_batches: whether a loader's batch size is that of the whole world, divided among the ranks, instead of each
            rank's own. Served by the loader component.
        mixed_precision: "no", or the name of an installed precision, or a `Precision`. Not given: the environment
            variable ACCELERATE_MIXED_PRECISION, else "no".
        gradient_accumulation_steps: micro-batches in a window of `accumulate`, at least 1. Not given:
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS, else 1.
        cpu: whether to train on the CPU although there is an accelerator. It chooses the device only: the number of
            processes is always what the launcher started. Not given: ACCELERATE_USE_CPU, else False.
        strategy: the name of an installed strategy, or a `Strategy` object. Not given: ACCELERATE_STRATEGY, else "ddp" in a
            world larger than one and "single" otherwise. `<name>_plugin=object` is the same argument under an older name.
        loader: the name of an installed loader component, or such an object. Not given: ACCELERATE_LOADER, else "sharded" if a
            distribution offers that name, else the core's own, which serves one process.
        plugins: objects with further hooks, such as observers.
        dataloader_config: the options of the loader component as one object, such as accel-data's
            `DataLoaderConfiguration`, instead of `split_batches`, `dispatch_batches`, `even_batches` and
            `use_seedable_sampler`. It is complete: variables of the environment for its fields are refused beside it.
        dispatch_batches: whether one rank reads a loader and sends the others their parts. Served by the loader component.
        even_batches: whether loaders fill the last global batch from the first samples, so that all ranks have equally many
            batches; metrics leave the filling out. Served by the loader component.
        use_seedable_sampler: whether loaders shuffle by `torch.randperm`, seeded by epoch. Served by the loader component.
        rng_types: which random streams all ranks take from rank 0 whenever a loader is iterated: names of `RNGType`, such as
            "generator", "torch" or "cuda"; an empty list: none. Not given: as the loader component says, "generator" by
            that of accel-data. Served by the loader component.
        gradient_accumulation_plugin: further options of accumulation, instead of the number of steps.
        step_scheduler_with_optimizer: False: `scheduler.step()` is never held back.
        step_scheduler_per_process: True: one `scheduler.step()` makes one step per process (unless `split_batches`), for
            schedules whose length was computed for one process.
        kwargs_handlers: option objects, at most one of a class: `DistributedDataParallelKwargs`, `InitProcessGroupKwargs`,
            `AutocastKwargs`, `ProfileKwargs`.
        dynamo_backend: backend of `torch.compile` for prepared models. Not given: ACCELERATE_DYNAMO_BACKEND, else "no".
        dynamo_plugin: further options of `torch.compile`, instead of the backend: a `TorchDynamoPlugin`.
        project_dir: the folder of the project; where `project_config` names one already, the two have to agree. Not given:
            ACCELERATE_PROJECT_DIR, else none.
        project_config: where the project keeps what it writes, as a `ProjectConfiguration`.
        detect_nonfinite: whether the first value that is not finite is searched for: when a loss or a gradient of a window is
            inf or nan, the window runs once more under observation, and all ranks raise `NonFiniteError` with the module, the
            rank, the step and the samples. Costs a collective per window. Not given: ACCELERATE_DETECT_NONFINITE, else False.
        log_with: what records the run: the name of an installed tracker, such as "tensorboard", a `Tracker` or `GeneralTracker`
            object, a list of these, or "all" for every tracker that is installed and can be used here. Recording begins with
            `init_trackers`. Not given: ACCELERATE_LOG_WITH, else none.

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
        placement = checked_placement(device_placement)
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
        self._options = {**parts.options, "project_dir": project}
        self._state = _state_of(parts, chosen)
        self._trackers = self._make_recorder(parts)
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
        self._seed: int | None = None
        self._ended = False
        self._world.enter(self)

    @property
    def state(self) -> AcceleratorState:
        """The set-up as one read-only object; print it. Strategies under older names are `state.<name>_plugin`."""
        return self._state

    @property
    def layout(self) -> Layout:
        """Which part of the data this process reads, and with which others it shares the data out."""
        return self._layout

    @property
    def distributed_type(self) -> DistributedType:
        """How training is distributed, in one word: `DistributedType.NO` in one process."""
        return self._state.distributed_type

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where the project keeps what it writes."""
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

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a full window of `accumulate`. It may be assigned between two windows."""
        return self._accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        GradientAccumulationPlugin(num_steps=steps)  # which checks it
        self._refuse_in_window("gradient_accumulation_steps", steps)
        self._accumulation.resize(steps)

    @property
    def dataloader_config(self) -> KwargsHandler | None:
        """The options of the loader component as they were given; None if they were not given as one object."""
        return self._dataloader_config

    @property
    def split_batches(self) -> bool | None:
        """Whether a loader's batch size is that of the whole world; None if the loader component does not say."""
        return getattr(self._parts.loader, "split_batches", None)

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether one rank reads a loader for all; None: the kind of dataset decides, or the loader component does not say."""
        return getattr(self._parts.loader, "dispatch_batches", None)

    @property
    def even_batches(self) -> bool | None:
        """Whether an incomplete last global batch is filled; None if the loader component does not say.

        It may be assigned between two windows, and holds for loaders that are prepared afterwards.
        """
        return getattr(self._parts.loader, "even_batches", None)

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        value = flag("even_batches", even, "", None).value
        self._refuse_in_window("even_batches", even)
        if self.even_batches is None:
            raise AttributeError(
                "accelerator.even_batches was assigned, but the loader component has no such option. Install accel-data, whose "
                "loaders have it."
            )
        self._parts.loader.even_batches = value  # type: ignore[attr-defined]

    @property
    def use_seedable_sampler(self) -> bool | None:
        """Whether loaders shuffle by `torch.randperm`, seeded by epoch; None if the loader component does not say."""
        return getattr(self._parts.loader, "use_seedable_sampler", None)

    @property
    def non_blocking(self) -> bool | None:
        """Whether the host goes on while batches are copied to the device; None if the loader component does not say."""
        return getattr(self._parts.loader, "non_blocking", None)

    @property
    def rng_types(self) -> list[str] | None:
        """The random streams that ranks share whenever a loader is iterated; None if the loader component does not say."""
        shared = getattr(self._parts.loader, "rng_types", None)
        return None if shared is None else list(shared)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether `scheduler.step()` waits for the optimizer."""
        return self._scheduler_rule.with_optimizer

    @property
    def running_loader(self) -> RunningLoader | None:
        """The prepared loader that is being iterated, the innermost one, and its present batch; None outside of such loops."""
        passage = self._feed.newest()
        if passage is None:
            return None
        loaders = self._prepared.loaders
        loader = next((each for each in loaders if getattr(each, "_accel_outlet", None) is passage.by), None)
        return RunningLoader(loader, passage.remaining, passage.rows)

    @property
    def scaler(self) -> Any:
        """What scales losses, with `state_dict` and `load_state_dict`, for checkpoints of one's own; None where nothing does."""
        return next(iter(self._scales()), None) if self._parts.activation.owners["scale_loss"] else None

    @property
    def step(self) -> int:
        """Micro-batches of the open window so far; 0 when none is open."""
        return self._accumulation.position

    @property
    def sync_gradients(self) -> bool:
        """Whether no window of accumulation is open: `optimizer.step()` would step now."""
        return not self._accumulation.open

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer left the parameters as they were (an overflow, say)."""
        gates = (gate_of(optimizer) for optimizer in self._prepared.optimizers)
        return any(gate.was_skipped for gate in gates if gate is not None)

    def explain(self) -> Explanation:
        """What is active and why: every choice with its source, every hook with its owner. Print it."""
        from accel_core.plugins.explain import explain

        return explain(self._parts.activation, self._parts.choices, self._options, self._details_of_trackers())

    def set_trigger(self) -> None:
        """Sets a flag that all ranks see at their next `check_trigger`: a loss that is nan, a signal, a time that is up.

        No collective. A signal handler may call it.
        """
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since this was last true; the same answer on every rank. Collective.

        if accelerator.check_trigger():
            break                                   # on all ranks, so that nobody waits for the others
        """
        return self._trigger.check()

    def check_breakpoint(self) -> bool:
        """An older spelling of `check_trigger`. Collective."""
        _CHECK_BREAKPOINT.warn()
        return self._trigger.check()

    def stop_on_signal(self, *signals: signal.Signals | int | str) -> None:
        """From now on a signal does not end this process, but makes `should_stop` true. No collective.

        One that arrives 5 seconds after the first, or later, does what it did before. `end_training` gives signals back what they did before.

        Args:
            signals: such as "SIGUSR1"; none: SIGTERM, which schedulers send before they take a machine away.

        Raises:
            ValueError: for what is no signal here, or cannot be caught; outside of the main thread.
        """
        self._preempted().watch(*signals)

    def should_stop(self) -> bool:
        """Whether any rank was told to stop, by a signal of `stop_on_signal`; the same answer on every rank. Collective.

        if accelerator.should_stop():
            accelerator.save_state(folder)          # on all ranks, at the same step
            break
        """
        return self._preempted().check()

    @overload
    def prepare(self, a: A, /, *, device_placement: Placements = None) -> A: ...
    @overload
    def prepare(self, a: A, b: B, /, *, device_placement: Placements = None) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /, *, device_placement: Placements = None) -> tuple[A, B, C]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, d: D, /, *, device_placement: Placements = None) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, /, *, device_placement: Placements = None
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    def prepare(self, *objects: Any, device_placement: Placements = None) -> Any: ...
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Makes objects ready for the loop, and returns them in the same order; one object is returned alone.

        Models, optimizers, loaders and LR schedulers are prepared, in any order, in any number of calls. Anything else is
        passed through, unless it would be trained on half prepared. An object that was prepared before comes back as it
        is. Collective under strategies that exchange parameters (DDP does), and when the first loader is prepared.

        Args:
            objects: what the loop uses.
            device_placement: per object, whether it is moved to the device; None: as the Accelerator was told.

        Raises:
            TypeError: for a list or dict of models and the like, and for a bare tensor that requires a gradient.
            ValueError: if `device_placement` does not fit the objects, or the strategy places models by itself.
        """
        check_device_placement(device_placement, objects, self._parts.strategy.places_models)
        kinds = [kind_of(obj) for obj in objects]
        results = list(objects)
        optimizers = [obj for obj, kind in zip(objects, kinds, strict=True) if kind == "optimizer"]
        for kind in ORDER:
            for index, obj in enumerate(objects):
                if kinds[index] == kind:
                    placement = None if device_placement is None else device_placement[index]
                    results[index] = self._prepare_one(obj, kind, placement, optimizers)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self, model: ModelT, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ModelT:
        """Prepares one model.

        Args:
            model: the user's model.
            device_placement: whether it is moved to the device; None: as the Accelerator was told.
            evaluation_mode: whether it is only evaluated: precision and compilation apply, and nothing else.
        """
        check_device_placement(
            None if device_placement is None else [device_placement], [model], self._parts.strategy.places_models
        )
        return cast("ModelT", self._prepare_model(model, device_placement, (), evaluation_mode))

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Prepares one loader: each rank reads its part of every global batch. Collective for the first loader.

        Args:
            data_loader: the user's loader, which is not changed; or any iterable of batches that has `state_dict` and
                `load_state_dict`.
            device_placement: whether batches are moved to the device; None: as the Accelerator was told.
            slice_fn_for_dispatch: `slice_fn(batch, slice, process_index=…, num_processes=…)` cuts the part of one process out of
                a global batch, where batches are dispatched from one process; None: every tensor along dim 0.
        """
        data_loader = as_data_loader(data_loader)
        if any(data_loader is known for known in self._prepared.loaders):
            return data_loader
        if self._seed is None:
            self._seed = agree_seed(self._world, getattr(self._parts.loader, "data_seed", None))
        prepared = self._relay.prepare_loader(
            data_loader,
            self._layout.shard,
            self._feed,
            self._placement(device_placement),
            self._seed,
            len(self._prepared.loaders),
            self._layout.data_group,
            slice_fn_for_dispatch,
        )
        warn_of_empty(prepared)
        self._prepared.loaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader that leaves out the first batches of this rank in each of its iterations, for going on inside an epoch.

        They are counted from the beginning of the epoch, also where `load_state` has put the loader inside it: a script that
        skips by hand lands in the same place. 0 leaves out nothing, and goes on where `load_state` has put it.

        It shares the epochs of the prepared loader: loop over it for the rest of an epoch, and over the loader itself from
        then on. Samples that have indices are not read.

        Args:
            dataloader: a prepared loader.
            num_batches: how many batches are left out.

        Raises:
            TypeError: if the loader is not prepared, or its component cannot leave out batches.
            ValueError: if the number is negative, or no whole number.
        """
        behind = getattr(dataloader, "behind", None)
        if not callable(behind):
            raise TypeError(
                f"skip_first_batches() was given a {type(dataloader).__name__} that cannot leave out batches. Pass the loader "
                f"that prepare() returned; one of a loader component that cannot do it is to be skipped by hand."
            )
        skipped: DataLoader[Any] = behind(num_batches)
        return skipped

    def prepare_optimizer(self, optimizer: OptimizerT, device_placement: bool | None = None) -> OptimizerT:
        """Prepares one optimizer, in place: `step` and `zero_grad` wait for the end of the window.

        Args:
            optimizer: built before or after its model was prepared.
            device_placement: whether the state that it has already is moved to the device of its parameters; None: as the
                Accelerator was told.
        """
        require("prepare_optimizer()", optimizer, Optimizer, "a torch.optim.Optimizer")
        self._relay.check_optimizer(optimizer)
        if self._detector is not None:
            fused_backward.refuse_detection(optimizer)
        if not self._has_gate(optimizer):
            if device_placement if device_placement is not None else self.device_placement:
                place_state(optimizer)
            OptimizerGate(
                optimizer, self._accumulation, self._relay, self._prepared, self._needs_backward, self._engine
            )
        if not any(optimizer is known for known in self._prepared.optimizers):
            self._prepared.optimizers.append(optimizer)
            self._prepared.unchecked = True
            self._prepared.fused |= fused_backward.is_fused(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: T) -> T:
        """Prepares one LR scheduler, in place: one `step()` is one step per real step of its optimizer."""
        if not is_scheduler(scheduler):
            raise TypeError(
                f"prepare_scheduler() was given a {type(scheduler).__name__}, expected an LR scheduler: an object with "
                f"step(), state_dict(), and the optimizer that it drives as `optimizer`."
            )
        gate_scheduler(scheduler, self._scheduler_rule)
        if not any(scheduler is known for known in self._prepared.schedulers):
            self._prepared.schedulers.append(scheduler)
        return scheduler

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The user's model inside a prepared one.

        Args:
            model: a prepared model, or one that was compiled since; any other model is returned as it is.
            keep_fp32_wrapper: whether calls of the result still go through the precision's casts. False gives the model its
                original class back, for good.
        """
        inner = getattr(model, "_orig_mod", model)
        record = self._prepared.find_model(inner)
        if record is not None:
            inner = record.original
        elif isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        if not keep_fp32_wrapper:
            remove_policy(inner)
        return inner

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        """Has another method of a prepared model run as its forward does: under the strategy, and in the precision.

            model = accelerator.prepare(agent)
            accelerator.mark_forward_method(model, "act")
            loss = loss_fn(model.act(observation))  # gradients are averaged as after model(observation)

        No collective. Copies of the model have it too; `free_memory` takes it away.

        Args:
            model: a prepared model.
            name: of a method that computes with parameters.

        Raises:
            ValueError: if the model is not prepared, or has no such method.
        """
        record = self._prepared.find_model(model)
        if record is None:
            raise ValueError(
                f"mark_forward_method() was given a {type(model).__name__} that is not prepared. Pass the model that prepare() "
                f"returned."
            )
        from accel_core.loop.forward_methods import mark_forward_method

        mark_forward_method(record.prepared, record.original, name)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state of a model, under the user's parameter names. Collective under every strategy.

        Args:
            model: a prepared model, or any other.
            unwrap: False keeps the names that a wrapper adds.

        Returns:
            Under a strategy that replicates parameters, the live state on every rank; under one that lays them out in its own
            way, all of it in the CPU memory of the main process, and nothing on the others.
        """
        self._world.arrive("get_state_dict()")
        if unwrap and self._is_laid_out(model):
            present, prefix = self._presenting(model)
            checkpoints = self._parts.defaults.checkpoints("get_state_dict()")
            return checkpoints.gather_state_dict(present, self._world, prefix)
        return (self.unwrap_model(model) if unwrap else model).state_dict()

    def build_model(
        self, factory: Callable[[], nn.Module], checkpoint: str | os.PathLike[str] | None = None
    ) -> nn.Module:
        """Builds a model that may be too large for one process; pass it to `prepare`, and build its optimizer from it as usual.

            model = accelerator.build_model(lambda: GPT(config))

        Under a strategy that cuts models it has no data until `prepare`, where each process is given its part. Elsewhere it is
        what the factory gives. Collective, as `prepare` is.

        Args:
            factory: builds the model, called without arguments, the same on every rank. What it does beside that, such as printing,
                may happen on any rank, and more than once.
            checkpoint: a file or a folder whose weights the model gets, as in `load_checkpoint_in_model`. None: those that the
                factory gives on rank 0.

        Raises:
            TypeError: if the factory gives no module.
            CheckpointError: if the weights do not fit, or cannot be read.
        """
        if not callable(factory):
            raise TypeError(
                f"build_model() was given a {type(factory).__name__}, expected what builds the model: a function without arguments, "
                f"e.g. build_model(lambda: GPT(config)). A model that is built already goes to prepare()."
            )
        with self._world.collective("build_model()"):
            model = self._relay.build_model(factory, None if checkpoint is None else Path(checkpoint))
        require("build_model()", model, nn.Module, "a factory that returns a torch.nn.Module")
        return model

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a submodule of `model` is spread over several places by its `hf_device_map`."""
        return has_device_map(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Undresses and forgets everything that was prepared, and frees what memory that gives.

        Args:
            objects: what the caller is about to drop: `model, optimizer = accelerator.free_memory(model, optimizer)`.

        Returns:
            As many times None as objects were given.
        """
        count = len(objects)
        del objects
        self._prepared.await_copies()
        self._prepared.release_models(self._relay.release_model)
        models = [record.original for record in self._prepared.models]
        self._prepared.release()
        for model in models:
            self._relay.revert_model(model)
        del models[:]
        self._accumulation.reset()
        if self._detector is not None:
            self._detector.release()
        from accel_core.loop.memory import clear_device_cache

        clear_device_cache(garbage_collection=True)
        return [None] * count

    clear = free_memory

    def accumulate(self, *models: nn.Module, closes: bool | None = None) -> AbstractContextManager[None]:
        """One micro-batch of a window: gradients add up, and the optimizer steps when the window closes.

        A window has `gradient_accumulation_steps` micro-batches, and closes early at the end of a prepared loader. Its
        gradient is the mean over the micro-batches that are in it.

        Args:
            models: the prepared models whose gradients need not be synchronised before the window closes; none: all.
            closes: for loops that count themselves: whether this micro-batch closes the window, however many are in it. Say it in
                all micro-batches, and the same on every rank. None: the number of micro-batches decides.
        """
        return Accumulate(self._accumulation, models or self._prepared.trained(), self._relay.no_sync, closes)

    def backward(self, loss: torch.Tensor, learning_rate: float | None = None, **kwargs: Any) -> None:
        """Use it instead of `loss.backward()`: scales for the window and the precision, and synchronises when it closes.

        Outside `accumulate` the gradient is divided by `gradient_accumulation_steps`.

        Args:
            loss: a scalar tensor, the mean over this rank's micro-batch.
            learning_rate: for an optimizer that updates the parameters during the backward, such as LOMO's, and only for
                such a one: see `accel_core.loop.fused_backward`.
            kwargs: of `torch.Tensor.backward`, such as `retain_graph`; with `gradient` the loss may have dimensions.

        Raises:
            TypeError: if the loss is not a tensor.
            ValueError: if it is not a scalar.
            RuntimeError: in a world larger than one, if an optimizer holds parameters of no prepared model.
        """
        if self._prepared.unchecked:
            self._prepared.check_orphans()
            check_reading(self._feed, self._layout.shard.count)
        if type(loss) is not torch.Tensor or loss.dim():
            _check_loss(loss, kwargs)
        if learning_rate is not None or self._prepared.fused:
            self._fused_backward(loss, learning_rate, kwargs)
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
        else:
            relay.backward(relay.scale_loss(loss), weight, closes, kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """`backward(loss, learning_rate=learning_rate)` under its older name."""
        self.backward(loss, learning_rate=learning_rate)

    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Iterable[Any],
        loss_fn: LossFn,
        inputs: Inputs | None = None,
    ) -> torch.Tensor:
        """Runs a whole window, so that batches of different sizes weigh what they hold.

        The gradient is that of (sum of all losses) / (sum of all weights), over the micro-batches and the data-parallel
        ranks: the same as one big batch on one rank. Step, clip and schedule afterwards as usual, without `accumulate`.
        Collective over the data-parallel ranks, which may have different numbers of micro-batches.

        Args:
            model: a prepared model.
            micro_batches: the batches of this rank's window, at least one.
            loss_fn: `loss_fn(output, batch)` gives the loss *summed* over the micro-batch, a scalar tensor, and its weight,
                a number: over how many tokens or samples it is summed. A weight of 0 is fine.
            inputs: `inputs(batch)` gives the positional arguments (a tuple) and keyword arguments (a dict) of the model.
                Not given: a mapping is passed as keywords, of a tuple or list the first element, anything else as it is.

        Returns:
            The weighted mean loss over the window and the ranks: 0-d, detached, on `device`; nan if all weights are 0.

        Raises:
            ValueError: without a micro-batch, or if the sum is not a scalar.
            RuntimeError: inside `accumulate`, while a window is open, or where `join_uneven_inputs` joins models.
        """
        if self._prepared.fused:
            fused_backward.refuse("forward_backward()", self._prepared.optimizers)
        if self._feed.joining:
            raise RuntimeError(
                "forward_backward() counts its window over all ranks, and inside join_uneven_inputs() some may have ended. Take "
                "the block away and call it on all ranks equally often; numbers of micro-batches may differ."
            )
        if self._accumulation.inside or self._accumulation.open:
            raise RuntimeError(
                "forward_backward() runs a window of its own, but a window of accumulate() is open. Take the call out "
                "of accumulate(), and let that window end before."
            )
        if self._prepared.unchecked:
            self._prepared.check_orphans()
            check_reading(self._feed, self._layout.shard.count)
        self._accumulation.whole_window()
        with self._world.collective("forward_backward()"):
            mean = self._relay.forward_backward(
                model, micro_batches, loss_fn, inputs or default_inputs, self._relay.scale_loss
            )
        self._accumulation.count_backward()
        return mean

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Forwards inside lead to backwards that keep their gradients local; nothing happens where nothing travels.

        A backward outside stays local too if its forward ran inside, until `trigger_sync_in_backward` or the next
        forward outside.

        Args:
            model: a prepared model; None: all that are trained.
        """
        return self._on_models(self._relay.no_sync, model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward of `model` synchronises all its gradients, although its forward ran inside `no_sync`."""
        return self._relay.trigger_sync_in_backward(model)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A block in which ranks may train on different numbers of batches, none included; at its end all ranks agree again.

        A rank that has ended takes part in the others' steps with zeros, which still count in the mean. Then models,
        prepared optimizers and schedulers are those of the rank that went on longest. Inside, windows of accumulation close
        by count alone, and one that is open at the end is dropped with a warning. Leave other collectives, evaluation too,
        out of the block: a rank that has ended does not make them. Collective, if models are joined.

        Args:
            joinables: the prepared models that are trained, and other objects of torch's `Joinable`. None at all: only
                `even_batches` acts, for loops that communicate nothing.
            even_batches: overrides the option of that name for iterations of prepared loaders that begin inside; None
                leaves it.

        Raises:
            TypeError: in a world larger than one, for a model that cannot join; for an `even_batches` of another type.
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
        """Scales gradients in place so that their joint norm is at most `max_norm`; gradients are unscaled first.

        While a window is open nothing is clipped: the gradients are parts, and local ones. Collective under a strategy whose
        gradients lie in parts on the ranks.

        Args:
            parameters: one, or any iterable of them: all, a subset, a generator. Those without gradient count nothing.
            max_norm: the largest norm.
            norm_type: the order of the norm; `inf` for the largest component.

        Returns:
            The norm before clipping, 0-d; while a window is open that of this rank's pending gradients, still scaled.
        """
        if self._prepared.fused:
            fused_backward.refuse("clip_grad_norm_()", self._prepared.optimizers)
        clipped = gradients.as_list(parameters)
        if not self._accumulation.open:
            self._unscale_holders(clipped)
        if self._clips_kept:
            clipped = self._whole_gradients(clipped)
        if not self._accumulation.open:
            return self._relay.clip_gradients(clipped, max_norm, norm_type)
        if self._parts.activation.owners["clip_gradients"] is None:
            return nn.utils.get_total_norm([each.grad for each in clipped if each.grad is not None], norm_type)
        return self._relay.clip_gradients(clipped, torch.inf, norm_type)  # the strategy's norm: nothing is larger

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps each component of the gradients to [-clip_value, clip_value]; nothing while a window is open."""
        if self._prepared.fused:
            fused_backward.refuse("clip_grad_value_()", self._prepared.optimizers)
        clipped = gradients.as_list(parameters)
        if not self._accumulation.open:
            self._unscale_holders(clipped)
            if self._prepared.gradients.are_elsewhere:
                clipped = self._prepared.gradients.stand_ins(clipped)
            nn.utils.clip_grad_value_(clipped, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Undoes the loss scaling of gradients, once between two steps; nothing happens where nothing is scaled.

        Args:
            optimizer: one, or several; None: all that are prepared.
        """
        given = self._prepared.optimizers if optimizer is None else optimizer
        for each in [given] if isinstance(given, Optimizer) else given:
            gate = gate_of(each)
            if gate is None:
                raise ValueError(
                    f"unscale_gradients() was given a {type(each).__name__} that is not prepared. Pass it to prepare() "
                    f"first."
                )
            if not self._accumulation.open:
                gate.unscale(each)

    def autocast(
        self, cache_enabled: bool | None = None, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
        """Runs a block in the precision's compute dtype; in full precision nothing happens.

        Args:
            cache_enabled: whether weights that were cast are kept until the block ends; None: as the handler says.
            autocast_handler: options for this block instead of the Accelerator's.
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
        """Shares sequences out over the ranks of a context-parallel strategy; without one, nothing happens.

        with accelerator.maybe_context_parallel([ids, labels], [1, 1]):
            loss = loss_fn(model(ids), labels)      # each rank has a part of every sequence
            accelerator.backward(loss)

        Args:
            buffers: tensors that lie along the sequence: ids, labels, masks, tables of positions. They are changed in place.
            buffer_seq_dims: for each of them, the dim of the sequence.
            no_restore_buffers: those of them that are not needed whole behind the block.

        Raises:
            ValueError: if there is not one dim per tensor, or a tensor has no such dim.
        """
        given, dims = list(buffers or ()), list(buffer_seq_dims or ())
        if len(given) != len(dims):
            raise ValueError(
                f"maybe_context_parallel() was given {len(given)} buffers and {len(dims)} buffer_seq_dims. Give the dim of the "
                f"sequence for each tensor, in the same order."
            )
        for number, (buffer, dim) in enumerate(zip(given, dims, strict=True)):
            if not -buffer.dim() <= dim < buffer.dim():
                raise ValueError(
                    f"maybe_context_parallel(): buffer {number} has the shape {tuple(buffer.shape)}, and buffer_seq_dims says that its "
                    f"sequence lies along dim {dim}. Give one of its dims."
                )
        return self._relay.context_parallel(given, dims, list(no_restore_buffers or ()))

    def gather(self, tensor: T) -> T:
        """Concatenates tensors of all ranks along dim 0, in rank order. Collective.

        Args:
            tensor: a tensor, or nested tuples, lists and dicts of them, of one structure on all ranks. Sizes may differ in
                dim 0 only. A 0-d tensor gives one element per rank.

        Returns:
            The same structure, detached, on every rank.

        Raises:
            CollectiveMismatchError: on every rank, if structures, dtypes or other dims differ.
        """
        return reduce_gather.gather(tensor, self._world)

    def reduce(self, tensor: T, reduction: Reduction = "sum", scale: float = 1.0) -> T:
        """Combines tensors over the ranks: their sum, mean or maximum. Collective.

        Args:
            tensor: a tensor, or nested tuples, lists and dicts of them, of one structure and shape on all ranks.
            reduction: "sum", "mean", "max", or "none", which returns the input.
            scale: a factor for the result.

        Raises:
            CollectiveMismatchError: on every rank, if structures, dtypes or shapes differ.
        """
        return reduce_gather.reduce_tree(tensor, self._world, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pads tensors to the largest size over the ranks in one dim, so that they can be gathered. Collective.

        Args:
            tensor: a tensor, or nested tuples, lists and dicts of them; those without that dim stay as they are.
            dim: the dim in which ranks may differ; negative ones count from the end.
            pad_index: the value that fills up.
            pad_first: whether it stands before the values instead of behind them.

        Raises:
            CollectiveMismatchError: on every rank, if structures, dtypes or numbers of dims differ.
        """
        from accel_core.collectives.padding import pad_across_processes

        return pad_across_processes(tensor, self._world, dim, pad_index, pad_first)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Profiles a block with torch's profiler: `with accelerator.profile() as prof:`. No collective.

        Args:
            profile_handler: options for this block instead of those among `kwargs_handlers`. With `output_trace_dir` each
                rank writes a Chrome trace there.
        """
        from accel_core.loop.profiling import ProfileKwargs, profile

        handler = profile_handler or self._parts.handlers.get(ProfileKwargs) or ProfileKwargs()
        assert isinstance(handler, ProfileKwargs), "handlers are kept by their class"
        return profile(handler, self._world)

    @overload
    def gather_for_metrics(self, input_data: T, use_gather_object: Literal[False] = False) -> T: ...
    @overload
    def gather_for_metrics(self, input_data: Sequence[T], use_gather_object: Literal[True]) -> list[T]: ...
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers per-sample results over the data-parallel ranks, each sample exactly once. Collective.

        Samples that only fill the last batch are left out. Which those are is known of the batch that a prepared loader has
        yielded last: call it inside the loop, before the next batch is drawn (not on a list of batches drawn before).

        Args:
            input_data: tensors whose dim 0 is the batch's, in nested tuples, lists and dicts; or a list of per-sample
                objects.
            use_gather_object: whether `input_data` is a list of objects although it holds tensors.

        Raises:
            ValueError: in a world larger than one, if a tensor has another number of rows than the batch.
            CollectiveMismatchError: on every rank, if structures, dtypes or other dims differ.
        """
        rows = self._feed.current_rows()
        return metrics.gather_for_metrics(input_data, rows, self._world, self._layout.data_group, use_gather_object)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model's weights as plain files that any library reads. Collective; the main process writes.

        Args:
            model: a prepared model, or any other.
            save_directory: is made if it does not exist; files of the user's own beside ours are left alone.
            max_shard_size: the largest size of a file, in bytes, or as text ("10GB" is 10^10 bytes, "10GiB" 10 * 2^30).
            safe_serialization: safetensors; False: torch's format.
        """
        require("save_model()", model, nn.Module, "a torch.nn.Module")
        checkpoints = self._parts.defaults.checkpoints("save_model()")
        self._world.arrive("save_model()")
        laid_out = self._is_laid_out(model)
        weights, prefix = self._presenting(model) if laid_out else (self.unwrap_model(model), "")
        checkpoints.save_weights(weights, save_directory, max_shard_size, safe_serialization, self._world, prefix)

    def save(self, obj: object, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes an object on the main process, and does nothing elsewhere: it serves as `save_function=`. No collective.

        With `ProjectConfiguration(save_on_each_node=True)` the first process of each machine writes.

        Args:
            obj: what `torch.save` takes; a dict of tensors with `safe_serialization`.
            f: the file.
            safe_serialization: safetensors instead of torch's format.
        """
        each_node = self._project.save_on_each_node
        self._parts.defaults.checkpoints("save()").save_object(obj, f, safe_serialization, self._world, each_node)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: Asynchronous = False,
        **save_model_func_kwargs: object,
    ) -> str:
        """Saves all of the run: any strategy on any number of processes goes on from it. Collective; every rank writes.

        Saved are the prepared models, optimizers, schedulers and loaders with their positions, what was registered, the random
        streams of every rank, and the gradients of a window that is open. A kill or a full disk at any moment leaves what was
        saved before in that folder; other files in it are left alone. (What hooks write there is theirs: a hook that takes models
        had better be given a new folder by every save, as automatic names do.)

        Args:
            output_dir: the folder; with `automatic_checkpoint_naming` it is given by that.
            safe_serialization: True: a checkpoint is never pickled.
            asynchronous: True or "eager": returns when everything is copied, and a thread writes. "lazy": returns at once; the
                next step of a prepared optimizer waits for the copies, and whoever else changes parameters before
                `wait_for_checkpoint` makes the save fail. Failures are raised by the next `save_state`, `load_state`,
                `wait_for_checkpoint` or `end_training`.
            save_model_func_kwargs: options of a native format. The neutral one has none.

        Returns:
            The folder.

        Raises:
            CheckpointError: on every rank, for what cannot be saved, and for a folder that holds something else.
            OSError: on every rank, if one cannot write.
            ValueError: without a folder, or with one too many.
        """
        if not safe_serialization:
            raise ValueError(
                "save_state(safe_serialization=False) was asked for, but a pickled checkpoint is never loaded. Leave it out; "
                "save_model(safe_serialization=False) writes weights in torch's format."
            )
        refuse_keywords("save_state()", save_model_func_kwargs)
        return self._relay.save_checkpoint(self._run, output_dir, asynchronous)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: object,
    ) -> None:
        """Restores all of a run that `save_state` saved, on any number of processes and under any strategy. Collective.

        Prepare and register the same objects first, in the same order. The next iteration over each prepared loader goes on at
        its position, and the epochs after it are whole. Every rank that was there goes on with its random streams, those of a
        device if it is of the same kind; ranks that were not get new ones.

        Args:
            input_dir: the folder; None: the newest complete one of the automatic names.
            load_kwargs: options of a native format. The neutral one has none.
            load_model_func_kwargs: the same; `map_location` is accepted: state goes where the prepared objects are.

        Raises:
            CheckpointError: on every rank: for a folder without a complete checkpoint, for a damaged file, which is named; and,
                before anything is changed, for what does not fit, all of it listed.
        """
        given = {**(load_kwargs or {}), **load_model_func_kwargs}
        given.pop("map_location", None)
        refuse_keywords("load_state()", given)
        self._relay.load_checkpoint(self._run, input_dir)

    def wait_for_checkpoint(self) -> None:
        """Returns when the asynchronous save that is under way is complete on every rank. Collective, if there is one.

        Raises:
            CheckpointError, OSError: on every rank, if it failed. What was saved before is untouched.
        """
        if self._run_made is not None:
            self._relay.wait_for_checkpoint(self._run_made)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Has objects of the user's saved by `save_state` and restored by `load_state`, in the order of registration.

        Args:
            objects: each with `state_dict()`, of plain data, tensors and arrays, and `load_state_dict(state)`.

        Raises:
            ValueError: naming those without, by their position.
        """
        self._run.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Has `hook(models, weights, output_dir)` called by `save_state`, on every rank, before anything else is written.

        `weights[i]` is a mapping from names to tensors, as `get_state_dict(models[i])` gives it; only what is read is gathered.
        An entry that the hook takes out of `weights`, on the main process, is left to it.

        Returns:
            A handle; its `remove()` takes the hook away again.
        """
        return self._run.on_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Has `hook(models, input_dir)` called by `load_state`, on every rank, before anything is loaded.

        A model that the hook takes out of `models` is left to it.

        Returns:
            A handle; its `remove()` takes the hook away again.
        """
        return self._run.on_load(hook)

    def init_trackers(
        self,
        project_name: str,
        config: object = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        resume: bool = True,
    ) -> None:
        """Says what the trackers of `log_with` record. No collective; on processes that do not record it does nothing.

        They start with the first record, so that a `load_state` in between can go on with the run of the checkpoint.

        Args:
            project_name: of the project that the run belongs to.
            config: what the run was configured with: a dict, a dataclass, what argparse returns, or anything else; it is stored
                readably, whatever is in it.
            init_kwargs: for each tracker, by name, what is handed to its service's own start.
            resume: whether the run of a checkpoint of the same project that is loaded goes on; False: a new run begins.

        Raises:
            RuntimeError: if the run has begun already.
            TypeError, ValueError: for a name that no tracker has, and arguments of another type.
        """
        if self._trackers is not None:
            self._trackers.init(project_name, config, init_kwargs, resume=resume)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Records values with every tracker. No collective; it neither waits for a tracker nor for the device.

        The main process records, unless a tracker says otherwise; call it on all. Without trackers it does nothing.

        Args:
            values: name → a number, a tensor of one element, a text, a `Histogram`, a service's own object, or a dict of these.
            step: at least 0; None: the one after the largest so far. A run that is resumed goes on with the step of the checkpoint.
            log_kwargs: for each tracker, by name, what its own log is to be given.

        Raises:
            RuntimeError: before `init_trackers`, on processes that record.
            TypeError, ValueError: for arguments of another type, and a name that no tracker has. Values that cannot be recorded, such as
                two of one name, are left out with a warning; under `TrackingKwargs(strict=True)` they are an error, too.
            TrackerError: if a tracker has failed, under `TrackingKwargs(strict=True)`; else that is a warning, once.
        """
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        dataformats: str | None = None,
    ) -> None:
        """Records images with every tracker that has them. No collective; images on a device are waited for.

        Args:
            values: name → an image, or several as a batch or a list. Tensors have their channels first, (C, H, W) or (N, C, H, W),
                arrays last, (H, W, C) or (N, H, W, C); both may be (H, W); images of PIL are taken too. C is 1, 3 or 4. Values are
                uint8, booleans, or floats in 0 … 1.
            step: as for `log`; None: the largest one that was logged.
            log_kwargs: as for `log`.
            dataformats: the order of dimensions where it is another one, such as "NHWC".

        Raises:
            As `log`; what is no image is left out with a warning.
        """
        if self._trackers is not None:
            self._trackers.log_images(values, step, log_kwargs, dataformats)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Records a table with every tracker that has them. No collective.

        Args:
            table_name: its name.
            columns: names of the columns.
            data: rows, each with one cell per column.
            dataframe: of pandas or polars, instead of columns and data.
            step: as for `log`; None: the last one that was logged.
            log_kwargs: as for `log`.

        Raises:
            As `log`; what is no table (rows of other lengths, both or neither of data and dataframe) is left out with a warning.
        """
        if self._trackers is not None:
            self._trackers.log_table(table_name, (columns, data, dataframe), step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, when all that was handed over to it is recorded, or after `stall_timeout`. No collective.

        Args:
            name: such as "tensorboard".
            unwrap: whether to return the service's own object instead.

        Returns:
            A `TrackerHandle`, which records with this tracker alone by `log`, `log_images` and `log_table`, and has the tracker's own
            attributes; of a `GeneralTracker` itself. Where it does not record, on other processes than the main one and once it is
            switched off, an object that takes every call and does nothing.

        Raises:
            ValueError: if `log_with` has no tracker of that name.
        """
        if self._trackers is None:
            raise ValueError(
                f"get_tracker({name!r}) was called, but log_with asks for no tracker. Write Accelerator(log_with={name!r})."
            )
        return self._trackers.get(name, unwrap)

    @property
    def trackers(self) -> list[TrackerHandle | GeneralTracker]:
        """The trackers that record in this process: those of `log_with` on the main process, else none, unless one says otherwise.

        As `get_tracker` gives them, but nothing is begun, or waited for, until they are used.
        """
        return [] if self._trackers is None else self._trackers.in_hand

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers, the same on every process."""
        return [] if self._parts.trackers is None else self._parts.trackers.names

    def end_training(self, *, failed: bool | None = None) -> None:
        """Ends the run: listeners and trackers finish, and the process group ends if it was started here and nobody else uses it.

        An asynchronous save is waited for, and signals do again what they did before. Collective. Call it last; it may be
        repeated. A script that does not call it ends cleanly too.

        Args:
            failed: whether trackers record the run as failed. None: if an exception is on its way, as in a `finally`; it cannot be
                told from one that is being handled, so an `except` that ends a run well says False.

        Raises:
            CheckpointError, OSError: on every rank, at the end of all that, if an asynchronous save failed.
            TrackerError: if a tracker has failed, under `TrackingKwargs(strict=True)`.
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

    @property
    def _run(self) -> Run:
        if self._run_made is None:
            from accel_core.loop.run import Run

            parts, this = self._parts, weakref.ref(self)
            plugins = [choice.selected.component for choice in parts.choices if choice.role == "plugin"]
            components = {"precision": parts.precision, "strategy": parts.strategy}
            components |= {f"plugin.{number}": plugin for number, plugin in enumerate(plugins)}
            self._run_made = Run(
                world=self._world,
                relay=self._relay,
                prepared=self._prepared,
                accumulation=self._accumulation,
                strategy=parts.strategy,
                components=components,
                project=self._project,
                recorder=self._trackers,
                declares_layout=self._declares_layout,
                seed=partial(_seed_of, this),
                explain=partial(_explanation_of, this),
            )
        return self._run_made

    @property
    def _declares_layout(self) -> bool:
        """Whether the strategy says by hooks how it lays out models and optimizers."""
        return all(self._parts.activation.owners[hook] is not None for hook in LAYOUT_HOOKS)

    def _scales(self) -> list[Any]:
        """What changes with the steps of this rank, and has to be the same on all: the precision, if it has a state."""
        from accel_core.loop.run import has_state

        return [self._parts.precision] if has_state(self._parts.precision) else []

    def _make_recorder(self, parts: Assembly) -> Recorder | None:
        if parts.trackers is None or parts.recorder is None:
            return None
        return parts.recorder(parts.trackers, parts.tracking, self._world, self._project)

    def _details_of_trackers(self) -> list[Detail]:
        from accel_core.plugins.explain import Detail

        details = {} if self._trackers is None else self._trackers.details()
        return [Detail("tracker", name, "state", text) for name, text in details.items()]

    def _preempted(self) -> Preemption:
        if self._preemption is None:
            from accel_core.collectives.stop_signals import Preemption

            self._preemption = Preemption(self._world)
        return self._preemption

    def _is_laid_out(self, model: nn.Module) -> bool:
        """Whether this is a prepared model, or a part of one, that the strategy has laid out in its own way."""
        return self._declares_layout and self._prepared.find_part(model) is not None

    def _presenting(self, model: nn.Module) -> tuple[Callable[[], State], str]:
        """What presents the state of a model that is laid out; and the prefix of the names in it, if it is a part of one."""
        found = self._prepared.find_part(model)
        assert found is not None, "a prepared model, or a part of one"
        record, prefix = found
        return partial(self._relay.model_state, record.original, record.prepared), prefix

    def _prepare_one(self, obj: Any, kind: str, placement: bool | None, optimizers: Sequence[Optimizer]) -> Any:
        if kind == "model":
            return self._prepare_model(obj, placement, optimizers, evaluation=False)
        if kind == "loader":
            return self.prepare_data_loader(obj, placement)
        if kind == "optimizer":
            return self.prepare_optimizer(obj, placement)
        if kind == "scheduler":
            return self.prepare_scheduler(obj)
        return obj

    def _prepare_model(
        self, model: nn.Module, placement: bool | None, optimizers: Sequence[Optimizer], evaluation: bool
    ) -> nn.Module:
        require("prepare_model()", model, nn.Module, "a torch.nn.Module")
        known = self._prepared.find_model(model)
        if known is not None:
            if known.evaluation and not evaluation:
                raise ValueError(
                    f"{type(model).__name__} was prepared with evaluation_mode=True, so its gradients would not be "
                    f"synchronised. Prepare it for training first; a prepared model can be evaluated too."
                )
            return known.prepared
        check_device_map(model, self._world, self._parts.precision.policy.param)
        request = PrepareRequest(
            policy=self._parts.precision.policy,
            device=None if stays_in_place(model) else self._placement(placement),
            device_type=self.device.type,
            evaluation=evaluation,
            compile_options=self._parts.compile_options,
            autocast=self._parts.autocast,
        )
        with self._world.collective("prepare()"):
            holders = self._prepared.holders(model, optimizers)
            replacement = ParameterReplacement(model, holders)
            self._relay.convert_model(model, evaluation)
            replacement.apply()
            prepared = self._relay.prepare_model(model, holders, request)
            check_state_kept(holders)
        # What is given may be a wrapper already, that of an earlier Accelerator for instance.
        inner = self.unwrap_model(model)
        named = dict(inner.named_parameters(remove_duplicate=False))
        self._prepared.models.append(PreparedModel(inner, prepared, evaluation, tuple(prepared.parameters()), named))
        if self._detector is not None and not evaluation:
            self._detector.watch(inner)
        return prepared

    def _fused_backward(self, loss: torch.Tensor, learning_rate: float | None, options: dict[str, Any]) -> None:
        fused_backward.fused_backward(
            loss,
            learning_rate,
            self._prepared.optimizers,
            self._accumulation,
            self._world,
            self._parts.activation.owners,
            options,
        )

    def _refuse_in_window(self, option: str, value: object) -> None:
        if self._accumulation.open or self._accumulation.inside:
            raise RuntimeError(
                f"accelerator.{option} = {value!r} was asked for while a window of accumulation is open, which has its length and its "
                f"batches already. Assign it before the first accumulate() of a window, when accelerator.sync_gradients is True."
            )

    def _placement(self, given: bool | None) -> torch.device | None:
        return self.device if (self.device_placement if given is None else given) else None

    def _on_models(
        self, hook: Callable[[nn.Module], AbstractContextManager[None]], model: nn.Module | None
    ) -> AbstractContextManager[None]:
        return hook(model) if model is not None else _on_all(hook, self._prepared.trained())

    def _has_gate(self, optimizer: Optimizer) -> bool:
        """Whether this Accelerator gates it. One that has gone has left its gate behind, which is taken off."""
        gate = gate_of(optimizer)
        if gate is None or gate.owner() is self._prepared:
            return gate is not None
        if gate.owner() is not None:
            raise ValueError(
                f"This {type(optimizer).__name__} is prepared by another Accelerator, whose windows hold its steps back. "
                f"Use that one, or call its free_memory() first."
            )
        gate.remove(optimizer)
        return False

    def _whole_gradients(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Stand-ins whose `.grad` are the gradients that the strategy keeps, all of them here."""
        strategy = self._parts.strategy
        if not strategy.replicates_parameters:
            raise RuntimeError(
                f"clip_grad_norm_() was called, but the strategy {type(strategy).__name__} keeps gradients in a way of its own "
                f"(gradient_state) and does not say that a rank has all of them, so nobody knows their norm. It has to implement the hook "
                f"clip_gradients; or declare replicates_parameters = True. Leave the call out until then."
            )
        return self._prepared.gradients.stand_ins(parameters)

    def _unscale_holders(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._parts.activation.owners["unscale_gradients"] is None:
            return
        clipped = {id(parameter) for parameter in parameters}
        for optimizer in self._prepared.optimizers:
            gate = gate_of(optimizer)
            if gate is not None and any(id(parameter) in clipped for parameter in held_by(optimizer)):
                gate.unscale(optimizer)


@contextmanager
def _on_all(hook: Callable[[nn.Module], AbstractContextManager[None]], models: Sequence[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(hook(model))
        yield


def _seed_of(reference: weakref.ref[Accelerator]) -> int | None:
    accelerator = reference()
    return None if accelerator is None else accelerator._seed


def _explanation_of(reference: weakref.ref[Accelerator]) -> Explanation:
    accelerator = reference()
    assert accelerator is not None, "a call of its own asks for it"
    return accelerator.explain()


def _state_of(parts: Assembly, chosen: ChosenStrategy) -> AcceleratorState:
    name = parts.choices[0].selected.name
    given = chosen.configured or {name: parts.strategy}
    processes = PartialState.of(parts.world)
    return AcceleratorState.of(processes, parts.mixed_precision, given, next(iter(given)), name)


def _check_loss(loss: object, options: dict[str, Any]) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"backward() was given a {type(loss).__name__}, expected the loss as a tensor: what the loss function "
            f"returned, without .item()."
        )
    if loss.numel() != 1 and "gradient" not in options:
        raise ValueError(
            f"backward() was given a loss of shape {tuple(loss.shape)}, expected a scalar. Reduce it, e.g. loss.mean(), or "
            f"pass gradient=."
        )

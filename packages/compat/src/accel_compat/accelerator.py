"""The Accelerator as scripts for Accelerate know it: arguments, defaults, attributes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

import accel_core
from accel_compat import arguments, checkpoints, metrics, tracking
from accel_compat.deepspeed_names import answer_as_engine
from accel_compat.loaders import skip_first_batches
from accel_compat.optimizer import answering as answering_optimizer
from accel_compat.parallel_ranks import ParallelRanks
from accel_compat.plugins import DataLoaderConfiguration, FP8BackendType
from accel_compat.scheduler import answering as answering_scheduler
from accel_compat.state import AcceleratorState, GradientState, PartialState
from accel_core import DistributedType, GeneralTracker
from accel_core.api.launcher import given_outside, variable_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_compat.plugins import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        KwargsHandler,
        MegatronLMPlugin,
        ParallelismConfig,
        ProjectConfiguration,
        TorchDynamoPlugin,
        TorchTensorParallelPlugin,
    )


class Accelerator(ParallelRanks, accel_core.Accelerator):
    """`accel_core.Accelerator` under the arguments, defaults and attributes of Accelerate's.

    Micro-batches of a short last window weigh 1/steps, one `scheduler.step()` is one per process, and a later Accelerator of the
    process has the precision and the plugins of the first. `strategy=`, `loader=` and `plugins=` are arguments of accel-core.
    """

    state: Any = None  # the shared one, assigned in the constructor: an attribute, as scripts replace it
    native_amp: bool = False
    flag_tensor: torch.Tensor | None = None
    has_lomo_optimizer: bool = False
    fp8_recipe_handler: Any = None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: Any = None,
        loader: Any = None,
        plugins: Sequence[object] = (),
    ) -> None:
        given = dict(locals())
        self._arguments = {name: value for name, value in given.items() if name not in ("self", "__class__")}
        if deepspeed_plugin is not None and deepspeed_plugins is not None:
            raise ValueError("deepspeed_plugin and deepspeed_plugins were both given. Leave one out.")
        outside = arguments.environment()
        handlers = arguments.handlers_by_attribute(kwargs_handlers)
        init = handlers["init_handler"]
        cpu = bool(cpu or outside.cpu or PartialState._shared_state.get("_cpu"))
        processes = PartialState(cpu, **({} if init is None else init.ours().to_kwargs()))
        precision = arguments.precision_of(mixed_precision, outside, fsdp_plugin)
        if AcceleratorState._shared_state and mixed_precision is not None:
            AcceleratorState(precision, cpu)  # which refuses another one
        own = arguments.plugins_of(
            arguments.Plugins(
                deepspeed_plugins or deepspeed_plugin,
                fsdp_plugin,
                megatron_lm_plugin,
                parallelism_config,
                torch_tp_plugin,
            ),
            outside,
        )
        strategy = own.strategy(processes.num_processes) if strategy is None else strategy
        config = DataLoaderConfiguration() if dataloader_config is None else dataloader_config
        if split_batches is not None and dataloader_config is None:
            config.split_batches = split_batches
        component = arguments.loaders_of(config, rng_types) if loader is None else loader
        accumulation = arguments.accumulation_of(gradient_accumulation_steps, gradient_accumulation_plugin, outside)
        dynamo = arguments.dynamo_of(dynamo_backend, dynamo_plugin)
        compiler = dynamo.ours() if hasattr(dynamo, "ours") else dynamo
        project = arguments.project_of(project_dir, project_config)
        self._registered = tracking.chosen(log_with, project.logging_dir)
        with arguments.read_already():
            super().__init__(
                device_placement,
                mixed_precision=precision,
                cpu=cpu or None,
                strategy=strategy,
                loader=component,
                plugins=plugins,
                gradient_accumulation_plugin=accumulation.ours(),
                step_scheduler_with_optimizer=step_scheduler_with_optimizer,
                step_scheduler_per_process=step_scheduler_with_optimizer,
                kwargs_handlers=arguments.handlers_in_use(handlers, strategy, precision, processes.num_processes),
                dynamo_plugin=compiler,  # type: ignore[arg-type]  # ours, by now
                dynamo_backend="no" if compiler is None and given_outside(variable_of("dynamo_backend")) else None,
                project_config=project,
                log_with=self._registered or None,
            )
        self._component, self._config = component, config
        self._set_state(cpu, own, dynamo)
        self._set_attributes(handlers, accumulation)

    def _set_attributes(self, handlers: dict[str, Any], accumulation: GradientAccumulationPlugin) -> None:
        for attribute, handler in handlers.items():
            setattr(self, attribute, handler)
        self.has_fp8_handler = any(handlers[name] is not None for name in handlers if "recipe_handler" in name)
        self.gradient_state = GradientState(accumulation)
        self.gradient_state._serve(self)
        self._models: list[nn.Module] = []
        self._freed: WeakSet[nn.Module] = WeakSet()
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []

    def _set_state(self, cpu: bool, plugins: arguments.Plugins, dynamo: Any) -> None:
        kind = accel_core.Accelerator.distributed_type.__get__(self)  # type: ignore[attr-defined]
        parallel, mesh = plugins.parallelism_config, None
        if parallel is not None and not AcceleratorState._shared_state:
            mesh = parallel.get_device_mesh(self.device.type)
        self.state = AcceleratorState(
            self.mixed_precision,
            cpu,
            dynamo_plugin=dynamo,
            **vars(plugins),
            _from_accelerator=True,
            _distributed_type=kind,
            _device_mesh=mesh,
        )
        self.native_amp = self.mixed_precision != "no"

    # ---- options that scripts read and assign

    @property
    def mixed_precision(self) -> str:  # type: ignore[override]
        """The name of the precision as scripts compare it, of an object too: "bf16", say; "no" for full precision."""
        return str(accel_core.Accelerator.mixed_precision.__get__(self)).lower()  # type: ignore[attr-defined]

    @property  # type: ignore[override]  # it may be assigned, and is no option object of the core's
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Options of loaders that are prepared; may be assigned."""
        return self._config

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        self._config = config
        for name, value in vars(config.ours()).items():
            setattr(self._component, name, value)

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are of torchdata's class."""
        return bool(getattr(self._config, "use_stateful_dataloader", False))

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint with an automatic name."""
        return self.project_configuration.iteration

    @property
    def deepspeed_plugin(self) -> Any:
        """The active plugin of DeepSpeed; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with a whole model on an accelerator."""
        word = str(self.distributed_type.value)
        return self.use_distributed and word.startswith("MULTI_") and word != DistributedType.MULTI_CPU

    @property
    def fp8_enabled(self) -> bool:
        """Whether products are computed in fp8."""
        return self.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8; "NO" without a recipe."""
        if self.fp8_recipe_handler is not None:
            return FP8BackendType(self.fp8_recipe_handler.backend)
        known = {"ao_recipe_handler": "AO", "te_recipe_handler": "TE", "msamp_recipe_handler": "MSAMP"}
        name = next((word for attribute, word in known.items() if getattr(self, attribute) is not None), None)
        return FP8BackendType(name or ("AO" if self.fp8_enabled else "NO"))

    # ---- preparation

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Makes objects ready for the loop: see `accel_core.Accelerator.prepare`."""
        prepared = super().prepare(*args, device_placement=device_placement)
        objects = prepared if len(args) > 1 else [prepared]
        for each in objects:
            if isinstance(each, nn.Module):
                self._note_model(each)
        for each in objects:
            if isinstance(each, Optimizer):
                self._prepare_model_of(each)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepares one model."""
        return self._note_model(super().prepare_model(model, device_placement, evaluation_mode))

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepares one optimizer, in place; its attribute `optimizer` is itself."""
        prepared: Any = answering_optimizer(super().prepare_optimizer(optimizer, device_placement))
        prepared._is_accelerate_prepared = True
        return self._note(self._optimizers, prepared)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepares an LR scheduler, in place; its attribute `scheduler` is itself."""
        return self._note(self._schedulers, answering_scheduler(super().prepare_scheduler(scheduler)))

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepares a loader: see `accel_core.Accelerator.prepare_data_loader`."""
        prepared: Any = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared._is_accelerate_prepared = True
        return self._note(self._dataloaders, prepared)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader that leaves out its first batches, prepared or not."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
        recursive: bool = False,  # noqa: ARG002  (what is inside is not wrapped again)
    ) -> nn.Module:
        """The user's model inside a prepared one: see `accel_core.Accelerator.unwrap_model`.

        `keep_torch_compile` keeps the wrapper of a model that `torch.compile` has wrapped; models that are compiled here have none.
        """
        compiled = model if keep_torch_compile and hasattr(model, "_orig_mod") else None
        inner = super().unwrap_model(model, keep_fp32_wrapper)
        if compiled is None or compiled._orig_mod is inner:
            return inner if compiled is None else compiled
        twin = copy.copy(compiled)
        twin._orig_mod = inner
        return twin

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Has the user's objects saved and restored."""
        super().register_for_checkpointing(*objects)
        self._custom_objects.extend(objects)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forgets all that was prepared, and frees its memory. Returns a None for each object."""
        count = len(objects)
        del objects
        self._freed.update(self._models)
        for prepared in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            prepared.clear()
        super().free_memory()
        return [None] * count

    clear = free_memory

    def _prepare_model_of(self, optimizer: Optimizer) -> None:
        """Prepares again what `free_memory` forgot and the script trains on with a new optimizer, as transformers' Trainer does."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held.isdisjoint(id(parameter) for model in self._models for parameter in model.parameters()):
            for model in list(self._freed):
                if not held.isdisjoint(map(id, model.parameters())):
                    self.prepare_model(model)

    def _note_model(self, model: nn.Module) -> nn.Module:
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # as scripts ask for
        if self.distributed_type == DistributedType.DEEPSPEED:
            answer_as_engine(model, self.deepspeed_plugin)
        self._note(self._models, model)
        return model

    def _note(self, prepared: list[Any], obj: Any) -> Any:
        if not any(obj is known for known in prepared):
            prepared.append(obj)
        return obj

    # ---- the loop

    def autocast(self, autocast_handler: Any = None, cache_enabled: bool | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        """Runs a block in the precision's compute dtype; `autocast_handler`: options for this block."""
        handler = autocast_handler.ours() if hasattr(autocast_handler, "ours") else autocast_handler
        return super().autocast(cache_enabled, handler)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers per-sample results, each sample once; of a last batch others too, cut to its samples. Collective."""
        return metrics.gather_for_metrics(self, input_data, use_gather_object)

    def backward(self, loss: torch.Tensor, learning_rate: float | None = None, **kwargs: Any) -> None:
        """Replaces `loss.backward()`: see `accel_core.Accelerator.backward`."""
        if self.distributed_type != DistributedType.DEEPSPEED:
            kwargs.pop("scale_wrt_gas", None)  # for DeepSpeed's engine
        super().backward(loss, learning_rate, **kwargs)

    # ---- runs

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Saves all of the run, in accel-checkpoint's format whatever `safe_serialization` says. Collective."""
        del safe_serialization, save_model_func_kwargs  # about files that are not written here
        folder = super().save_state(output_dir)
        return folder if output_dir is None else os.fspath(output_dir)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        missing_ok: bool = False,
        **load_model_func_kwargs: Any,
    ) -> bool:
        """Restores what `save_state` saved, here or with Accelerate. Collective.

        Loaders begin their epoch again, unless `use_stateful_dataloader` is set: scripts skip by themselves what
        they have had. Of `load_kwargs`, those of `torch.load` are about files of Accelerate.
        """
        if (
            input_dir is None
            and self.project_configuration.automatic_checkpoint_naming
            and self.project_dir is not None
        ):
            input_dir = checkpoints.newest_folder(Path(self.project_dir) / "checkpoints")  # None: that of ours
        if input_dir is not None and checkpoints.is_peer_folder(Path(input_dir)):
            checkpoints.load_peer_state(self, Path(input_dir), load_kwargs=load_kwargs, **load_model_func_kwargs)
            return True
        given = {name: value for name, value in (load_kwargs or {}).items() if name not in _OF_TORCH_LOAD}
        found = super().load_state(input_dir, given, missing_ok=missing_ok, **load_model_func_kwargs)
        for loader in self._dataloaders if found else ():
            if not getattr(loader, "use_stateful_dataloader", True):
                loader.restart_epoch()
        return found

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; of a class that was registered, its object: see `accel_core.Accelerator.get_tracker`."""
        if any(isinstance(each, tracking.Registered) and each.name == name for each in self._registered):
            made = super().get_tracker(name, unwrap=True)
            return made.tracker if unwrap else made
        return super().get_tracker(name, unwrap) if self.log_with else GeneralTracker(_blank=True)

    def __reduce__(self) -> Any:
        return _again, (type(self), self._arguments), {"_dataloaders": self._dataloaders}


_OF_TORCH_LOAD = frozenset({"map_location", "mmap", "pickle_module", "weights_only"})


def _again(kind: type[Accelerator], given: dict[str, Any]) -> Accelerator:
    return kind(**given)

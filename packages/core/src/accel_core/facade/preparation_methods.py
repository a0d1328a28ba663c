"""From what the user built to what the loop trains: models, optimizers, schedulers and loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accel_core.collectives.run_seed import agree_seed
from accel_core.contract.loader_progress import RunningLoader
from accel_core.contract.precision_policy import remove_policy
from accel_core.facade.accelerator_parts import AcceleratorParts
from accel_core.facade.process_methods import shown
from accel_core.loading.index_source import as_data_loader
from accel_core.loop import fused_backward
from accel_core.loop import preparation as preparing
from accel_core.loop.optimizer_gate import OptimizerGate, gate_of, place_state
from accel_core.loop.preparation import ParameterReplacement, PreparedModel, PrepareRequest, require
from accel_core.loop.scheduler_gate import gate_scheduler, is_scheduler
from accel_core.options.resolution import flag

if TYPE_CHECKING:
    import os

    from accel_core.options.handlers import KwargsHandler

    Moved = Sequence[bool] | None

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def _of_loader(name: str, text: str) -> Any:
    """A read-only property: the attribute of the loader component, None where it has none."""
    return property(lambda self: getattr(self._parts.loader, name, None), doc=text)


class PreparationMethods(AcceleratorParts):
    """Methods that prepare the user's objects and give them back; the loader's settings."""

    dataloader_config: KwargsHandler | None = shown("_dataloader_config", "The loader options given as an object.")
    split_batches: bool | None = _of_loader(
        "split_batches", "Whether a loader's batch size is that of the whole world; None: the component does not say."
    )
    dispatch_batches: bool | None = _of_loader("dispatch_batches", "Whether one rank reads a loader for all ranks.")
    use_seedable_sampler: bool | None = _of_loader(
        "use_seedable_sampler", "Whether loaders shuffle by `torch.randperm`, seeded by epoch; None: it does not say."
    )
    non_blocking: bool | None = _of_loader("non_blocking", "Whether the host goes on while batches are copied.")

    @property
    def even_batches(self) -> bool | None:
        """Whether an incomplete last global batch is filled; None: it is not known.

        It may be assigned between two windows, and holds for loaders that are prepared afterwards.
        """
        return getattr(self._parts.loader, "even_batches", None)

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        value = flag("even_batches", even, "", None).value
        self._accumulation.refuse_in_window("even_batches", even)
        if self.even_batches is None:
            raise AttributeError("even_batches was assigned, but the loader component has none. accel-data's has.")
        self._parts.loader.even_batches = value  # type: ignore[attr-defined]

    @property
    def rng_types(self) -> list[str] | None:
        """The random streams that ranks share whenever a loader is iterated; None: not known."""
        shared = getattr(self._parts.loader, "rng_types", None)
        return None if shared is None else list(shared)

    @property
    def running_loader(self) -> RunningLoader | None:
        """The innermost prepared loader in iteration, and its batch; None outside of loops."""
        passage = self._feed.newest()
        if passage is None:
            return None
        loaders = self._prepared.loaders
        loader = next((each for each in loaders if getattr(each, "_accel_outlet", None) is passage.by), None)
        return RunningLoader(loader, passage.remaining, passage.rows)

    @overload
    def prepare(self, a: A, /, *, device_placement: Moved = None) -> A: ...
    @overload
    def prepare(self, a: A, b: B, /, *, device_placement: Moved = None) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /, *, device_placement: Moved = None) -> tuple[A, B, C]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, d: D, /, *, device_placement: Moved = None) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, d: D, e: E, /, *, device_placement: Moved = None) -> tuple[A, B, C, D, E]: ...
    @overload
    def prepare(self, *objects: Any, device_placement: Moved = None) -> Any: ...
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Makes objects ready for the loop; returns them in the same order, a single one alone.

        Takes models, optimizers, loaders and LR schedulers in any order; anything else is passed
        through, and what was prepared before comes back as it is. `device_placement` has one entry
        per object: whether it is moved to the device. Collective for the first loader, and under
        strategies that exchange parameters (DDP does). Raises `TypeError` for a list or dict of
        models and for a bare tensor that requires a gradient.
        """
        preparing.check_device_placement(device_placement, objects, self._parts.strategy.places_models)
        kinds = [preparing.kind_of(obj) for obj in objects]
        results = list(objects)
        optimizers = [obj for obj, kind in zip(objects, kinds, strict=True) if kind == "optimizer"]
        for index in sorted(range(len(objects)), key=lambda index: preparing.ORDER.index(kinds[index])):
            placement = None if device_placement is None else device_placement[index]
            results[index] = self._prepare_one(objects[index], kinds[index], placement, optimizers)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self, model: ModelT, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ModelT:
        """Prepares one model; with `evaluation_mode` only precision and compilation apply.

        `device_placement` None: as the Accelerator was told.
        """
        given = None if device_placement is None else [device_placement]
        preparing.check_device_placement(given, [model], self._parts.strategy.places_models)
        return cast("ModelT", self._prepare_model(model, device_placement, (), evaluation_mode))

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Prepares a loader: ranks read parts of global batches. Collective for the first loader.

        Takes a `DataLoader`, or an iterable of batches that has `state_dict` and `load_state_dict`.
        Where one process dispatches batches, `slice_fn_for_dispatch(batch, slice, process_index=…,
        num_processes=…)` cuts out the part of one process; None: every tensor along dim 0.
        """
        data_loader = as_data_loader(data_loader)
        if any(data_loader is known for known in self._prepared.loaders):
            return data_loader
        if self._prepared.seed is None:
            self._prepared.seed = agree_seed(self._world, getattr(self._parts.loader, "data_seed", None))
        shard, group, number = self._layout.shard, self._layout.data_group, len(self._prepared.loaders)
        own = (self._placement(device_placement), self._prepared.seed, number, group, slice_fn_for_dispatch)
        prepared = self._relay.prepare_loader(data_loader, shard, self._feed, *own)
        preparing.warn_of_empty(prepared)
        self._prepared.loaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader that leaves out this rank's first batches each time, for going on in an epoch.

        They are counted from the beginning of the epoch, also after `load_state`. Loop over it for
        the rest of an epoch, and over the prepared loader itself from then on. Samples that have
        indices are not read. Raises `TypeError` for a loader that is not prepared.
        """
        behind = getattr(dataloader, "behind", None)
        if not callable(behind):
            what = f"skip_first_batches() was given a {type(dataloader).__name__} that cannot leave out batches."
            raise TypeError(f"{what} Pass what prepare() returned; if it is that, skip them by hand.")
        skipped: DataLoader[Any] = behind(num_batches)
        return skipped

    def prepare_optimizer(self, optimizer: OptimizerT, device_placement: bool | None = None) -> OptimizerT:
        """Prepares one optimizer, in place: `step` and `zero_grad` wait for the end of the window.

        `device_placement`: whether its state is moved to the device of its parameters.
        """
        require("prepare_optimizer()", optimizer, Optimizer, "a torch.optim.Optimizer")
        self._relay.check_optimizer(optimizer)
        if self._detector is not None:
            fused_backward.refuse_detection(optimizer)
        if not self._has_gate(optimizer):
            if device_placement if device_placement is not None else self.device_placement:
                place_state(optimizer)
            parts = (self._accumulation, self._relay, self._prepared)
            OptimizerGate(optimizer, *parts, self._needs_backward, self._engine)
        if not any(optimizer is known for known in self._prepared.optimizers):
            self._prepared.optimizers.append(optimizer)
            self._prepared.unchecked = True
            self._prepared.fused |= fused_backward.is_fused(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: T) -> T:
        """Prepares an LR scheduler, in place: a `step()` is one per real step of its optimizer."""
        if not is_scheduler(scheduler):
            raise TypeError(f"prepare_scheduler() was given a {type(scheduler).__name__}, expected an LR scheduler.")
        gate_scheduler(scheduler, self._parts.scheduler_rule)
        if not any(scheduler is known for known in self._prepared.schedulers):
            self._prepared.schedulers.append(scheduler)
        return scheduler

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The user's model inside a prepared one; any other model as it is.

        Calls of the result still go through the precision's casts; `keep_fp32_wrapper=False` gives
        the model its original class back, for good.
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
        """Has another method of a prepared model run as its forward does. No collective.

            accelerator.mark_forward_method(agent, "act")
            loss = loss_fn(agent.act(observation))  # gradients are averaged as after agent(observation)

        Copies of the model have it too. Raises `ValueError` if the model is not prepared.
        """
        record = self._prepared.find_model(model)
        if record is None:
            kind = type(model).__name__
            raise ValueError(f"mark_forward_method() was given a {kind} that is not prepared: use prepare().")
        from accel_core.loop.forward_methods import mark_forward_method

        mark_forward_method(record.prepared, record.original, name)

    def build_model(
        self, factory: Callable[[], nn.Module], checkpoint: str | os.PathLike[str] | None = None
    ) -> nn.Module:
        """Builds a model that may be too large for one process. Collective; pass it to `prepare`.

        Under a strategy that cuts models it has no data until `prepare`. `factory` is called
        without arguments, possibly more than once; it gives the same model on every rank. Weights
        come from `checkpoint`, a file or folder as for `load_checkpoint_in_model`; None: from the
        factory, on rank 0. Raises `CheckpointError` if they do not fit.
        """
        with self._world.collective("build_model()"):
            model = self._relay.build_model(factory, None if checkpoint is None else Path(checkpoint))
        require("build_model()", model, nn.Module, "a factory that returns a torch.nn.Module")
        return model

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a submodule of `model` is spread over several places by its `hf_device_map`."""
        return preparing.has_device_map(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forgets all that was prepared, and frees its memory. Returns a None for each object.

        model, optimizer = accelerator.free_memory(model, optimizer)
        """
        count = len(objects)
        del objects  # what nobody else holds goes
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

    def _prepare_one(self, obj: Any, kind: str, placement: bool | None, optimizers: Sequence[Optimizer]) -> Any:
        if kind == "model":
            return self._prepare_model(obj, placement, optimizers, evaluation=False)
        if kind == "loader":
            return self.prepare_data_loader(obj, placement)
        if kind == "optimizer":
            return self.prepare_optimizer(obj, placement)
        return self.prepare_scheduler(obj) if kind == "scheduler" else obj

    def _prepare_model(
        self, model: nn.Module, placement: bool | None, optimizers: Sequence[Optimizer], evaluation: bool
    ) -> nn.Module:
        require("prepare_model()", model, nn.Module, "a torch.nn.Module")
        known = self._prepared.find_model(model)
        if known is not None:
            if known.evaluation and not evaluation:
                what = f"{type(model).__name__} was prepared with evaluation_mode=True,"
                raise ValueError(f"{what} so its gradients would not be synchronised. Prepare it for training first.")
            return known.prepared
        preparing.check_device_map(model, self._world, self._parts.precision.policy.param)
        request = PrepareRequest(
            policy=self._parts.precision.policy,
            device=None if preparing.stays_in_place(model) else self._placement(placement),
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
            preparing.check_state_kept(holders)
        # What is given may be a wrapper already, that of an earlier Accelerator for instance.
        inner = self.unwrap_model(model)
        named = dict(inner.named_parameters(remove_duplicate=False))
        self._prepared.models.append(PreparedModel(inner, prepared, evaluation, tuple(prepared.parameters()), named))
        if self._detector is not None and not evaluation:
            self._detector.watch(inner)
        return prepared

    def _placement(self, given: bool | None) -> torch.device | None:
        return self.device if (self.device_placement if given is None else given) else None

    def _has_gate(self, optimizer: Optimizer) -> bool:
        """Whether this Accelerator gates it. Takes off the gate of one that has gone."""
        gate = gate_of(optimizer)
        if gate is None or gate.owner() is self._prepared:
            return gate is not None
        if gate.owner() is not None:
            what = f"This {type(optimizer).__name__} is prepared by another Accelerator."
            raise ValueError(f"{what} Use that one, or call its free_memory() first.")
        gate.remove(optimizer)
        return False

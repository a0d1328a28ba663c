"""All use of DeepSpeed beyond its documented interface; a test fails when such a name has gone.

The optimizer of an engine (`engine.optimizer`) is one of two classes. Both keep, for each group of
parameters, a flat partition of masters and of gradients; they differ in names and in what a group
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

if TYPE_CHECKING:
    from torch import nn

    from accel_deepspeed.state_files import StateFiles


class Fragment(NamedTuple):
    """The elements of a parameter that a rank steps.

    Args:
        group: the flat partition in which they lie.
        offset: where they begin there.
        start: where they begin in the parameter, in row-major order.
        numel: how many they are, possibly none.
    """

    group: int
    offset: int
    start: int
    numel: int


class Partitions:
    """The flat partitions of a ZeRO optimizer of stage 1 or 2.

    Gradients are sent in one order on all ranks, as in DDP: that of the parameters, backwards. An
    early one waits; one that a rank did not use is sent as zeros. DeepSpeed would send what
    is ready, and add up gradients of different parameters where ranks use different ones.

    Args:
        optimizer: that of an engine.
        parameters: of its model.

    Attributes:
        on_ready: is called when a gradient is complete, before anything is done with it.
        used: stands for the parameters that backwards have met since the last step, in their order;
            0 where ranks may use different ones.
        factor: by what the next step multiplies gradients, when it has them in the precision of
            the masters: in a lower one, each would be rounded once more.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
        self.zero = optimizer
        self.used = 0
        self.factor: torch.Tensor | None = None
        self.on_ready: Callable[[], None] = _nothing
        self._unscale, self.zero.unscale_and_clip_grads = self.zero.unscale_and_clip_grads, self._scale
        self._ready: set[int] = set()
        self._sent = 0
        self._order: list[tuple[nn.Parameter, int]] = []
        self._process: Callable[..., None]
        self._prepare(list(parameters))

    def _prepare(self, parameters: list[nn.Parameter]) -> None:
        groups = {id(each): number for number, group in enumerate(self.zero.bit16_groups) for each in group}
        self._order = [(each, groups[id(each)]) for each in reversed(parameters) if id(each) in groups]
        self._process = self.zero.process_gradients
        self.zero.process_gradients = self._on_ready

    def _on_ready(self, parameter: nn.Parameter, group: int) -> None:  # noqa: ARG002
        """In the place of DeepSpeed's own, which its hooks call when a gradient is complete."""
        self.on_ready()
        if not self.zero._coalesce_grad_reduction:
            if id(parameter) in self._ready and self.zero.params_already_reduced[self.zero.get_param_id(parameter)]:
                _refuse_second(parameter)
            self._ready.add(id(parameter))
            while self._sent < len(self._order) and id(self._order[self._sent][0]) in self._ready:
                self._send_next()

    def _send_next(self) -> None:
        parameter, group = self._order[self._sent]
        self._sent += 1
        self._process(parameter, group)

    def _scale(self, found: Any, norm: Any) -> None:
        """In the place of DeepSpeed's own, which its step calls for each group."""
        self._unscale(found, norm)
        if self.factor is not None:
            for flat in self._flat(found):
                flat.mul_(self.factor.to(flat.device))

    def _flat(self, gradients: Any) -> Iterable[torch.Tensor]:
        found: Iterable[torch.Tensor] = gradients
        return found

    @property
    def offloads(self) -> bool:
        """Whether a partition's gradients and masters are in the memory of the host."""
        return bool(self.zero.cpu_offload)

    @property
    def inner(self) -> Any:
        """The optimizer that steps the partitions. ZeRO makes a new one of Adagrad."""
        return self.zero.optimizer

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """One flat tensor for each group."""
        found: Sequence[torch.Tensor] = self.zero.single_partition_of_fp32_groups
        return found

    def fragments(self) -> Iterator[tuple[nn.Parameter, Fragment]]:
        """Each stepped parameter, in one order on all ranks, with its part on this rank."""
        for group, parameters in enumerate(self.zero.bit16_groups):
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is None:
                    yield parameter, Fragment(group, 0, 0, 0)
                else:
                    inner, outer = mapping.hp_fragment_address, mapping.lp_fragment_address
                    yield parameter, Fragment(group, inner.start, outer.start, outer.numel)

    def gradients(self) -> Sequence[torch.Tensor]:
        """This rank's averaged gradients, live, laid out as masters, once synchronised."""
        if self.offloads:
            self.zero._wait_for_offload_copies()  # into pinned memory; DeepSpeed itself waits in its step
            return [flat.grad for flat in self.masters]  # type: ignore[misc]
        return [self._flattened(group) for group in range(len(self.masters))]

    def _flattened(self, group: int) -> torch.Tensor:
        parts = self.zero.averaged_gradients[group]
        if getattr(parts, "flat_partition", None) is None:
            from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

            # Views of as many tensors as there are parameters. The optimizer would lay them end to end in its step.
            flat = torch.cat([part.reshape(-1) for part in parts])
            views = [
                view.view(part.shape) for part, view in zip(parts, flat.split([p.numel() for p in parts]), strict=True)
            ]
            for part, view in zip(parts, views, strict=True):
                if hasattr(part, "_zero_padding"):
                    view._zero_padding = True
            parts = self.zero.averaged_gradients[group] = GradPartitionBufferGroup(views, flat)
        found: torch.Tensor = parts.flat_partition
        return found

    def begin(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Begins a synchronising backward; returns the gradients to add to its own afterwards.

        It overwrites what earlier ones have averaged.

        Args:
            gradients: what `gradients()` gave, if there are some already.
        """
        earlier = [each.clone() for each in gradients] if self.offloads else gradients
        self._forget_interrupted()
        self.drop()
        return earlier

    def _forget_interrupted(self) -> None:
        """Drops what a backward that raised has left in buckets."""
        self._ready.clear()
        self._sent = 0
        for bucket in self.zero.ipg_buckets.values():
            bucket.clear()
        self.zero.params_already_reduced[:] = [False] * len(self.zero.params_already_reduced)

    def drop(self) -> None:
        """Forgets what was averaged."""
        self.zero.micro_step_id = -1
        if self.offloads:
            for flat in self.masters:
                flat.grad.zero_()  # type: ignore[union-attr]
            return
        for group in range(len(self.masters)):
            self.zero.averaged_gradients[group] = None
            self.zero.all_grad_tensors[group] = None

    def send_rest(self) -> None:
        """Sends the rest of the gradients: earlier held-back ones, zeros for unused parameters."""
        while self._sent < len(self._order):
            parameter, _ = self._order[self._sent]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._send_next()

    def publish(self) -> None:
        """Gives the parameters of the model the values of the masters. A collective."""
        self.zero.update_lp_params()

    @contextmanager
    def clipping_in_files(self, norm: float) -> Iterator[None]:
        """Inside, checkpoints are written with this norm of clipping, and read whichever they have.

        DeepSpeed goes on with the norm that it reads. Here the Accelerator clips, and DeepSpeed does not.
        """
        here = {
            name: getattr(self.zero, name) for name in ("clip_grad", "compute_grad_norm") if hasattr(self.zero, name)
        }
        vars(self.zero).update(clip_grad=norm, compute_grad_norm=True)
        try:
            yield
        finally:
            vars(self.zero).update(here)


class ShardedPartitions(Partitions):
    """The flat partitions of a ZeRO optimizer of stage 3, which shares out the parameters too.

    Its forwards gather parameters, so all ranks have to use the same ones in the same order.

    Attributes:
        overflowed: whether the next step is left out, for gradients are not finite. DeepSpeed would
            reduce a norm for each group only to learn it.
    """

    def _prepare(self, parameters: list[nn.Parameter]) -> None:
        self.overflowed = False
        self._gradients: Sequence[torch.Tensor] = ()
        self.zero._get_norm_groups = lambda: [math.inf if self.overflowed else 0.0]
        self._numbers = {id(each): number for number, each in enumerate(parameters)}
        self._process = self.zero.reduce_ready_partitions_and_remove_grads
        self.zero.reduce_ready_partitions_and_remove_grads = self._on_ready

    def _on_ready(self, parameter: nn.Parameter) -> None:  # type: ignore[override]
        self.on_ready()
        number = self._numbers[id(parameter)]
        self.used = hash((self.used, number))
        if not self.zero._coalesce_grad_reduction:
            if number in self._ready:
                _refuse_second(parameter)
            self._ready.add(number)
        self._process(parameter)

    @property
    def offloads(self) -> bool:
        """See `Partitions`."""
        return bool(self.zero.offload_optimizer)

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """See `Partitions`."""
        found: Sequence[torch.Tensor] = self.zero.fp32_partitioned_groups_flat
        return found

    def fragments(self) -> Iterator[tuple[nn.Parameter, Fragment]]:
        """See `Partitions`."""
        for parameters in self.zero.fp16_groups:
            for parameter in parameters:
                group, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
                start, numel = shard_of(parameter)
                yield parameter, Fragment(group, offset, start, numel)

    def _flat(self, gradients: int) -> Iterable[torch.Tensor]:
        return [self.masters[gradients].grad]  # type: ignore[list-item]

    def join_memory(self) -> None:
        """Has masters lie in the memory of parameters, where they are the same.

        DeepSpeed means to, but compares a device with the name of one, and they are never equal.
        """
        for master, flat in zip(self.masters, self.zero.fp16_partitioned_groups_flat, strict=True):
            if flat is not None and (flat.dtype, flat.device) == (master.dtype, master.device):
                master.data = flat.data

    def keep_in(self, files: StateFiles) -> None:
        """Moves masters into files, and optimizer state when a group has first been stepped."""
        for master in self.masters:
            master.data = files.copy_of(master)
        step = self.zero._optimizer_step

        def step_and_keep(group: int) -> None:
            step(group)
            master = self.masters[group]
            state = self.inner.state[master]
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == master.shape:
                    state[name] = files.copy_of(value)

        self.zero._optimizer_step = step_and_keep

    def gradients(self) -> Sequence[torch.Tensor]:
        """See `Partitions`."""
        if self.offloads:
            return [flat.grad for flat in self.masters]  # type: ignore[misc]
        if not self._gradients:
            self._gradients = self.zero.grad_partitions_flat_buffer.split([flat.numel() for flat in self.masters])
        return self._gradients

    def begin(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `Partitions`. Without offloading, the optimizer itself adds to earlier gradients."""
        self._ready.clear()
        for bucket in self.zero.ipg_buckets.values():  # which a backward that raised has left
            bucket.params.clear()
            bucket.elements = 0
        if self.offloads:
            earlier = [each.clone() for each in gradients]
            self.drop()
            return earlier
        if gradients:
            self.zero.micro_step_id = 1
        else:
            self.drop()
        return ()

    def drop(self) -> None:
        """See `Partitions`."""
        self.zero.micro_step_id = 0
        for gradient in self.gradients():
            gradient.zero_()

    def send_rest(self) -> None:
        """Sends gradients that earlier backwards have held back and this one has not met."""
        zero = self.zero
        waiting = {id(parameter) for bucket in zero.ipg_buckets.values() for parameter in bucket.params}
        for parameters in zero.fp16_groups:
            for parameter in parameters:
                if parameter.grad is not None and id(parameter) not in waiting:
                    self._process(parameter)

    def publish(self) -> None:
        """See `Partitions`."""
        zero = self.zero
        zero._partition_all_parameters()
        for group in range(len(self.masters)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()


def _nothing() -> None:
    """Nobody listens."""


def _refuse_second(parameter: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        f"A parameter of shape {shape_of(parameter)} got a gradient twice in one backward, the second one after the first was sent: its "
        f"module runs several times, checkpointed with use_reentrant=True. Write use_reentrant=False."
    )


def is_shared_out(parameter: torch.Tensor) -> bool:
    """Whether each rank has a part of a parameter (stage 3)."""
    return hasattr(parameter, "ds_id")


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter."""
    return tuple(parameter.ds_shape if is_shared_out(parameter) else parameter.shape)  # type: ignore[attr-defined]


def shard_of(parameter: Any) -> tuple[int, int]:
    """The start and size of this rank's part of a sharded parameter, without the padding."""
    width = parameter.partition_numel()
    start = min(width * torch.distributed.get_rank(parameter.ds_process_group), parameter.ds_numel)
    return start, min(width, parameter.ds_numel - start)


def shard_memory(parameter: Any) -> torch.Tensor:
    """The memory of this rank's part of a parameter that is shared out, flat, with the padding."""
    found: torch.Tensor = parameter.ds_tensor
    return found


def set_leaf_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Has modules of these classes gathered as a whole (stage 3). ValueError for unknown ones."""
    import deepspeed

    known = {type(module).__name__: type(module) for module in model.modules()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"moe_leaf_modules has {unknown[0]!r}, but {type(model).__name__} has no module of that class: its classes are "
            f"{', '.join(sorted(known))}."
        )
    deepspeed.utils.set_z3_leaf_modules(model, [known[name] for name in names])


def cast_shard(parameter: Any, dtype: torch.dtype) -> None:
    """Gives a parameter that is shared out, and that no rank has gathered, another dtype."""
    parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)
    parameter.data = parameter.data.to(dtype)


def partitions_of(engine: Any) -> Partitions:
    """The partitions of an engine of stage 1, 2 or 3."""
    kind = ShardedPartitions if engine.zero_optimization_partition_weights() else Partitions
    return kind(engine.optimizer, engine.module.parameters())


def begin_backward(engine: Any, synchronises: bool) -> None:
    """Begins a backward: the engine's hooks leave the beginning and the end to this package."""
    engine._running_engine_backward = True
    engine._is_gradient_accumulation_boundary = True
    engine.inside_no_sync_ctxt = not synchronises
    if engine.optimizer is not None:
        engine.optimizer._coalesce_grad_reduction = not synchronises


def end_backward(engine: Any) -> None:
    """The backward is over."""
    engine._running_engine_backward = engine.inside_no_sync_ctxt = False
    if engine.optimizer is not None:
        engine.optimizer._coalesce_grad_reduction = False
        engine.optimizer._backward_active_depth = 0


def end_engine(engine: Any) -> None:
    """Ends an engine, and drops two references to the model that `destroy` leaves, in stage 3.

    One is in a list of a module, the other one in the cache of a method, whose keys are the objects
    that the method was called with. Other engines fill the cache again.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    engine.destroy()
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not engine.module]
    released_parameters().cache_clear()
    if not FWD_MODULE_STACK:
        _restore_linear()


def _restore_linear() -> None:
    """Restores torch's `linear`: stage 3's replacement keeps no weights for the backward."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = Patches.linear_bk


def released_parameters() -> Any:
    """DeepSpeed's cached method for the parameters to release, taken out of its wrapper."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    wrapper = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    return next(cell.cell_contents for cell in wrapper.__closure__ if hasattr(cell.cell_contents, "cache_clear"))

"""The engine of one trained model: Megatron's gradient buffers, and its distributed optimizer."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_checkpoint import Extent, flat_range, pieces_of
from accel_core.api.component import flatten
from accel_core.api.layouts import Elementwise, GradientState, Partial
from accel_megatron import optimizer_double
from accel_megatron.validation import check_parts

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_megatron.layouts import Part
    from accel_megatron.options import Options

_live: list[ModelEngine] = []


def live_engines() -> list[ModelEngine]:
    """All engines of this process, in the order of their making."""
    return _live.copy()


class ModelEngine:
    """Stages of a model whose gradients lie in Megatron's buffers, in single precision.

    Gradients of backwards add up in the buffers; `finalize` has Megatron make them the mean over
    the data-parallel ranks, and the sum over those that share embeddings or norms. What was final
    before another backward is set aside, for Megatron would sum it up again.

    Args:
        chunks: the stages on this rank, placed.
        parts: their parameters.
        config: Megatron's configuration of the model.
        options: of the strategy.

    Attributes:
        is_final: whether the buffers have gradients that are final.
        holds_back: whether they have gradients that no backward has sent.
        synchronises: whether the next backward does.
        inputs_checked: whether the inputs of a first call were compared, or need not be.
    """

    def __init__(self, chunks: Sequence[nn.Module], parts: Sequence[Part], config: Any, options: Options) -> None:
        self.config = config
        self.options = options
        self.parts = {id(part.parameter): part for part in parts if part.parameter.requires_grad}
        self.chunks = _wrapped(chunks, config, options)
        self.optimizer: weakref.ref[Optimizer] | None = None
        self.is_final = self.holds_back = self._took_part = False
        self.synchronises = True
        self.inputs_checked = config.context_parallel_size == 1
        self._earlier: list[torch.Tensor] | None = None
        self._distributed: Any = None
        self._sources: Sequence[dict[str, Any]] = ()
        self._held = 0
        self.shards: dict[int, torch.Tensor] = {}
        self._broadcast()
        _live.append(self)

    @property
    def has_gradients(self) -> bool:
        """Whether there are any, final or not."""
        return self.is_final or self.holds_back or self._earlier is not None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], synchronises: bool) -> Any:
        """Calls the model. Whether the backward behind it synchronises is decided here."""
        if not self.inputs_checked:
            self.check_inputs(args, kwargs)
        output = self.chunks[0](*args, **kwargs)
        if torch.is_grad_enabled():
            self.synchronises = synchronises
            for leaf in flatten(output)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._reached)
        return output

    def check_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises `ValueError` unless processes that share sequences have their own parts. A collective of these."""
        check_parts(args, kwargs, next(self.chunks[0].parameters()).device)
        self.inputs_checked = True

    def _reached(self, _: torch.Tensor) -> None:
        self._took_part = True

    def expect_backward(self) -> None:
        """A backward is about to run, perhaps through this model."""
        self._took_part = False
        self.set_aside()

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Inside, Megatron sends no gradients while a backward runs."""
        return contextlib.nullcontext() if self.synchronises else self.no_sync()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, no chunk sends gradients in a backward."""
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def end_backward(self) -> None:
        """Makes gradients final, unless held back. A collective if the model took part."""
        if not self._took_part:
            if not self.holds_back:
                self.bring_back()
        elif self.synchronises:
            self.finalize()
            self.bring_back()
        else:
            self.holds_back = True

    @property
    def took_part(self) -> bool:
        """Whether the last backward went through this model."""
        return self._took_part

    def finalize(self, *_: Any, **options: Any) -> None:
        """Has Megatron reduce the gradients. A collective."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self.chunks, None, **options)
        self.is_final, self.holds_back = True, False

    def set_aside(self) -> None:
        """Takes final gradients out of the buffers, which are zero then."""
        if self.is_final:
            self._earlier = [each.grad_data.clone() for each in self.buffers()]
            self._zero()
            self.is_final = False

    def bring_back(self) -> None:
        """Adds what was set aside."""
        if self._earlier is not None:
            for buffer, earlier in zip(self.buffers(), self._earlier, strict=True):
                buffer.grad_data.add_(earlier)
            self._earlier, self.is_final = None, True

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiplies what is in the buffers."""
        for buffer in self.buffers():
            buffer.grad_data.mul_(factor)

    def clear(self) -> None:
        """Forgets all gradients."""
        if self.has_gradients:
            self._zero()
            self.is_final = self.holds_back = False
            self._earlier = None

    def drop_window(self) -> None:
        """Forgets what a window that failed has left, but not what was there before."""
        self._zero()
        self.holds_back = self.is_final = False
        self.bring_back()

    def buffers(self) -> Iterator[Any]:
        """Megatron's buffers of gradients."""
        for chunk in self.chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def flat_interval(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Which elements of the local parameter this rank steps: all, or its shard."""
        if self._distributed is None:
            return 0, parameter.numel()
        for distributed in self._distributed:
            if parameter in distributed.model_param_gbuf_map:
                found = distributed._get_model_param_range_map(parameter)["param"]
                return found.start, found.end
        return 0, 0

    def extent(self, parameter: torch.Tensor) -> Extent:
        """The boxes that this rank steps."""
        part = self.parts[id(parameter)]
        if self._distributed is None:
            return part.extent
        start, stop = self.flat_interval(parameter)
        boxes, before = [], 0
        for box in part.extent.boxes:
            first, last = max(start - before, 0), min(stop - before, box.numel)
            if first < last:
                boxes += flat_range(box.sizes, first, last, box.offsets)
            before += box.numel
        return Extent(part.extent.shape, tuple(boxes))

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """The memory that the optimizer steps: the parameter, or its shard in single precision."""
        if self._distributed is None:
            return parameter.detach()
        shard = self.shards.get(id(parameter))
        return parameter.new_empty(0, dtype=torch.float32) if shard is None else shard.detach()

    def gradient(self, parameter: Any) -> torch.Tensor:
        """What this rank has of a final gradient, live, flat."""
        start, stop = self.flat_interval(parameter)
        found: torch.Tensor = parameter.main_grad.view(-1)[start:stop]
        return found

    def gradient_state(self) -> GradientState:
        """See the hook of that name."""
        found: dict[str, list[Elementwise | Partial]] = {}
        if not self.has_gradients:
            return found
        for part in self.parts.values():
            terms: list[Elementwise | Partial] = []
            parameter: Any = part.parameter
            if self.is_final:
                extent, local = self.extent(parameter), self.gradient(parameter)
                terms.append(Elementwise(extent.shape, local.dtype, tuple(pieces_of(extent.boxes, local))))
            elif self.holds_back:
                terms.append(Partial(parameter.main_grad))
            found[part.name] = terms
        return found

    def adopt(self, optimizer: Optimizer) -> None:
        """Takes over an optimizer that holds the trained parameters."""
        self.optimizer = weakref.ref(optimizer)
        self._held = _count(optimizer)
        if self.options.distributed_optimizer and self._distributed is None:
            self._distribute(optimizer)

    def _distribute(self, optimizer: Optimizer) -> None:
        self._distributed = []
        for chunk_buffers in ("buffers", "expert_parallel_buffers"):
            per_model = {number: getattr(chunk, chunk_buffers) for number, chunk in enumerate(self.chunks)}
            parameters = [each for buffers in per_model.values() for buffer in buffers for each in buffer.params]
            if parameters:
                made = optimizer_double.distributed(
                    optimizer, parameters, self.chunks, per_model, chunk_buffers != "buffers"
                )
                self._distributed.append(made)
        for distributed in self._distributed:
            pairs = zip(
                [*distributed.model_fp32_groups, *distributed.model_float16_groups],
                [*distributed.shard_fp32_groups, *distributed.shard_fp32_from_float16_groups],
                strict=True,
            )
            for parameters, shards in pairs:
                self.shards.update({id(each): shard for each, shard in zip(parameters, shards, strict=True)})
        if any(optimizer.state.get(part.parameter) for part in self.parts.values()):
            raise ValueError(
                f"{type(optimizer).__name__} has stepped before its model was prepared with distributed_optimizer=True, which shares out "
                f"what it has learnt. Prepare it before its first step, or use accelerator.load_state()."
            )

    def steps_with(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds the parameters."""
        return self.optimizer is not None and self.optimizer() is optimizer

    @contextlib.contextmanager
    def shown_gradients(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, `.grad` of parameters is their final gradient, for an optimizer that steps them."""
        self._check_unchanged(optimizer)
        parameters: list[Any] = [part.parameter for part in self.parts.values()] if self.is_final else []
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.grad = None

    def step_distributed(self, optimizer: Optimizer) -> None:
        """Has the distributed optimizer step by final gradients, if any. A collective."""
        self._check_unchanged(optimizer)
        if not self.is_final:
            return
        for distributed in self._distributed:
            optimizer_double.copy_options(optimizer, distributed.optimizer)
            distributed.prepare_grads()
            distributed.step_with_ready_grads()
        # A forward since the backward, for a metric, has gathered the weights from before the step.
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.param_gather_dispatched = False
        self.link_state(optimizer)

    def scale_some(self, wanted: Mapping[int, Any], factor: torch.Tensor) -> None:
        """Multiplies the gradients of parameters by `id`."""
        if self.has_gradients and self.parts.keys() <= wanted.keys():
            self.scale(factor)
        elif self.has_gradients:
            for key, part in self.parts.items():
                if key in wanted:
                    part.parameter.main_grad.mul_(factor)  # type: ignore[attr-defined]

    def link_state(self, optimizer: Optimizer) -> None:
        """Shows what the distributed optimizer keeps of a parameter in the user's optimizer."""
        for part in self.parts.values():
            shard = self.shards.get(id(part.parameter))
            if shard is not None:
                for distributed in self._distributed:
                    state = distributed.optimizer.state.get(shard)
                    if state:
                        optimizer.state[part.parameter] = state

    def take_state(self, optimizer: Optimizer) -> None:
        """Gives the distributed optimizer what the user's has been loaded with."""
        for distributed in self._distributed or ():
            distributed.optimizer.state.clear()
            for group in distributed.optimizer.param_groups:
                held = {id(each) for each in group["params"]}
                for key, shard in self.shards.items():
                    state = optimizer.state.get(self.parts[key].parameter)
                    if id(shard) in held and state:
                        distributed.optimizer.state[shard] = state

    @torch.no_grad()
    def publish(self) -> None:
        """Gives the model the values of the masters. A collective."""
        for distributed in self._distributed or ():
            distributed._copy_main_params_to_model_params()
        if self._distributed is not None:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _check_unchanged(self, optimizer: Optimizer) -> None:
        frozen = sum(not part.parameter.requires_grad for part in self.parts.values())
        added = _count(optimizer) - self._held
        if frozen or added:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called, but after prepare() {added} parameters were added to it, and {frozen} of the "
                f"model were frozen. Megatron lays the trained parameters out when a model is prepared. Choose them before; or call "
                f"accelerator.free_memory(), and prepare again."
            )

    def _broadcast(self) -> None:
        """Has all ranks begin with the weights of the first that has the same part. A collective."""
        with torch.no_grad():
            for chunk in self.chunks:
                chunk.broadcast_params()

    def close(self) -> None:
        """Ends the engine. The model stays what it is."""
        if self in _live:
            _live.remove(self)
            for chunk in self.chunks:
                for handle in chunk.remove_forward_pre_hook_handles.values():
                    handle.remove()
                chunk.grad_accs.clear()
                chunk.param_to_bucket_group.clear()
            for part in self.parts.values():
                vars(part.parameter).pop("main_grad", None)
            self.chunks = []
            self.shards.clear()
            self._distributed = None


def _wrapped(chunks: Sequence[nn.Module], config: Any, options: Options) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.distributed_optimizer,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def engine_that_steps(parameter: torch.Tensor) -> ModelEngine | None:
    """The engine that steps a parameter; None if there is none."""
    return next((engine for engine in _live if id(parameter) in engine.parts), None)

"""What a forward and a backward keep alive, found by running them without memory.

The model runs on fake tensors: they have a device and shapes, and no data. The device is called
"cpu", so that attention is the fused one, as on accelerators. Every storage is counted from its
first operation until it is freed, so temporary results of the backward are in, and what one kernel
takes inside of itself (workspaces of convolutions, of matrix products) is not. Autocast casts what it
casts on CPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from accel_big_model.estimate.tracking import LiveBytes
from accel_core.api.component import flatten, map_tensors

if TYPE_CHECKING:
    from accel_big_model.estimate.precisions import Precision
    from accel_big_model.estimate.shapes import ModelShape


class ActivationsUnknownError(RuntimeError):
    """The model cannot run without memory, or with the inputs it was given."""


@dataclass(frozen=True)
class Segment:
    """The part of a backward until a gradient is complete.

    Args:
        parameter: the name of the one whose gradient it is.
        peak: bytes alive at most, but for weights and complete gradients.
        left: those alive at its end.
    """

    parameter: str
    peak: int
    left: int


@dataclass(frozen=True)
class Timeline:
    """A forward and a backward.

    Args:
        forward: bytes alive at most during the forward, but for the weights.
        backward: its parts, in order. The first one begins with the loss.
        known: False: nothing was run, all bytes are 0.
    """

    forward: int
    backward: tuple[Segment, ...]
    known: bool = True

    @property
    def peak(self) -> int:
        """Bytes of activations at most."""
        return max([self.forward, *(each.peak for each in self.backward)])

    @classmethod
    def unknown(cls, shape: ModelShape) -> Timeline:
        """Gradients complete one after the other, last parameter first."""
        return cls(0, tuple(Segment(each.name, 0, 0) for each in reversed(shape.trained)), known=False)


def default_loss(output: Any) -> torch.Tensor:
    """The `loss` of an output of transformers; else the sum of the first floating tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    floating = [each for each in flatten(output)[0] if isinstance(each, torch.Tensor) and each.requires_grad]
    if not floating:
        raise ActivationsUnknownError(f"the model returns no tensor with a gradient, but {type(output).__name__}")
    return floating[0].float().sum()


def trace(
    model: nn.Module,
    batch: Any,
    shape: ModelShape,
    precision: Precision,
    loss: Callable[[Any], torch.Tensor] = default_loss,
    gathered: bool = False,
    recomputed: Sequence[str] = (),
) -> Timeline:
    """Runs a forward and a backward without memory, of a copy that shares the model's tensors.

    Args:
        model: of any device. It runs as in training.
        batch: as the model takes it: a tensor, a tuple of positional or a dictionary of named
            arguments. Only shapes and dtypes count.
        shape: of the model.
        precision: parameters are in its dtype, matrix products by autocast.
        loss: of what the model returns.
        gathered: as strategy "fsdp" does it: weights of matrix products are in the compute dtype.
        recomputed: names of modules that compute their forward again in the backward.

    Raises:
        ActivationsUnknownError: with the model's own error.
    """
    assert precision.param is not None, "others are not trained"
    dtypes = {each.name: precision.param for each in shape.parameters}
    if gathered and precision.compute is not None:
        dtypes |= {each.name: precision.compute for each in shape.parameters if each.autocast}
    try:
        return _run(_copied(model, recomputed), batch, dtypes, precision.compute, loss)
    except ActivationsUnknownError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n", 1)[0]
        raise ActivationsUnknownError(
            f"its forward does not run without memory: {type(error).__name__}: {first}"
        ) from error


def _copied(model: nn.Module, recomputed: Sequence[str]) -> nn.Module:
    """A copy for what a forward keeps in attributes: caches of fake tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(each): each for each in tensors}).train()
    for name in recomputed:
        unit = copied.get_submodule(name)
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False)
    return copied


def _run(
    model: nn.Module,
    batch: Any,
    dtypes: Mapping[str, torch.dtype],
    compute: torch.dtype | None,
    loss: Callable[[Any], torch.Tensor],
) -> Timeline:
    segments = list[Segment]()
    autocast = nullcontext() if compute is None else torch.autocast("cpu", compute)
    with FakeTensorMode(allow_non_fake_inputs=True):
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors = {name: _fake(each, dtypes.get(name)) for name, each in named.items()}
        args, kwargs = _arguments(map_tensors(lambda each: _fake(each, _floating(each, dtypes)), batch))
        live = LiveBytes(left_out=tensors.values())
        for name, each in tensors.items():
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(partial(_end_segment, name, live, segments))
        with live, torch.enable_grad():
            step = _Step(model, autocast, compute, loss, live)
            torch.func.functional_call(step, {f"model.{name}": each for name, each in tensors.items()}, args, kwargs)
    return Timeline(step.peak, tuple(segments))


class _Step(nn.Module):
    """A forward and a backward in one call: what is computed again in it needs the same parameters."""

    def __init__(
        self, model: nn.Module, autocast: Any, compute: torch.dtype | None, loss: Any, live: LiveBytes
    ) -> None:
        super().__init__()
        self.model, self.autocast, self.compute, self.loss, self.live = model, autocast, compute, loss, live
        self.peak = 0

    def forward(self, *args: Any, **kwargs: Any) -> None:
        with self.autocast:
            output = self.model(*args, **kwargs)
        if self.compute is not None:
            output = map_tensors(lambda each: each.float() if each.dtype is self.compute else each, output)
        self.peak = self.live.peak
        value = self.loss(output)
        del output
        value.backward()


def _end_segment(name: str, live: LiveBytes, segments: list[Segment], parameter: torch.Tensor) -> None:
    """Counts a gradient, which is complete, as an activation no longer."""
    assert parameter.grad is not None, "it has just been accumulated"
    peak = live.peak
    live.take_out(parameter.grad)
    segments.append(Segment(name, peak, live.live))
    live.begin_again()


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _floating(tensor: torch.Tensor, dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Inputs are in the dtype of the parameters, if they are floating."""
    return next(iter(dtypes.values()), None) if tensor.is_floating_point() else None


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}

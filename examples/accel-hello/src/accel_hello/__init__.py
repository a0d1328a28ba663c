"""A strategy in a distribution of its own: data parallelism in a hundred lines of torch.distributed. Beside it, a precision."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_core import Layout, PrepareRequest, Strategy, World, hookimpl, place_model
from accel_hello.rounding import HelloRounding

__all__ = ["Hello", "HelloRounding"]


class Hello(Strategy):
    """Data parallelism: every rank holds the whole model and reads its own part of the data.

    Args:
        divide_first: whether gradients are divided by the number of ranks before they are added, and not after. That keeps
            the sum in the range of a narrow dtype, and costs precision at its lower end.
    """

    replicates_parameters = True  # so checkpoints need nothing more from it

    def __init__(self, divide_first: bool = False) -> None:
        self._divide_first = divide_first
        self._world: World | None = None
        self._replicas: list[weakref.ref[_Replica]] = []  # weak: a model dies with its user's last reference

    @hookimpl
    def layout(self, world: World) -> Layout:
        """Every rank reads its own part."""
        self._world = world
        return Layout.data_parallel(world)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Places, casts and compiles the model in place; wraps it if there are gradients to average."""
        assert self._world is not None, "layout() runs in the constructor of the Accelerator"
        place_model(model, request)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if request.evaluation or not trains or self._world.size == 1:
            return model
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0, group=self._world.group)
        replica = _Replica(model, request.policy.reduce)
        self._replicas.append(weakref.ref(replica))
        return replica

    @hookimpl
    def no_sync(self, model: nn.Module) -> _Held:
        """Forwards inside are those of backwards that stay local."""
        return _Held(model)

    @hookimpl
    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """The next backward synchronises, wherever its forward ran."""
        if isinstance(model, _Replica):
            model.synchronises = True
        yield

    @hookimpl
    def backward(self, loss: torch.Tensor, weight: float, options: dict[str, Any]) -> None:
        """Averages the gradients of every replica whose last forward ran outside `no_sync`.

        Among several models some may have taken no part in this loss. Averaging them once more changes nothing, because
        the mean of equal means is that mean; leaving out one that took part would let the ranks drift apart.
        """
        (loss * weight).backward(**options)
        for reference in self._replicas:  # a list, because all ranks have to come in the same order
            replica = reference()
            if replica is not None and replica.synchronises:
                self._average(replica)

    def _average(self, replica: _Replica) -> None:
        parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # it may have one on another rank
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            self._reduce([gradient for gradient in gradients if gradient.dtype is dtype], replica.dtype or dtype)

    def _reduce(self, gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        assert self._world is not None, "a replica exists"
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(dtype)
        if self._divide_first:
            flat /= self._world.size
        dist.all_reduce(flat, group=self._world.group)
        if not self._divide_first:
            flat /= self._world.size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class _Replica(nn.Module):
    """The model of the user, and whether its next backward synchronises: that is decided where the forward runs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype  # in which gradients travel; None: their own
        self.held = False  # inside `no_sync`
        self.synchronises = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.synchronises = not self.held
        return self.module(*args, **kwargs)


class _Held:
    """`no_sync` for one model: a class and no generator, because it runs in every micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        self._replica = model if isinstance(model, _Replica) else None
        self._before = False

    def __enter__(self) -> None:
        if self._replica is not None:
            self._before, self._replica.held = self._replica.held, True

    def __exit__(self, *exception: object) -> None:
        if self._replica is not None:
            self._replica.held = self._before

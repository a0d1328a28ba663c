"""What stands in a module for a weight that is kept elsewhere, between two calls of the module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from accel_big_model.module_tensors import STANDS_FOR
from accel_big_model.weights import PrefixedDataset

_METADATA = {
    *("__get__", "__set__", "__repr__", "__format__", "__len__", "__hash__", "__deepcopy__", "__reduce_ex__", "dim"),
    *("ndimension", "numel", "nelement", "size", "stride", "storage_offset", "element_size", "is_floating_point"),
    *("is_complex", "is_contiguous", "is_signed", "data_ptr", "get_device", "detach", "requires_grad_"),
    "untyped_storage",
}

_MOVES = {"to", "cpu", "cuda", "half", "float", "double", "bfloat16"}
"""What a module calls for each weight in the methods of these names."""

NO_COMPILING = (
    "A model whose weights are offloaded was to be compiled: they come and go by each call. Compile the modules that stay in their place, "
    "or leave torch.compile() out, or give max_memory= larger limits."
)


def _refuse(
    cls: type[torch.Tensor],
    func: Any,
    types: Any,  # noqa: ARG001  (torch passes it)
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Answers questions about shape and dtype; raises `RuntimeError` for all else."""
    if func.__name__ in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    if torch.compiler.is_compiling() or func.__name__ == "_is_view":  # by which a compiler begins to look at it
        raise RuntimeError(NO_COMPILING)
    away = next(each for each in _flat(args, kwargs) if isinstance(each, cls))
    advice = "Name the class that uses it in preload_module_classes=, or read it inside align_module_device()."
    if func.__name__ in _MOVES:
        advice = "The model stays where it is: build it anew, in another dtype or by another device_map."
    raise RuntimeError(
        f"{func.__name__}() was given the weight {vars(away)[STANDS_FOR][1]!r}, which is offloaded, and is here only while its own module "
        f"is called. {advice}"
    )


class Keeper(Protocol):
    """What has the values of weights that are away: the hook of their module."""

    def stored(self, own: str) -> torch.Tensor:
        """The value of a weight, by its name in the module, in main memory."""

    def resident(self, own: str) -> torch.Tensor | None:
        """The weight of the model that it is tied to, if that is in memory."""


class StandsFor(NamedTuple):
    """What is known of a weight that is away: its class, its name in the model and in its module."""

    kind: type[torch.Tensor]
    name: str
    keeper: Keeper | None = None
    own: str = ""


class _Readable:
    """Lets checkpoints read the value, as `accel_checkpoint.deferred` says."""

    def accel_read(self) -> torch.Tensor:
        """The value, of this dtype, in main memory."""
        away = vars(self)[STANDS_FOR]
        found: torch.Tensor = away.keeper.stored(away.own)
        return found

    def accel_resident(self) -> torch.Tensor | None:
        """The weight of the model that it is tied to, if that is in memory."""
        away = vars(self)[STANDS_FOR]
        found: torch.Tensor | None = away.keeper.resident(away.own)
        return found


class OffloadedParameter(_Readable, nn.Parameter):
    """A weight on the meta device that raises when it is computed with.

    torch's CPU kernels do not all refuse tensors without memory: a matrix product with one gives
    what happens to lie in memory.
    """

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str, keeper: Keeper | None = None, own: str = "") -> torch.Tensor:
        """Stands for `tensor`, with its shape, dtype and attributes."""
        kind = cls if isinstance(tensor, nn.Parameter) else OffloadedBuffer
        away = torch.Tensor._make_subclass(kind, tensor.detach().to("meta"), tensor.requires_grad)
        vars(away).update({STANDS_FOR: StandsFor(type(tensor), name, keeper, own), **vars(tensor)})
        return away

    def filled(self, value: torch.Tensor) -> nn.Parameter | None:
        """The parameter with its value; None if there is something to convert, or to complain of."""
        with torch._C.DisableTorchFunctionSubclass():
            attributes = vars(self)
            if attributes[STANDS_FOR][0] is not nn.Parameter or type(value) is not torch.Tensor:
                return None
            if value.dtype != self.dtype or value.shape != self.shape:
                return None
            new = torch.Tensor._make_subclass(nn.Parameter, value, self.requires_grad)
        if len(attributes) > 1:
            vars(new).update({name: each for name, each in attributes.items() if name != STANDS_FOR})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Stands for the same weight in a copy of the module; what is tied stays tied."""
        if id(self) not in memo:
            memo[id(self)] = OffloadedParameter.of(self, "")
            vars(memo[id(self)])[STANDS_FOR] = copy.deepcopy(vars(self)[STANDS_FOR], memo)
        copied: torch.Tensor = memo[id(self)]
        return copied

    __torch_function__ = classmethod(_refuse)


class OffloadedBuffer(_Readable, torch.Tensor):
    """The same for a buffer."""

    __deepcopy__ = OffloadedParameter.__deepcopy__
    __torch_function__ = classmethod(_refuse)


def _flat(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> list[Any]:
    found = [*args, *(kwargs or {}).values()]
    return [*found, *(inner for each in found if isinstance(each, (list, tuple)) for inner in each)]


def module_path(weights: Mapping[str, torch.Tensor] | None) -> str:
    """The names of a module's weights in their store begin with this."""
    return weights.prefix if isinstance(weights, PrefixedDataset) else ""

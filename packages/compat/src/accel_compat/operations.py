"""Operations of all processes together, by the names and defaults that scripts know."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import accel_core
from accel_compat.nested import convert_to_fp32, recursively_apply
from accel_compat.state import AcceleratorState, PartialState
from accel_core import CollectiveMismatchError, DistributedType

DistributedOperationException = CollectiveMismatchError
"""Arguments of the ranks do not fit together."""


class CannotPadNestedTensorWarning(UserWarning):
    """One of torch's nested tensors was to be padded, and stays as it is."""


def gather_object(object: Any) -> Any:
    """Concatenates the lists of all ranks, in rank order; in one process it gives what it was given. Collective."""
    return object if PartialState().num_processes == 1 else accel_core.gather_object(object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combines tensors over the ranks, by default to their mean: see `accel_core.reduce`. Collective."""
    return accel_core.reduce(tensor, reduction, scale)  # type: ignore[arg-type]


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pads tensors to the largest size of the ranks in one dim: see `accel_core.pad_across_processes`. Collective."""
    if _has_nested(tensor):
        import warnings

        what = "pad_across_processes() was given one of torch's nested tensors, which stays as it is:"
        warnings.warn(f"{what} how it is to be padded is not known.", CannotPadNestedTensorWarning, stacklevel=2)
        return recursively_apply(
            lambda each: each if each.is_nested else accel_core.pad_across_processes(each, dim, pad_index, pad_first),
            tensor,
            error_on_other_type=True,
        )
    recursively_apply(lambda each: each, tensor, error_on_other_type=True)
    return accel_core.pad_across_processes(tensor, dim, pad_index, pad_first)


def _has_nested(tensor: Any) -> bool:
    found: list[bool] = []
    recursively_apply(lambda each: found.append(each.is_nested), tensor)
    return any(found)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Gives every rank the tensor that one of them has; the others give None. Collective."""
    given = accel_core.gather_object([None if tensor is None else tensor.cpu()])
    found = next((each for each in given if each is not None), None)
    if found is None:
        raise ValueError("copy_tensor_to_devices() was given None on every rank: one of them gives the tensor.")
    return torch.as_tensor(found).to(PartialState().device)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of the tensor that one of the ranks has; the others give None. Collective."""
    given = accel_core.gather_object([None if tensor is None else (tensor.shape, tensor.dtype)])
    shape, dtype = next(each for each in given if each is not None)
    return shape, dtype


class ConvertOutputsToFp32:
    """A function whose results are given in float32 where they are float16 or bfloat16. It cannot be pickled."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        what = "A model whose forward converts its outputs cannot be pickled."
        raise pickle.PicklingError(f"{what} Take its original forward back with accelerator.unwrap_model(model).")


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with float16 and bfloat16 results in float32."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward


@contextmanager
def GatheredParameters(  # noqa: N802  (as it is known)
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """A block in which parameters that DeepSpeed cuts up are whole; elsewhere it does nothing."""
    if enabled and AcceleratorState().distributed_type == DistributedType.DEEPSPEED:
        from deepspeed import zero

        with zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled):
            yield
    else:
        yield

"""The tensors of a model by name: which are tied, and how one of them gets another value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

STANDS_FOR = "_accel_stands_for"
"""On a parameter that stands for one that is not here: the class of that, and its name."""


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a module's parameters, then of its buffers, each tensor once.

    `recurse`: those of its children too. `remove_non_persistent`: without the buffers that
    `state_dict()` leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = set(non_persistent_buffers(module, recurse)) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def non_persistent_buffers(module: nn.Module, recurse: bool = True) -> Iterator[str]:
    """Names of the buffers that `state_dict()` leaves out, all of them."""
    for prefix, each in module.named_modules(remove_duplicate=False) if recurse else [("", module)]:
        yield from (joined(prefix, name) for name in sorted(each._non_persistent_buffers_set))


def joined(prefix: str, name: str) -> str:
    """`prefix.name`, without the dot where one of them is empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def is_below(name: str, module: str) -> bool:
    """Whether `name` is that of the module, or of something inside it; "" has everything."""
    return not module or name == module or name.startswith(f"{module}.")


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has a tensor, and its name there. AttributeError if there is none."""
    path, _, own = name.rpartition(".")
    return model.get_submodule(path) if path else model, own


def module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Each module with all of its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of its state dict, which may have other things by `get_extra_state`."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def same_bits(stored: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether what is stored, in the dtype of a value, is that, bit by bit."""
    if hasattr(value, "__tensor_flatten__") or hasattr(stored, "__tensor_flatten__"):  # quantised: of several tensors
        parts: Any = value
        return type(stored) is type(value) and all(
            same_bits(getattr(stored, name), getattr(value, name)) for name in parts.__tensor_flatten__()[0]
        )
    stored, value = stored.detach().to(value.dtype), value.detach().to(stored.device)
    found, expected = (each.reshape(-1).view(torch.uint8) for each in (stored, value))
    return torch.equal(found, expected)


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of parameters that are one object, a list per object, in the model's order."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(found) for found in names.values() if len(found) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Makes the parameters of each list one object again: the first of them that has memory."""
    for names in tied_params:
        places = [owner_of(model, name) for name in names]
        found = [getattr(module, own) for module, own in places if hasattr(module, own)]
        if not found:
            continue
        kept = next((each for each in found if each.device.type != "meta"), found[0])
        for module, own in places:
            module._parameters[own] = kept


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: torch.device | str | int,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,  # noqa: ARG001  (libraries pass it)
) -> None:
    """Gives a parameter or buffer another device, and another value if one is given.

    Args:
        module: the model.
        tensor_name: dotted, such as "layers.0.weight".
        value: of the tensor's shape. None: its own value, which a tensor on meta does not have.
        dtype: of the result. None: floating values get that of the tensor.
        fp16_statistics: kept as attribute `SCB` of the parameter, for 8-bit weights.
        tied_params_map: address → device → tensor. A tensor whose address is a key is taken from
            there, or put there, so that tied weights are moved once.
        non_blocking: as in `torch.Tensor.to`.
        clear_cache: is taken for compatibility: torch's allocator reuses memory by itself.

    Raises:
        ValueError: if there is no such tensor, `value` has another shape, or is needed.
    """
    path, _, own = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{type(module).__name__} has no {tensor_name!r}: {error}") from error
    table = owner._parameters if own in owner._parameters else owner._buffers
    if own not in table:
        raise ValueError(f"{type(owner).__name__} has no parameter or buffer {own!r} (asked for as {tensor_name!r}).")
    old, device = table[own], as_device(device)
    if value is None and (old is None or (old.device.type == "meta" and device.type != "meta")):
        raise ValueError(
            f"{tensor_name} is on the meta device and has no value to put on {device}. Pass value=, or load weights."
        )
    if old is not None and value is not None and value.shape != old.shape and type(old) is nn.Parameter:
        raise ValueError(f"{tensor_name} has shape {tuple(old.shape)}, and value= has {tuple(value.shape)}.")
    source = old if value is None else value
    assert source is not None, "checked above"
    new = _from_map(tied_params_map, source, device)
    if new is None:
        new = _converted(source, device, _dtype(dtype, old, source), non_blocking)
        if tied_params_map is not None and source.data_ptr() in tied_params_map:
            tied_params_map[source.data_ptr()][device] = new
    if table is owner._buffers:
        owner._buffers[own] = new
    elif old is not None and new is not old:
        owner._parameters[own] = new if isinstance(new, nn.Parameter) else successor(old, new)
    if fp16_statistics is not None:
        owner._parameters[own].SCB = fp16_statistics.to(device)  # type: ignore[union-attr]


def as_device(device: torch.device | str | int) -> torch.device:
    """The device of a device map's entry: a number is an accelerator; "disk" is meta."""
    if isinstance(device, int) and not torch.accelerator.is_available():
        raise ValueError(
            f"Place {device} is an accelerator, and there is none here: leave it out of max_memory= or device_map=."
        )
    return torch.device("meta" if device == "disk" else device)


def _from_map(
    tied: Mapping[int, Mapping[torch.device, torch.Tensor]] | None, source: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    return None if tied is None else tied.get(source.data_ptr(), {}).get(device)


def _dtype(asked: torch.dtype | str | None, old: torch.Tensor | None, source: torch.Tensor) -> torch.dtype:
    if asked is not None:
        return getattr(torch, asked.removeprefix("torch.")) if isinstance(asked, str) else asked
    if old is not None and source.is_floating_point() and old.is_floating_point():
        return old.dtype
    return source.dtype


def _converted(source: torch.Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool) -> torch.Tensor:
    if isinstance(source, nn.Parameter):
        return source if (source.device, source.dtype) == (device, dtype) else successor(source, source, device, dtype)
    return source.detach().to(device, dtype, non_blocking=non_blocking)


def successor(
    old: torch.Tensor, value: torch.Tensor, device: torch.device | str | int | None = None, dtype: Any = None
) -> nn.Parameter:
    """A parameter with another value, of the class, attributes and `requires_grad` of `old`."""
    value = value.detach().to(value.device if device is None else device, dtype or value.dtype)
    trains = old.requires_grad and (value.is_floating_point() or value.is_complex())
    attributes = dict(vars(old))
    kind = attributes.pop(STANDS_FOR, (type(old), ""))[0]
    if kind is nn.Parameter:
        new = nn.Parameter(value, requires_grad=trains)
    else:
        new = cast("nn.Parameter", torch.Tensor._make_subclass(kind, value, trains))
    vars(new).update(attributes)
    return new

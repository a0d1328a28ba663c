"""Models built without memory: parameters on the meta device, or on a given one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from accel_big_model.host_buffers import own_memory
from accel_big_model.module_tensors import successor


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """A block in which modules are built without memory: parameters have a shape and a dtype only.

        with init_empty_weights():
            model = Transformer(layers=96)          # of any size, in no time
        model = load_checkpoint_and_dispatch(model, "weights/", device_map="auto")

    Weights that are tied while the model is built stay tied. `include_buffers=True`: buffers, and
    other tensors that are made inside, have no memory either; otherwise they have their values.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool = False) -> Iterator[None]:
    """A block in which parameters of new modules of this thread lie on `device`.

    A parameter goes there when a module takes it, so one of them at a time is in main memory.
    `include_buffers=True`: all tensors that are made inside without a device lie there.
    """
    device, thread = torch.device(device), threading.get_ident()
    successors: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by the id of what was registered

    def place(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # What was moved before, and is registered again under another name, stays the same object: it is tied.
        if parameter is None or parameter.device == device or threading.get_ident() != thread:
            return None
        old, new = successors.get(id(parameter), (None, None))
        if old is None or new is None or old() is not parameter:
            new = successor(parameter, parameter, device)
            successors[id(parameter)] = weakref.ref(parameter), new
        return new

    hook = register_module_parameter_registration_hook(place)  # type: ignore[arg-type]  # what it returns is registered
    try:
        with device if include_buffers else _OwnMemory():
            yield
    finally:
        hook.remove()


class _OwnMemory(TorchFunctionMode):
    """Gives each large `torch.empty` a mapping of its own: the heap would keep the room of all of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.keys() <= {"device", "dtype"}:
            device = kwargs.get("device")
            if torch.device(torch.get_default_device() if device is None else device).type == "cpu":
                like = torch.empty(*args, **{**kwargs, "device": "meta"})
                return own_memory(tuple(like.shape), like.dtype)
        return func(*args, **kwargs)

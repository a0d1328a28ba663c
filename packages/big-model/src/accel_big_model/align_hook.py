"""The hook that brings a module's weights and inputs to the device where it computes."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from accel_big_model.hooks import ModelHook, hooks_of
from accel_big_model.module_tensors import (
    as_device,
    non_persistent_buffers,
    owner_of,
    same_bits,
    set_module_tensor_to_device,
)
from accel_big_model.offloaded_parameter import NO_COMPILING, OffloadedBuffer, OffloadedParameter, module_path
from accel_big_model.tied_weights import TiedWeights
from accel_core.api.component import flatten, map_tensors

if TYPE_CHECKING:
    from accel_big_model.prefetch import Prefetcher

DeviceLike: TypeAlias = torch.device | str | int
Tied: TypeAlias = dict[int, dict[torch.device, torch.Tensor]]
"""Address of a tied weight → device → the weight there."""
_CPU = torch.device("cpu")
_UNTIED = TiedWeights()


class AlignDevicesHook(ModelHook):
    """Brings inputs, and weights that are offloaded, to a module's device for each call.

    Args:
        execution_device: where the module computes. None: inputs stay where they are.
        offload: whether weights are kept elsewhere between calls.
        io_same_device: whether outputs go back to where the inputs were.
        weights_map: name → weight, for what is offloaded. None: main memory keeps them.
        offload_buffers: whether buffers are offloaded too.
        place_submodules: whether the weights of all submodules are meant, and not only the module's
            own.
        skip_keys: keywords of inputs, or of outputs, that stay where they are.
        tied_params_map: as in `set_module_tensor_to_device`.
        prefetcher: fetches ahead; None: each call waits for its weights.
        names: of the weights that are meant; None: all.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: Tied | None = None,
        prefetcher: Prefetcher | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        self.execution_device: Any = None if execution_device is None else as_device(execution_device)
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
        self.tied_params_map = tied_params_map
        self.prefetcher = prefetcher
        self._meant = names
        self.outermost = False  # of a model of which something is offloaded: it looks for weights without a value
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.nbytes = 0
        self._names: list[str] = []
        self._recurrent: list[nn.RNNBase] = []
        self._path = ""  # of the module in the model, with a dot behind it
        self._away: dict[str, torch.Tensor] = {}
        self._fetched: dict[str, torch.Tensor] = {}
        self._brought: dict[str, tuple[torch.Tensor, int]] = {}  # and its version

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Moves the weights to where they compute, or takes them away."""
        if not self.offload:
            for name, _ in [*_each_name(module, True, self.place_submodules, persistent=False)]:
                if self.execution_device is not None and (self._meant is None or name in self._meant):
                    set_module_tensor_to_device(
                        module, name, self.execution_device, tied_params_map=self.tied_params_map
                    )
            return module
        tensors = {
            name: tensor
            for name, tensor in _each_name(module, self.offload_buffers, self.place_submodules)
            if self._meant is None or name in self._meant
        }
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
        self._names = list(tensors)
        owners = {owner_of(module, name)[0] for name in tensors}
        self._recurrent = [each for each in owners if isinstance(each, nn.RNNBase)]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        path = self._path = module_path(self.weights_map)
        self._away = {
            name: self._tied.stand_in(
                f"{path}{name}", partial(OffloadedParameter.of, tensor, f"{path}{name}", self, name)
            )
            for name, tensor in tensors.items()
        }
        for name, tensor in [*_each_name(module, True, self.place_submodules, persistent=False)]:
            if name in tensors:
                self._take_away(module, name)
            elif self._meant is not None and name not in self._meant:
                continue
            elif self.execution_device is not None and tensor.device.type != "meta":
                set_module_tensor_to_device(module, name, self.execution_device)
        self._list_anew()
        return module

    def fetch(self) -> dict[str, torch.Tensor]:
        """The offloaded weights, by name, on the device where the module computes."""
        assert self.weights_map is not None, "what is offloaded has a store"
        device, found = self.execution_device or _CPU, dict[int, torch.Tensor]()
        for name in self._names:
            away = id(self._away[name])  # one object stands for all names of what is tied
            if away not in found:
                found[away] = self._tied.read(self.weights_map, self._path, name, device)
        return {name: found[id(self._away[name])] for name in self._names}

    def stored(self, own: str) -> torch.Tensor:
        """A weight in main memory, by its name in the module; in memory of its own if it is read."""
        away = self._away[own]
        return self._tied.read(self.weights_map or {}, self._path, own, _CPU).to(away.dtype)

    def resident(self, own: str) -> torch.Tensor | None:
        """The weight that this one is tied to, if that is in memory."""
        return self._tied.resident(f"{self._path}{own}")

    def note(self, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Notes what was fetched, and returns what is tied: it is not read again while it is in use."""
        return [value for name, value in weights.items() if self._tied.use(f"{self._path}{name}", value)]

    @property
    def _tied(self) -> TiedWeights:
        return _UNTIED if self.prefetcher is None else self.prefetcher.tied

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Brings inputs and weights."""
        if self.outermost:
            _watch_empty(module)
        if self.io_same_device:
            self.input_device = _device_of([args, kwargs])
        if self.offload:
            self._bring(module)
        device = self.execution_device
        if device is None:
            return args, kwargs
        if len(args) != 1 or type(args[0]) is not torch.Tensor or args[0].device != device:
            args = self._moved(args, device)
        return args, self._moved(kwargs, device) if kwargs else kwargs

    def begin(self, module: nn.Module) -> None:
        """Raises if another thread is in the forward, which would take the weights away, or in torch.compile()."""
        if self.offload and torch.compiler.is_compiling():
            raise RuntimeError(NO_COMPILING)
        if self.offload and vars(self).setdefault("_caller", threading.get_ident()) != threading.get_ident():
            raise RuntimeError(
                f"The forward of {type(module).__name__}, whose weights are offloaded, was called by two threads at once: they share its "
                f"weights. Give each thread a copy of the model (copy.deepcopy), or let one wait for the other."
            )

    def end(self, module: nn.Module) -> None:
        """Takes the weights away, also after an error."""
        if self.offload and vars(self).get("_caller") == threading.get_ident():
            self._take_all_away(module)
            del vars(self)["_caller"]

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Brings outputs back. Takes weights away that `pre_forward` alone has brought."""
        self.refuse_writes(module)
        if self.offload and "_caller" not in vars(self):  # libraries call both by hand, around what reads the weights
            self._take_all_away(module)
        if self.io_same_device and self.input_device is not None:
            output = self._moved(output, self.input_device)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Gives the module its weights again, where they were."""
        if self.offload:
            assert self.weights_map is not None, "what is offloaded has a store"
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    restore = partial(self._restore, module, name, device)
                    self._tied.restored(f"{self._path}{name}", restore, *owner_of(module, name))
        return module

    def _restore(self, module: nn.Module, name: str, device: torch.device) -> None:
        value = self._tied.read(self.weights_map or {}, self._path, name, _CPU)
        set_module_tensor_to_device(module, name, device, value=value)

    def _bring(self, module: nn.Module) -> None:
        self._refuse_replaced(module)
        with torch.inference_mode(False), torch.no_grad():  # what is made in that mode does not count writes
            self._fetched = self.fetch() if self.prefetcher is None else self.prefetcher.take(self)
            for name, value in self._fetched.items():
                self._place(module, name, value.clone() if value.is_inference() else value)
                placed = _tensor_of(module, name)
                self._brought[name] = placed, placed._version
        if torch.is_grad_enabled():
            for name in self._names:
                owner, own = owner_of(module, name)
                parameter = owner._parameters.get(own)
                if parameter is None or parameter is self._tied.resident(f"{self._path}{name}"):
                    continue
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_refuse_gradient)

    def _place(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        away, by_address = self._away[name], self.tied_params_map if self.prefetcher is None else None
        filled = away.filled(value) if isinstance(away, OffloadedParameter) and not by_address else None
        if filled is None:
            device = self.execution_device or _CPU
            set_module_tensor_to_device(module, name, device, value=value, tied_params_map=by_address)
        else:
            owner, own = owner_of(module, name)
            owner._parameters[own] = filled

    def _refuse_replaced(self, module: nn.Module) -> None:
        """Raises if a weight that is away was given another value: it is not what is brought."""
        for name, away in self._away.items():
            found = _tensor_of(module, name)
            if found is away or (found is not None and self._is_here(name, found)):
                continue
            raise RuntimeError(
                f"{self._path}{name} of {type(module).__name__} is offloaded, and was given another value, which would not be used. "
                f"Give a model its weights first, and dispatch it then."
            )

    def _is_here(self, name: str, found: torch.Tensor) -> bool:
        """Whether this is the weight itself: brought by a call around this one, or tied to one in memory."""
        brought = self._brought.get(name)
        return (brought is not None and found is brought[0]) or found is self._tied.resident(f"{self._path}{name}")

    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of the weights that are here, for `refuse_writes`."""
        return {name: placed.detach().clone() for name, (placed, _) in self._brought.items()}

    def refuse_writes(self, module: nn.Module, copies: Mapping[str, torch.Tensor] | None = None) -> None:
        """Raises if what goes away now was written to, or replaced. Of writes through `.data`, only copies know."""
        for name, (placed, version) in self._brought.items():
            found = _tensor_of(module, name)
            unwritten = found is placed and found._version == version
            if unwritten and (copies is None or same_bits(copies[name], found)):
                continue
            if found is placed and self.weights_map is not None and self.stored(name).data_ptr() == found.data_ptr():
                continue  # in main memory, where it was written to
            kind = "parameter" if isinstance(placed, nn.Parameter) else "buffer"
            advice = "Leave offload_buffers= out, or call eval() if these are statistics"
            if kind == "parameter":
                advice = "Give the module a place of its own in the device map, where it computes"
            raise RuntimeError(
                f"The forward of {type(module).__name__} {'wrote to' if found is placed else 'replaced'} its {kind} {self._path}{name}, which is "
                f"offloaded: that would be lost. {advice}."
            )

    def _take_all_away(self, module: nn.Module) -> None:
        for name in self._names:
            self._take_away(module, name)
        self._list_anew()
        self._fetched, self._brought = {}, {}

    def _list_anew(self) -> None:
        """Has recurrent layers, which list their weights, let go of those that were brought."""
        for layer in self._recurrent:
            layer._init_flat_weights()

    def _take_away(self, module: nn.Module, name: str) -> None:
        owner, own = owner_of(module, name)
        table: dict[str, Any] = owner._parameters if own in owner._parameters else owner._buffers
        table[own] = self._away[name]

    def _moved(self, given: Any, device: torch.device) -> Any:
        if isinstance(given, Mapping) and self.skip_keys:
            kept = {key: value for key, value in given.items() if key in self.skip_keys}
            rest = {key: value for key, value in given.items() if key not in self.skip_keys}
            moved = {**map_tensors(lambda tensor: tensor.to(device), rest), **kept}
            ordered = {key: moved[key] for key in given}
            return ordered if type(given) is dict else type(given)(ordered)  # type: ignore[call-arg]
        return map_tensors(lambda tensor: tensor.to(device), given)


def _each_name(
    module: nn.Module, buffers: bool, recurse: bool, persistent: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `named_module_tensors`, but every name of what is tied: each of them is read by a forward.

    A module that has two names has its tensors once.
    """
    found: list[tuple[str, torch.Tensor]] = [*module.named_parameters(recurse=recurse, remove_duplicate=False)]
    left_out = set(non_persistent_buffers(module, recurse)) if persistent else set()
    if buffers:
        named = module.named_buffers(recurse=recurse, remove_duplicate=False)
        found += [(name, buffer) for name, buffer in named if name not in left_out]
    seen = set()
    for name, tensor in found:
        if (place := owner_of(module, name)) not in seen:
            seen.add(place)
            yield name, tensor


def _tensor_of(module: nn.Module, name: str) -> Any:
    """What a module has by this name now; None if it has nothing."""
    owner, own = owner_of(module, name)
    return owner._parameters.get(own, owner._buffers.get(own))


def _watch_empty(model: nn.Module) -> None:
    """Has modules raise when they are called that have a tensor without a value, and are none of those that are dispatched.

    Some of torch's kernels compute with what happens to lie in memory.
    """
    waiting = [model]
    while waiting:
        module = waiting.pop()
        waiting.extend(each for each in module._modules.values() if each is not None)
        if _empty(module) is not None and _refuse_empty not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_refuse_empty)


def _empty(module: nn.Module) -> str | None:
    """The name of a tensor of a module that has no value, and stands for none."""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None and not isinstance(tensor, (OffloadedParameter, OffloadedBuffer)) and tensor.is_meta:
                return name
    return None


def _refuse_empty(module: nn.Module, inputs: object) -> None:  # noqa: ARG001  (torch passes them)
    """A hook of torch: raises if a tensor of the module has still no value."""
    if (name := _empty(module)) is not None:
        raise RuntimeError(
            f"{name} of {type(module).__name__} is on the meta device and has no value. A module that was added after its model was "
            f"dispatched, such as an adapter, took that device from an offloaded weight: add modules first, and dispatch then."
        )


def _refuse_gradient(parameter: torch.Tensor) -> None:
    """Raises: the weight goes when its module has been called, and its gradient would go with it."""
    raise RuntimeError(
        f"backward() reached a weight of shape {tuple(parameter.shape)} that is offloaded, whose gradient nobody would keep. Freeze it by "
        f"requires_grad_(False) before the model is dispatched, or choose a strategy that shards: strategy='fsdp', 'deepspeed'."
    )


def _device_of(given: Any) -> torch.device | None:
    """The device of the first tensor in nested containers; None if there is none."""
    return next((each.device for each in flatten(given)[0] if isinstance(each, torch.Tensor)), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the module's hook brings its weights for each call and takes them away again."""
    return _offloading(module) is not None


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """The hook that brings the module's weights."""
    return next((each for each in hooks_of(module) if isinstance(each, AlignDevicesHook) and each.offload), None)


@contextmanager
def align_module_device(module: nn.Module, execution_device: DeviceLike | None = None) -> Iterator[None]:
    """A block in which the module's own weights are on a device: for reading and changing them.

    Weights that are offloaded are brought, and changing them raises; of others, parameters go to
    `execution_device` and back. None: where the hook computes, or where they are.
    """
    with aligned(module, execution_device, looks_for_writes=True):
        yield


@contextmanager
def aligned(module: nn.Module, execution_device: DeviceLike | None, looks_for_writes: bool) -> Iterator[None]:
    """`align_module_device`. A block that only reads needs no copies by which writes through `.data` are found."""
    if execution_device is not None and as_device(execution_device).type == "meta":
        raise ValueError("align_module_device() was asked for 'meta', where weights have no values. Name a device.")
    if (hook := _offloading(module)) is not None:
        before = hook.execution_device
        hook.execution_device = before if execution_device is None else as_device(execution_device)
        try:
            hook.begin(module)
            hook.pre_forward(module)
            copies = hook.copies() if looks_for_writes else None
            yield
            hook.refuse_writes(module, copies)
        finally:
            hook.end(module)
            hook.execution_device = before
    elif execution_device is not None:
        places = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        try:
            for name in places:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in places.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield

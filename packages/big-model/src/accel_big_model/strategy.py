"""The strategy "dispatch": one process, whose models are spread over its accelerators, main memory and disk."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_big_model.align_hook import has_offloaded_params
from accel_big_model.dispatch import dispatch_model
from accel_big_model.loading import load_checkpoint_and_dispatch, planned
from accel_big_model.meta_init import init_empty_weights
from accel_big_model.module_tensors import as_device
from accel_core import Layout, Single, Strategy, WorldError, hookimpl
from accel_core.api.strategy import ParameterReplacement, cast_parameters, compile_calls, override_calls

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_big_model.memory import Place
    from accel_core import PrecisionPolicy, PrepareRequest, World


class Dispatch(Strategy):
    """Spreads each model over the accelerators, main memory and disk that one process has.

        accelerator = Accelerator(strategy=Dispatch(max_memory={0: "20GiB", "cpu": "100GiB"}))
        model = accelerator.prepare(accelerator.build_model(factory, "weights/"))

    Weights train where they stay: on accelerators, and in main memory where there is none. A
    backward into weights that are offloaded raises. Models that are dispatched already stay so.

    Args:
        device_map: how layers are placed: "auto" and "balanced" divide them evenly among
            accelerators, "balanced_low_0" leaves room on the first, "sequential" fills one after
            the other; or a map from the names of modules to places.
        max_memory: the most memory to use in each place: accelerators by number, and "cpu". None:
            all that is free.
        offload_folder: folder for weights that are placed on "disk". None: they stay in the
            files that the model is built from.
        no_split_module_classes: names of classes whose modules go to one place as a whole. None:
            those that the model itself names, as models of transformers do.
        dtype: number format in which weights are read. None: the model's.
        offload_buffers: offload buffers, too.
        preload_module_classes: names of classes whose modules bring all their weights at once.
        force_hooks: attach hooks even if everything is in one place.
    """

    distributed_type = Single.distributed_type
    places_models = True
    replicates_parameters = True

    def __init__(
        self,
        device_map: str | Mapping[str, int | str] = "auto",
        max_memory: Mapping[str, int | str] | Mapping[int | str, int | str] | None = None,
        offload_folder: str | Path | None = None,
        no_split_module_classes: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        offload_buffers: bool = False,
        preload_module_classes: Sequence[str] | None = None,
        force_hooks: bool = False,
    ) -> None:
        self._device_map = device_map if isinstance(device_map, str) else _with_numbers(device_map.items(), values=True)
        self._max_memory = None if max_memory is None else _with_numbers(max_memory.items())
        self._folder = offload_folder
        self._no_split, self._dtype, self._offload_buffers = no_split_module_classes, dtype, offload_buffers
        self._preload, self._force_hooks = preload_module_classes, force_hooks
        self._device = torch.device("cpu")
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def details(self) -> Mapping[str, str]:
        """How many entries of each model's map are in which place."""
        found = {}
        for number, model in enumerate(self._models, 1):
            counts = Counter(map(str, getattr(model, "hf_device_map", {}).values()))
            found[f"model {number}"] = (
                f"{type(model).__name__}: {', '.join(f'{n} on {place}' for place, n in counts.items())}"
            )
        return found

    @hookimpl
    def layout(self, world: World) -> Layout:
        """The whole of the data. Raises `WorldError` if several processes were started."""
        if world.size > 1:
            raise WorldError(
                f"strategy 'dispatch' was asked for, which spreads a model over the devices of one process, but the launcher "
                f"({world.source}) started {world.size}. Start one process, or choose a strategy that shards: 'fsdp', 'deepspeed'."
            )
        self._device = world.device
        return Layout.data_parallel(world)

    @hookimpl
    def build_model(self, factory: Callable[[], nn.Module], checkpoint: Path | None) -> nn.Module:
        """A model in its places: without memory until it is filled from the checkpoint, if there is one."""
        if checkpoint is None:
            return self._spread(factory())
        with init_empty_weights():
            model = factory()
        places = self._places(model, self._dtype)
        options = {"dtype": self._dtype, "offload_folder": self._folder, **self._options(places)}
        return load_checkpoint_and_dispatch(model, checkpoint, places, **options)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Spreads the model in place, unless it is; casts and compiles it. Any `reduce` dtype holds."""
        if not any(hasattr(module, "hf_device_map") or has_offloaded_params(module) for module in model.modules()):
            _require_weights(model)
            cast_parameters(model, request.policy)
            replacement = ParameterReplacement(model, optimizers)
            self._spread(model)
            replacement.apply()
        else:
            _cast_in_memory(model, request.policy)
        override_calls(model, request.policy, request.device_type, request.autocast)
        if request.compile_options is not None:
            _refuse_to_compile(model)
            compile_calls(model, request.compile_options)
        self._models.add(model)
        return model

    def _spread(self, model: nn.Module) -> nn.Module:
        places = self._places(model, None)  # it is in memory, and keeps its dtype
        return dispatch_model(model, places, offload_dir=self._folder, **self._options(places))

    def _options(self, places: Mapping[str, Place]) -> dict[str, Any]:
        """Options of dispatching. One place has hooks if batches come from another device."""
        elsewhere = any(as_device(place) != self._device for place in places.values())
        return {
            "offload_buffers": self._offload_buffers,
            "preload_module_classes": self._preload,
            "force_hooks": self._force_hooks or elsewhere,
        }

    def _places(self, model: nn.Module, dtype: torch.dtype | None) -> dict[str, Place]:
        no_split = self._no_split
        if no_split is None:
            no_split = [*(getattr(model, "_no_split_modules", None) or ())]
        return planned(model, self._device_map, self._max_memory, no_split, dtype, self._offload_buffers)


def _with_numbers(items: Any, values: bool = False) -> dict[Any, Any]:
    """A mapping whose places are numbers where text from outside of the code has digits."""

    def place(given: Any) -> Any:
        return int(given) if isinstance(given, str) and given.isdecimal() else given

    return {key: place(value) for key, value in items} if values else {place(key): value for key, value in items}


def _require_weights(model: nn.Module) -> None:
    if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} without weights: {empty[0]!r} is on the meta device. Fill it: "
            f"accelerator.build_model(factory, checkpoint), or load_checkpoint_and_dispatch()."
        )


@torch.no_grad()
def _cast_in_memory(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Casts what is not offloaded; the core has refused what is, in another dtype."""
    if policy.param is None:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.data = tensor.data.to(policy.param)


def _refuse_to_compile(model: nn.Module) -> None:
    name = next((name for name, module in model.named_modules() if has_offloaded_params(module)), None)
    if name is not None:
        raise ValueError(
            f"A {type(model).__name__} was to be compiled whose {name or 'own'!r} weights are offloaded: they come and go by each call. Leave "
            f"dynamo_backend= out, or give max_memory= larger limits."
        )

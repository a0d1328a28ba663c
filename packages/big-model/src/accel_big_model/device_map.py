"""A place for each part of a model: `infer_auto_device_map`.

Places are filled in their order: accelerators, main memory, the disk. The modules are walked in the
order of the model. One that does not fit as a whole is divided into its children; an indivisible
one goes to the next place, and so does everything behind it, so that activations cross from
one place to another as seldom as possible. Modules that share a weight go together.

What is kept in main memory or on the disk is brought to the first accelerator for each call, and
from the disk through main memory: both keep room for the largest layer that is still to be placed.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from accel_big_model.memory import Place, check_place, get_max_memory
from accel_big_model.module_tensors import (
    as_device,
    find_tied_parameters,
    is_below,
    joined,
    module_names,
    non_persistent_buffers,
)
from accel_big_model.shortage import OFFLOADED, Room, check_layers, in_words, left_on_disk
from accel_big_model.sizes import compute_module_sizes, get_max_layer_size, is_layer
from accel_core.api.component import listed

Part: TypeAlias = tuple[str, nn.Module | torch.Tensor]

_log = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Place, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, Place]:
    """A device map: names of modules, parameters and buffers → where each goes.

    Args:
        model: may lie on the meta device.
        max_memory: limits by place, in bytes or text such as "10GiB"; None: what `get_max_memory`
            finds.
        no_split_module_classes: names of classes that go to one place as a whole, such as blocks
            with a residual connection.
        dtype, special_dtypes: in which the weights will be, as in `compute_module_sizes`.
        verbose: tells every decision in the log, at level INFO: what goes where, and what did not fit
            where, with bytes.
        clean_result: joins modules whose parts all go to one place.
        offload_buffers: whether the buffers of offloaded modules are offloaded too. Otherwise they
            stay on the first accelerator, and a warning says so if it has no room for them.
        fallback_allocation: where nothing fits on the first accelerator in order, takes the first
            module that does.

    The disk takes what fits nowhere else, and a warning in the log says why. Raises `ValueError` if
    the largest layer of what is offloaded has no room where it would compute.
    """
    limits = get_max_memory(max_memory)
    places: list[Place] = [*limits, *(["disk"] if "disk" not in limits else [])]
    no_split = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes or ()
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    planner = _Planner(
        limits=limits,
        places=places,
        sizes=sizes,
        no_split=no_split,
        tied=find_tied_parameters(model),
        level=logging.INFO if verbose else logging.DEBUG,
        fallback=fallback_allocation,
    )
    planner.place(_parts_of(model))
    placed = {name: (planner.parts[name], place) for name, place in planner.map.items()}
    check_layers(placed, limits, planner.used, sizes, no_split)
    if (warning := left_on_disk(planner.map, sizes, planner.refused)) is not None:
        _log.warning("%s", warning)
    if not offload_buffers:
        _check_buffers(planner, compute_module_sizes(model, dtype, special_dtypes, buffers_only=True))
    return clean_device_map(planner.map) if clean_result else planner.map


@dataclass
class _Planner:
    """The state of one walk."""

    limits: Mapping[Place, int]
    places: Sequence[Place]
    sizes: Mapping[str, int]
    no_split: Sequence[str]
    tied: list[list[str]]
    level: int
    fallback: bool
    map: OrderedDict[str, Place] = field(default_factory=OrderedDict)
    used: dict[Place, int] = field(default_factory=dict)
    parts: dict[str, nn.Module | torch.Tensor] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def place(self, waiting: list[Part]) -> None:
        """Gives every part a place."""
        current = 0
        while waiting:
            name, module = part = waiting.pop(0)
            place = self.places[current]
            room = self._room(place, waiting)
            free = None if room is None else room.free
            beside = self._tied_to(name, waiting)
            size = self._size_of(part, beside)
            if free is None or size <= free:
                self._put([part, *beside], place, size)
                waiting = [each for each in waiting if each not in beside]
            elif beside and self.sizes.get(name, 0) <= free and not all(self._is_layer(each) for each in beside):
                waiting = self._divided([part, *waiting], next(each for each in beside if not self._is_layer(each)))
            elif not self._is_layer(part):
                waiting = [*_children(name, module), *waiting]  # type: ignore[arg-type]
            else:
                assert room is not None, "what has no limit takes everything"
                self._refuse(name, size, room)
                waiting = [part, *waiting]
                if (found := self._fallback(place, current, waiting)) is not None:
                    self._put([found], place, self.sizes.get(found[0], 0))
                    waiting = [each for each in self._divided_around(waiting, found[0]) if each[0] != found[0]]
                current += 1

    def _room(self, place: Place, waiting: Sequence[Part]) -> Room | None:
        """What is left of a place; None: there is no limit."""
        if place == "disk":
            return None
        kept, layers = 0, [""]
        if place == "cpu" or self._computes(place):
            kept, layers = get_max_layer_size(waiting, self.sizes, self.no_split)
        return Room(place, self.limits[place], self.used.get(place, 0), kept, layers[0] if layers else "")

    def _computes(self, place: Place) -> bool:
        """Whether what is offloaded computes there: on the first accelerator that has a module."""
        return not any(self.used.get(before) for before in self.places[: self.places.index(place)])

    def _refuse(self, name: str, size: int, room: Room) -> None:
        self.refused.append(room.refuses(name, size))
        _log.log(self.level, "%s.", self.refused[-1])

    def _is_layer(self, part: Part) -> bool:
        return is_layer(part[1], self.no_split)

    def _tied_to(self, name: str, waiting: Sequence[Part]) -> list[Part]:
        """The parts that share a weight with this one, and do not lie in it."""
        groups = [group for group in self.tied if any(is_below(each, name) for each in group)]
        others = {each for group in groups for each in group if not is_below(each, name)}
        return [part for part in waiting if any(is_below(each, part[0]) for each in others)]

    def _size_of(self, part: Part, beside: Sequence[Part]) -> int:
        """Bytes of parts that go together. `sizes` counts a tied weight under its first name."""
        return self.sizes.get(part[0], 0) + sum(self.sizes.get(name, 0) for name, _ in beside)

    def _put(self, parts: Sequence[Part], place: Place, size: int) -> None:
        _log.log(self.level, "%s go to %r: %s.", [name for name, _ in parts], place, in_words(size))
        self.used[place] = self.used.get(place, 0) + size
        for name, part in parts:
            self.map[name], self.parts[name] = place, part

    def _divided(self, waiting: list[Part], part: Part) -> list[Part]:
        """The parts with one of them replaced by its children."""
        index = waiting.index(part)
        return [*waiting[:index], *_children(*part), *waiting[index + 1 :]]  # type: ignore[arg-type]

    def _divided_around(self, waiting: list[Part], name: str) -> list[Part]:
        while not any(each[0] == name for each in waiting):
            waiting = self._divided(waiting, next(each for each in waiting if is_below(name, each[0])))
        return waiting

    def _fallback(self, place: Place, current: int, waiting: Sequence[Part]) -> Part | None:
        """The first part that fits an empty first accelerator, the largest level first."""
        room = self._room(place, waiting)
        if not self.fallback or self.used.get(place) or current or place == "cpu" or room is None:
            return None
        level = list(waiting)
        while level:
            for part in level:
                if 0 < self.sizes.get(part[0], 0) <= room.free and not self._tied_to(part[0], waiting):
                    return part
            level = [child for part in level if not self._is_layer(part) for child in _children(*part)]  # type: ignore[arg-type]
        return None


def _parts_of(model: nn.Module) -> list[Part]:
    """What lies in a module; under each of its names, if it has several."""
    tables = (model._parameters, model._buffers, model._modules)
    return [(name, part) for table in tables for name, part in table.items() if part is not None]


def _children(name: str, module: nn.Module) -> list[Part]:
    return [(f"{name}.{own}", part) for own, part in _parts_of(module)]


def _check_buffers(planner: _Planner, buffers: Mapping[str, int]) -> None:
    """Warns if the buffers of what is offloaded have no room on the accelerator where they stay."""
    first = next((place for place in planner.map.values() if place not in OFFLOADED), None)
    if first is None:
        return
    offloaded = sum(buffers.get(name, 0) for name, place in planner.map.items() if place in OFFLOADED)
    if offloaded and planner.used.get(first, 0) + offloaded > planner.limits[first]:
        warnings.warn(
            f"Buffers of offloaded modules ({offloaded} bytes) stay on accelerator {first!r}, which has "
            f"{planner.limits[first] - planner.used.get(first, 0)} bytes left for them. Pass offload_buffers=True.",
            stacklevel=3,
        )


def clean_device_map(device_map: Mapping[str, Place], module_name: str = "") -> OrderedDict[str, Place]:
    """The map with one entry for each module below `module_name` that is in one place."""
    below = [name for name in device_map if is_below(name, module_name)]
    if below and len({device_map[name] for name in below}) == 1:
        kept = OrderedDict((name, place) for name, place in device_map.items() if name not in below)
        kept[module_name] = device_map[below[0]]
        return kept
    cleaned = OrderedDict(device_map)
    depth = len(module_name.split(".")) if module_name else 0
    for child in dict.fromkeys(
        ".".join(name.split(".")[: depth + 1]) for name in below if len(name.split(".")) > depth
    ):
        cleaned = clean_device_map(cleaned, child)
    return cleaned


def check_device_map(model: nn.Module, device_map: Mapping[str, Place | torch.device]) -> None:
    """Raises ValueError unless a map places each parameter and buffer, and nothing else; by all of its names.

    Buffers that `state_dict()` leaves out need no place.
    """
    names = _tensor_names(model)
    known = {*names, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    for name, place in device_map.items():
        check_place(place, f"device_map puts {name!r}")
    if unknown := [name for name in device_map if name not in known]:
        raise ValueError(
            f"device_map names {', '.join(map(repr, unknown))}, and {type(model).__name__} has no such part."
        )
    unsaved = set(non_persistent_buffers(model))
    if left_out := [name for name in unplaced(model, device_map) if name not in unsaved]:
        raise ValueError(
            f"device_map gives no place to {listed(left_out)}. Add them, or the modules that they are in; '' is the place of all that has "
            f"no other."
        )
    for module, names in [each for each in module_names(model).items() if len(each[1]) > 1]:
        for own, _ in [*module.named_parameters(), *module.named_buffers()]:
            if len({place_of(joined(name, own), device_map) for name in names}) > 1:
                raise ValueError(
                    f"{' and '.join(names)} are one module, and device_map has several places for its {own}. Give all of them one."
                )


def _tensor_names(model: nn.Module) -> list[str]:
    parameters = model.named_parameters(remove_duplicate=False)
    return [name for name, _ in [*parameters, *model.named_buffers(remove_duplicate=False)]]


def unplaced(model: nn.Module, device_map: Mapping[str, Place | torch.device]) -> list[str]:
    """The names of tensors for which a map has no place: of a checked one, buffers that are not saved."""
    return [name for name in _tensor_names(model) if not any(is_below(name, module) for module in device_map)]


def without_nesting(model: nn.Module, device_map: Mapping[str, Place]) -> Mapping[str, Place]:
    """The same map, where no name lies in another one: a module that has exceptions in it is replaced by its parts."""
    divided = {parent for name in device_map if name for parent in _parents(name)}
    if divided.isdisjoint(device_map):
        return device_map
    found: dict[str, Place] = {}

    def walk(name: str, part: nn.Module | torch.Tensor, place: Place | None) -> None:
        place = device_map.get(name, place)
        if name in divided and isinstance(part, nn.Module):
            for own, inner in _parts_of(part):
                walk(joined(name, own), inner, place)
        elif place is not None:
            found[name] = place

    walk("", model, None)
    return found


def _parents(name: str) -> Iterator[str]:
    """The names of the modules that something lies in, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def place_of(name: str, device_map: Mapping[str, Place | torch.device]) -> Place | torch.device:
    """The place of a tensor or module: that of the longest name in the map that it lies in, else where offloaded weights compute."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name] if name in device_map else main_place(device_map)


def as_places(device_map: Mapping[str, Place | torch.device]) -> dict[str, Place]:
    """The same map with devices by their names."""
    return {name: place if isinstance(place, (int, str)) else str(place) for name, place in device_map.items()}


def main_place(device_map: Mapping[str, Any]) -> Any:
    """Where offloaded weights compute: the first accelerator of a map, else the CPU."""
    return next((place for place in device_map.values() if place not in OFFLOADED), "cpu")


def offloaded_places(main: Place | torch.device) -> tuple[Place, ...]:
    """The places from which weights are brought to `main`, where they compute."""
    return ("disk",) if as_device(main).type == "cpu" else OFFLOADED

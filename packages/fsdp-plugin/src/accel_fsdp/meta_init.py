"""Models that are built without data, sharded, and then filled: only rank 0 ever has all of it.

`Recipes.build` runs the factory, and each parameter goes to the meta device as soon as it stands in
its module. Numbers (parameters without dims), buffers, and tensors that are neither, are computed
as ever: they are small, they may be in no checkpoint, and a factory may want to read them.
`Recipes.materialise` gives the model that was cut its memory, and fills it: either the main process
runs the factory again, with data this time, and the others receive one parameter after another; or
each rank reads its own parts of a checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accel_checkpoint import capture_model, elementwise_entry, load_weights, on_each_rank, on_main_rank
from accel_core import load_checkpoint_in_model
from accel_core.api.component import broadcast_object, capture_random_state, listed, restore_random_state
from accel_fsdp.sharding import DTensorSharding, is_sharded, local_of

if TYPE_CHECKING:
    from accel_core import World

Factory = Callable[[], nn.Module]
Tensors = Mapping[str, torch.Tensor]


def is_meta(model: nn.Module) -> bool:
    """Whether a model has parameters without data."""
    return any(parameter.is_meta for parameter in model.parameters())


@dataclass(frozen=True)
class Recipe:
    """The source of a model's data.

    Args:
        name: of its class, in messages.
        factory: builds a model with the same names.
        checkpoint: a file or folder with its weights; None: those that the factory gives.
    """

    name: str
    factory: Factory
    checkpoint: Path | None


class Recipes:
    """Builds models without data and fills them later. Forgets a model once filled or deleted."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, Recipe] = weakref.WeakKeyDictionary()

    def build(self, factory: Factory, checkpoint: Path | None) -> nn.Module:
        """The factory's model, its parameters without data. No collective, no random draw.

        A parameter of a class of its own (quantised weights, say) keeps its data, and so does a
        model that the factory did not build but had.

        Raises:
            RuntimeError: if the factory fails on parameters without data.
        """
        before = capture_random_state(None)
        try:
            with _without_data():
                model = factory()
        except Exception as error:
            raise RuntimeError(
                f"build_model() runs the factory with parameters that have no data yet, and it failed: {type(error).__name__}: "
                f"{error}\nA factory builds modules and initialises them; it cannot read the values of parameters (.item(), .numpy(), "
                f"`if weight.sum() > 0`), or move them to a device. Leave that out of it; or do without build_model(), and pass the "
                f"whole model to prepare()."
            ) from error
        finally:
            restore_random_state(before, None)
        if isinstance(model, nn.Module):
            if is_meta(model):
                path = None if checkpoint is None else checkpoint.absolute()
                self._of[model] = Recipe(type(model).__name__, factory, path)
            elif checkpoint is not None:
                load_checkpoint_in_model(model, checkpoint)
        return model

    def materialise(self, model: nn.Module, world: World, device: torch.device) -> None:
        """Gives a model of `build` its data. Collective; parameters stay the objects that they are.

        Without a checkpoint the main process runs the factory, in CPU memory, and broadcasts one
        tensor after another, so beside what it keeps another rank has one of them at most. Random
        streams end where they would had every rank run the factory: those of a rank that stood
        where the main process's did follow them. With a checkpoint each rank reads what it keeps.
        Buffers are those of the main process, as the factory gives them, but for what is in the
        checkpoint.

        Args:
            model: as it was built, or cut since. Parameters that have data keep it.
            world: the processes.
            device: of the parameters that are cut; all else goes to the device of the world. There
                may be no weak references to parameters without data: torch cannot give them any.

        Raises:
            RuntimeError: on every rank, for a model that was not built by `build`, and for tensors
                of which nobody knows the data.
            CheckpointError, FileNotFoundError: on every rank, if the checkpoint does not fit, or
                cannot be read.
        """
        recipe = self._of.pop(model, None)
        if recipe is None:
            empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
            raise RuntimeError(
                f"prepare() was given a model with {len(empty)} parameters on the meta device, and nobody knows their data: "
                f"{listed(empty)}. Build it by accelerator.build_model(factory, checkpoint=...), which remembers that; or give it "
                f"memory and data (model.to_empty(device=...)) before prepare()."
            )
        _Filling(model, recipe, world).fill(device)


class _Filling:
    """One model on its way to its data."""

    def __init__(self, model: nn.Module, recipe: Recipe, world: World) -> None:
        self._model = model
        self._recipe = recipe
        self._world = world
        self._empty = {name: tensor for name, tensor in _named(model).items() if tensor.is_meta}

    def fill(self, device: torch.device) -> None:
        small = [name for name, parameter in self._model.named_parameters() if not parameter.dim()]
        small += [name for name, _ in self._model.named_buffers()]
        if self._recipe.checkpoint is None:
            built = self._built()
            self._allocate(device)
            self._send(built, dict.fromkeys((*self._empty, *small)))
        else:
            self._check_saved()
            self._allocate(device)
            self._send({}, small)
            on_each_rank(self._world, f"to read {self._recipe.checkpoint}", self._load)

    def _load(self) -> None:
        assert self._recipe.checkpoint is not None, "it is asked before"
        load_weights(capture_model(self._model, DTensorSharding()), self._recipe.checkpoint, self._recipe.name)

    def _check_saved(self) -> None:
        """Raises for tensors without data that a checkpoint does not hold."""
        saved = {id(value) for value in self._model.state_dict(keep_vars=True).values()}
        lost = [name for name, tensor in self._empty.items() if id(tensor) not in saved]
        if lost:
            raise RuntimeError(
                f"{self._recipe.name} is to get the weights of {self._recipe.checkpoint}, but it has tensors that are computed from "
                f"parameters and stand in no checkpoint: {listed(lost)}. Compute them in the forward, or make them persistent; or leave "
                f"out the checkpoint of build_model(), and after prepare() call load_checkpoint_in_model(model, checkpoint)."
            )

    def _built(self) -> Tensors:
        """The factory's tensors with data on the main process; none on the others. A collective."""
        kept: list[nn.Module] = []

        def build() -> None:
            with torch.device("cpu"):
                kept.append(self._recipe.factory())
            self._compare(_named(kept[0]))

        before = capture_random_state(self._world.device)
        on_main_rank(self._world, build)
        moved = broadcast_object((before, capture_random_state(self._world.device)), self._world)
        restore_random_state(_followed(before, *moved), self._world.device)
        return _named(kept[0]) if kept else {}

    def _compare(self, built: Tensors) -> None:
        """Raises unless there is a tensor for each that has no data."""
        wrong = [f"{name} is missing" for name in self._empty if name not in built]
        wrong += [
            f"{name} has the shape {list(built[name].shape)}, and had {list(tensor.shape)}"
            for name, tensor in self._empty.items()
            if name in built and built[name].shape != tensor.shape
        ]
        if wrong:
            raise RuntimeError(
                f"The factory that build_model() was given ran again, to give {self._recipe.name} its data, but what it built now is "
                f"another model: {listed(wrong)}. Let it build the same each time, and change modules in it, not behind it."
            )

    @torch.no_grad()
    def _allocate(self, device: torch.device) -> None:
        """Gives every tensor without data memory. Ties stay, and all objects but buffers."""
        for parameter in self._model.parameters():
            if parameter.is_meta and not is_sharded(parameter):
                memory = torch.empty_like(parameter, device=self._world.device)
                # `to_empty` would put another object in its place, and so untie it.
                torch.utils.swap_tensors(parameter, nn.Parameter(memory, parameter.requires_grad))
        held = ((name, each) for name, each in self._model.named_parameters() if name not in self._empty)
        kept = {name: local_of(parameter).clone() for name, parameter in held}
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        self._model.to_empty(device=device)
        self._keep_buffers(buffers)
        for name, parameter in self._model.named_parameters():
            if not is_sharded(parameter):
                parameter.data = parameter.data.to(self._world.device)
            if name in kept:
                local_of(parameter).copy_(kept[name])

    def _keep_buffers(self, before: Tensors) -> None:
        """Puts the buffers that had data back, and ties the others again after `to_empty`."""
        placed: dict[int, torch.Tensor] = {}
        for name, made in list(self._model.named_buffers(remove_duplicate=False)):
            old = before[name]
            if id(old) not in placed:
                placed[id(old)] = (made if old.is_meta else old).to(self._world.device)
            owner, _, last = name.rpartition(".")
            setattr(self._model.get_submodule(owner), last, placed[id(old)])

    @torch.no_grad()
    def _send(self, source: Tensors, names: Iterable[str]) -> None:
        """Fills tensors one by one from the main process's, or from a source. Collective."""
        sharding, targets = DTensorSharding(), _named(self._model)
        for name in names:
            target = targets[name]
            whole = self._received(target, source.get(name, target))
            for box, data in elementwise_entry(target, sharding).pieces:
                data.copy_(whole[box.slices])
            del whole  # before the next one comes

    def _received(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """The source of the main process, whole, of the dtype of the target."""
        if self._world.size == 1:
            return source
        whole = torch.empty(target.shape, dtype=target.dtype, device=self._world.device)
        if self._world.is_main:
            whole.copy_(source)
        if whole.numel():
            # As bytes, for not every backend has every dtype.
            dist.broadcast(whole.view(-1).view(torch.uint8), group=self._world.channel().group, group_src=0)
        return whole


@contextmanager
def _without_data() -> Iterator[None]:
    """Moves parameters with dims to meta as this thread puts them into modules; ties stay."""
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    thread = get_ident()

    def emptied(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
        if not (plain and parameter.dim()) or parameter.is_meta or get_ident() != thread:
            return None
        known, empty = made.get(id(parameter), (None, parameter))
        if known is None or known() is not parameter:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            vars(empty).update(vars(parameter))
            made[id(parameter)] = weakref.ref(parameter), empty
        return empty

    hook: Any = emptied  # torch declares that it returns nothing, and documents what it may return
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _followed(own: Mapping[str, Any], begun: Mapping[str, Any], ended: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's random states: where they are as on the main process at first, as there at last."""
    followed = {name: ended[name] for name in own if name in begun and _same(own[name], begun[name])}
    return {**own, **followed}


def _same(one: Any, other: Any) -> bool:
    """Whether two states of a random stream are equal: tensors, arrays and numbers, nested."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)

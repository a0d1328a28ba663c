"""The order in which a model is made ready to be trained in parts: `prepare`.

Each step stands where it has to. Weights of rank 0 are taken before anything is cut. Plans of
tensor parallelism cut whole parameters, so they come before `fully_shard`, which cuts what they
left. Units are sharded from the inside out. Optimizers follow when parameters are final; classes
are dressed last, because `fully_shard` changes them too; and what is compiled is the result of it
all.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accel_core import place_model
from accel_core.api.component import override_class
from accel_core.api.strategy import (
    ParameterReplacement,
    cast_parameters,
    check_alike,
    compile_calls,
    is_fused,
    mark_forward_method,
    override_calls,
)
from accel_fsdp.activation_checkpointing import checkpoint_units
from accel_fsdp.engine_internals import (
    gather_apart,
    gather_as_stored,
    gathered_parameters,
    keep_in_parts,
)
from accel_fsdp.export import save_whole
from accel_fsdp.gathering import Gathering, is_lookup
from accel_fsdp.gradient_sync import ShardedModel, Synchronisation, attach, synchronisation_of
from accel_fsdp.meta_init import is_meta
from accel_fsdp.optimizers import carry, carrying
from accel_fsdp.output_views import return_no_views
from accel_fsdp.sharding import is_sharded
from accel_fsdp.tensor_parallel import apply_plan
from accel_fsdp.torch_versions import expect_unfreezing, reduce_unused
from accel_fsdp.unsharded_parameters import WholeParameters
from accel_fsdp.validation import TRAVELS, check, check_dtypes, check_hooks, check_lookups
from accel_fsdp.wrapping import check_ignored, check_wrap, describe_units, find_units, ignored_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import PrecisionPolicy, PrepareRequest, World
    from accel_fsdp.mesh import Meshes
    from accel_fsdp.meta_init import Recipes
    from accel_fsdp.tensor_parallel import Plan
    from accel_fsdp.wrapping import Ignored, Unit, Wrap


@dataclass(frozen=True)
class Options:
    """The options of sharding: the arguments of `FSDP` without the arrangement of processes."""

    reshard_after_forward: bool | int
    wrap: Wrap
    parallelize_plan: Plan | None
    cpu_offload: bool
    activation_checkpointing: bool
    ignored_modules: Ignored
    gather_dtype: torch.dtype | None
    reduce_unused_parameters: bool

    def __post_init__(self) -> None:
        check_wrap(self.wrap)
        check_ignored(self.ignored_modules)
        for name in ("cpu_offload", "activation_checkpointing", "reduce_unused_parameters"):
            value: object = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"FSDP({name}={value!r}) is a {type(value).__name__}: expected True or False.")
        number: object = self.reshard_after_forward
        if not isinstance(number, int) or (not isinstance(number, bool) and number < 2):
            raise ValueError(
                f"FSDP(reshard_after_forward={number!r}): expected True or False, or the number of ranks, at least 2, on which parameters "
                f"are kept in parts between forward and backward."
            )
        dtype: object = self.gather_dtype
        if dtype is not None and dtype not in TRAVELS:
            raise ValueError(
                f"FSDP(gather_dtype={dtype!r}): expected one of {', '.join(map(str, TRAVELS))}, or None to leave it to the "
                f"precision."
            )

    def check_shards(self, shards: int) -> None:
        """Raises if parameters cannot be kept on as many of the sharding ranks as asked for."""
        number = self.reshard_after_forward
        if not isinstance(number, bool) and shards % number:
            raise ValueError(
                f"FSDP(reshard_after_forward={number}) was asked for, but {shards} ranks hold the shards, and {shards} % {number} is "
                f"{shards % number}. Give a divisor of {shards}, or True."
            )

    def describe(self) -> dict[str, str]:
        """The options that differ from the defaults, in words."""
        kept = "" if self.reshard_after_forward else "until the backward"
        if not isinstance(self.reshard_after_forward, bool):
            kept = f"in parts on {self.reshard_after_forward} ranks, until the backward"
        found = {
            "kept gathered": kept,
            "offload": "parts are in the memory of the host" if self.cpu_offload else "",
            "unused parameters": "" if self.reduce_unused_parameters else "left out of what travels",
            "activations": "computed again in the backward" if self.activation_checkpointing else "",
        }
        return {name: words for name, words in found.items() if words}


@dataclass(frozen=True)
class Place:
    """The processes over which a model is sharded, and the recipes that fill it.

    Args:
        world: the processes.
        meshes: their arrangement.
        recipes: how models without data are filled.
    """

    world: World
    meshes: Meshes
    recipes: Recipes


@dataclass(frozen=True)
class Sharded:
    """The record of a sharded model.

    Args:
        units: in words.
        gathered: in which dtypes, in words; nothing if in their own.
        former: by name, the parameters that it had before, as long as somebody holds them.
        whole: those that were not cut, and whose gradients are averaged.
    """

    units: str
    gathered: str
    former: Mapping[str, weakref.ref[nn.Parameter]]
    whole: Sequence[weakref.ref[nn.Parameter]]


def prepare(
    model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest, options: Options, place: Place
) -> Sharded:
    """Shards a model in place, and all that goes with it. A collective.

    Args:
        model: of the user, trained, not sharded yet; or without data, from `build_model`.
        optimizers: those that hold one of its parameters.
        request: dtypes and compilation.
        options: how to cut.
        place: where to.

    Raises:
        ValueError: on every rank, before anything is cut, for what cannot be cut as it is asked
            for.
    """
    check_alike(model, place.world)
    empty = is_meta(model)
    ignored = ignored_parameters(model, options.ignored_modules)
    check(model, ignored)
    check_lookups(model)
    whole = ignored | {parameter for parameter in model.parameters() if not parameter.dim()}
    if not any(map(is_fused, optimizers)):  # which hang on hooks, and are refused by name
        check_hooks(model, whole)
    units = find_units(model, options.wrap, options.ignored_modules)
    replacement, move = ParameterReplacement(model, optimizers), carrying(model, optimizers, whole)
    # Not of those that stay: torch cannot give data to an empty parameter that somebody refers to weakly.
    former = {
        name: weakref.ref(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter not in whole
    }
    attributes = {name: vars(parameter) for name, parameter in model.named_parameters() if vars(parameter)}
    share_weights(model, place.world)
    cast_parameters(model, request.policy)
    cut_layers(model, options, place)
    check_dtypes(model, units, whole)
    if options.activation_checkpointing:
        checkpoint_units(units)
    units_in_words = describe_units(model, units, whole)
    gathering = Gathering(model, whole, request, options.gather_dtype)
    shard(model, units, whole, gathering, options, place)
    if empty:
        place.recipes.materialise(
            model, place.world, torch.device("cpu") if options.cpu_offload else place.world.device
        )
    replacement.apply(move)
    follow(model, whole, request.policy, options, place)
    keep_attributes(model, attributes)
    dress_and_compile(model, request)
    return Sharded(units_in_words, str(gathering), former, [weakref.ref(parameter) for parameter in whole])


def dress_and_compile(model: nn.Module, request: PrepareRequest) -> None:
    """Has calls of a model that is sharded go by a request; its parameters stay as they are."""
    override_calls(model, request.policy, request.device_type, request.autocast)
    if request.compile_options is not None:
        own = synchronisation_of(model)
        compile_calls(model, request.compile_options, () if own is None else own.units)


def prepare_whole(model: nn.Module, request: PrepareRequest, place: Place) -> None:
    """Places a model that is not trained, whole. Collective if it has no data yet."""
    if is_meta(model):
        place.recipes.materialise(model, place.world, place.world.device)
    place_model(model, replace(request, device=place.world.device))


def adopt(model: nn.Module, former: Mapping[str, weakref.ref[nn.Parameter]], optimizer: Optimizer) -> None:
    """Has an optimizer step the shards of parameters that it holds whole or gathered."""
    own = synchronisation_of(model)
    assert own is not None, "it was sharded here"
    names = {id(old): name for name, reference in former.items() if (old := reference()) is not None}
    names.update((id(gathered), name) for name, gathered in gathered_parameters(model, own.cuts).items())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names]
    if not held:
        return
    own.reshard()
    now = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        group["params"][:] = [now.get(names.get(id(each), ""), each) for each in group["params"]]
    for old in held:
        if optimizer.state.get(old):
            new = now[names[id(old)]]
            state = optimizer.state.pop(old)
            optimizer.state[new] = carry(old, new, state, optimizer, names[id(old)])


@torch.no_grad()
def share_weights(model: nn.Module, world: World) -> None:
    """Sends rank 0's parameters and buffers that have data to all, one by one. Collective."""
    if world.size == 1:
        return
    for tensor in (each for each in (*model.parameters(), *model.buffers()) if not each.is_meta):
        for part in _flattened(tensor.detach()):
            sent = part.to(world.device).contiguous()  # the same memory, if it is there already
            if sent.numel():
                # As bytes: gloo knows no narrow floats.
                dist.broadcast(sent.view(-1).view(torch.uint8), group_src=0, group=world.channel().group)
            if sent is not part:
                part.copy_(sent)


def cut_layers(model: nn.Module, options: Options, place: Place) -> None:
    """Cuts the layers that a plan of tensor parallelism names, if there is one."""
    if place.meshes.tensor is None:
        return
    assert options.parallelize_plan is not None, "they are checked together"
    if not is_meta(model):
        model.to(place.world.device)
    apply_plan(model, options.parallelize_plan, place.meshes.tensor)


def shard(
    model: nn.Module,
    units: Iterable[Unit],
    whole: Collection[nn.Parameter],
    gathering: Gathering,
    options: Options,
    place: Place,
) -> None:
    """Cuts the units, and then what is left, as the root."""
    from torch.distributed.fsdp import fully_shard

    reshard = options.reshard_after_forward
    settings: dict[str, Any] = {
        "mesh": place.meshes.fsdp,
        "ignored_params": set(whole),
        **offloading(options, place.world.device),
    }
    device = place.world.device
    moves = torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))
    for parameter in (each for each in whole if not each.is_meta):
        if moves:
            parameter.data = parameter.data.to(device)
        else:
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.data.to(device), parameter.requires_grad))
    partly = neighbours(reshard, place)
    for unit in (*units, model):
        return_no_views(unit)
        if not moves:
            bring(unit, device)
        # The root is needed first in the backward, so torch's own choice is to keep it gathered until then.
        again = None if reshard and unit is model else bool(reshard)
        fully_shard(unit, reshard_after_forward=again, mp_policy=gathering.policy(unit), **settings)
        expect_unfreezing(unit)
        gather_as_stored(unit, gathering.as_stored)
        if partly is not None and unit is not model:
            keep_in_parts(unit, partly)
        if is_lookup(unit) and not options.activation_checkpointing:
            # Its gradient needs the indices alone.
            unit.set_unshard_in_backward(False)  # type: ignore[union-attr, operator]
    gather_apart(model, place.world)
    reduce_unused(model, options.reduce_unused_parameters)


def bring(unit: Unit, device: torch.device) -> None:
    """Puts tensors on a device of which none can take the place of another's in a parameter.

    torch moves a unit's parameters by giving them the memory of others; devices that are made
    outside of torch may not offer that.
    """
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for member in unit if isinstance(unit, list) else [unit]:
        for module in member.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None or tensor.device == device or tensor.is_meta or is_sharded(tensor):
                        continue
                    if tensor not in moved:
                        data = tensor.detach().to(device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        moved[tensor] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
                    held[name] = moved[tensor]  # type: ignore[assignment]


def neighbours(number: bool | int, place: Place) -> DeviceMesh | None:
    """The mesh on whose second dim parameters stay between forward and backward; None: whole.

    torch makes one by itself, for every unit anew, with process groups that have neither the
    world's timeout nor an end.
    """
    shards = place.meshes.fsdp.size(-1)
    if isinstance(number, bool) or number == shards:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    world, ranks = place.world, place.meshes.fsdp.mesh.view(-1, number)
    lines = [[(line, world.subgroup(line)) for line in lines.tolist()] for lines in (ranks.T, ranks)]
    mine = [next(group for line, group in each if world.rank in line) for each in lines]
    return DeviceMesh.from_group(mine, world.device.type, mesh=ranks, mesh_dim_names=("kept", "part"))


def follow(
    model: nn.Module, whole: Collection[nn.Parameter], policy: PrecisionPolicy, options: Options, place: Place
) -> None:
    """Has calls of the model decide when gradients are reduced, replicated ones too."""
    # In one order on all ranks, which a set has not.
    averaged = WholeParameters([each for each in model.parameters() if each in whole], place.meshes.fsdp, policy.reduce)
    attach(model, Synchronisation(model, bool(options.reshard_after_forward), averaged))
    user = next(kind for kind in type(model).__mro__[2:] if kind.__name__ != "FSDPModule")
    override_class(model, ShardedModel)
    # torch calls its class "FSDP" and the user's name; ours passes for the user's class, as every dress does.
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(type(model), attribute, getattr(user, attribute))
    save_whole(model)
    if inspect.ismethod(getattr(model, "generate", None)):
        mark_forward_method(
            model, model, "generate"
        )  # it may call an encoder before the model, which needs what the root gathers


def keep_attributes(model: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Copies the user's attributes of parameters (`p.no_decay = True`) to their successors."""
    named = dict(model.named_parameters())
    for name, noted in attributes.items():
        vars(named[name]).update({key: value for key, value in noted.items() if key not in vars(named[name])})


def offloading(options: Options, device: torch.device) -> Mapping[str, Any]:
    """The `offload_policy` of `fully_shard`, where parts are kept in the memory of the host."""
    if not options.cpu_offload:
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy

    return {"offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")}


def _flattened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of: itself, or what a wrapper of others holds."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _flattened(getattr(tensor, name))
    else:
        yield tensor

"""Optimizer state by parameter name: captured for a checkpoint, restored into any equal optimizer.

State is captured per parameter, and restored by assignment: `load_state_dict` casts moments to the
dtype of the parameter, and holds all twice. Layouts are declared (`known_optimizers`); tensors
without one are opaque, and load only if the parameter is cut in the same way. An optimizer with its
own or hooked `state_dict` is captured whole if that adds to `state` and `param_groups`. A
ZeroRedundancyOptimizer's state is that of the inner optimizer, on the owner of the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint.optimizers.known_optimizers import (
    OF_SCHEDULERS,
    OF_THIS_PROCESS,
    is_partitioned,
    kind_of,
    same_kind,
)
from accel_checkpoint.optimizers.parameter_state import Layouts, ParameterState, has_tensors
from accel_checkpoint.words import quoted
from accel_core import CheckpointError
from accel_core.api.checkpoint import OptimizerState, SavedEntry, SavedOptimizer
from accel_core.api.component import flatten
from accel_core.api.layouts import Opaque

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_checkpoint.optimizers.sharding import Sharding

SHARED = "(shared)"  # the entry of what an optimizer keeps in `state` under keys that are no parameters


def capture_optimizer(optimizer: Optimizer, names: Mapping[int, str], sharding: Sharding) -> OptimizerState:
    """The state that this rank has. Not a collective.

    A parameter that was never stepped has no state, and is in no entry. `names` has the name of
    each parameter by `id`; others are "loose.<group>.<position>". CheckpointError is raised if
    state is not laid out as declared, or cannot be assigned to parameters.
    """
    engine = _engine(optimizer)
    named = _named(optimizer, names)
    if _is_whole(optimizer, engine):
        _check_whole(optimizer, engine, named, sharding)
        groups = [{"names": group} for group in _names_of(optimizer, named)]
        return OptimizerState(kind_of(engine), groups, whole=optimizer.state_dict())
    captured = OptimizerState(kind_of(engine), _groups(optimizer, named))
    layouts = Layouts(engine, sharding)
    for _, parameter in _owned(engine):
        state = engine.state.get(parameter)
        if state:
            _capture_parameter(captured, layouts.of(named[id(parameter)], parameter), state)
    shared = _shared(engine)
    if shared:
        captured.entries[SHARED] = Opaque({"state": shared, "laid_out": []}, _SHARED_SIGNATURE)
    return captured


def list_misfits(
    optimizer: Optimizer,
    names: Mapping[int, str],
    sharding: Sharding,
    saved: SavedOptimizer,
    elsewhere: Collection[str] = (),
) -> list[str]:
    """The reasons why `restore_optimizer` would lose state, a line each. Changes nothing.

    `elsewhere` has the names of parameters that optimizers on other ranks step, as stages do.
    """
    engine = _engine(optimizer)
    named = _named(optimizer, names)
    if not same_kind(kind_of(engine), saved.kind):
        return [f"the optimizer is a {kind_of(engine)}, and the checkpoint holds the state of a {saved.kind}"]
    if saved.whole is not None:
        return list(_misfits_whole(optimizer, engine, named, saved))
    if _is_whole(optimizer, engine):
        return [f"this {type(engine).__name__} has a state_dict() of its own, and the checkpoint has none such"]
    found = list(_misfits_groups(optimizer, named, saved, set(elsewhere)))
    here = capture_optimizer(optimizer, names, sharding).entries
    stored, layouts = _by_parameter(saved.described(), named), Layouts(engine, sharding)
    for _, parameter in _owned(engine):
        kept = layouts.of(named[id(parameter)], parameter)
        for key, (name, entry) in stored.get(kept.name, {}).items():
            reason = kept.refuses(key, entry, here.get(name))
            if reason:
                found.append(f"the state {name!r} {reason}")
    return found


def restore_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], sharding: Sharding, saved: SavedOptimizer
) -> None:
    """Restores the saved state of an optimizer, where `list_misfits` finds none. Not a collective.

    Parameters saved without state have none afterwards. Of the groups, the process's own options
    (`foreach`, `fused`, `capturable`, `differentiable`) stay. Tensors are made one by one.
    """
    engine = _engine(optimizer)
    if saved.whole is not None:
        optimizer.load_state_dict(saved.whole)
        return
    named = _named(optimizer, names)
    described, layouts = saved.described(), Layouts(engine, sharding)
    stored = _by_parameter(described, named)
    for group, parameter in _owned(engine):
        kept = layouts.of(named[id(parameter)], parameter)
        engine.state.pop(parameter, None)  # before its successor needs memory
        state = dict(saved.values.get(kept.name, {}))
        for key, (name, entry) in stored.get(kept.name, {}).items():
            state.update(kept.read(key, entry, group, partial(saved.read, name)))
        if state:
            engine.state[parameter] = state
    _restore_shared(engine, saved, SHARED in described)
    restore_groups(optimizer, saved.groups)
    if engine is not optimizer:
        restore_groups(engine, saved.groups)


def _engine(optimizer: Optimizer) -> Any:
    """The optimizer whose `state` is that of this rank."""
    if not is_partitioned(optimizer):
        return optimizer
    engine = getattr(optimizer, "optim", None)
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise CheckpointError(
            "A ZeroRedundancyOptimizer keeps its state out of reach with overlap_with_ddp=True. Make it with overlap_with_ddp=False."
        )
    return engine


def _named(optimizer: Any, names: Mapping[int, str]) -> dict[int, str]:
    return {
        id(parameter): names.get(id(parameter), f"loose.{number}.{position}")
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }


def _owned(engine: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    return ((group, parameter) for group in engine.param_groups for parameter in group["params"])


def _names_of(optimizer: Any, named: Mapping[int, str]) -> list[list[str]]:
    return [[named[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _groups(optimizer: Any, named: Mapping[int, str]) -> list[dict[str, Any]]:
    names = _names_of(optimizer, named)
    return [{**_options(group), "names": own} for group, own in zip(optimizer.param_groups, names, strict=True)]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    # torch's own "param_names" go with the order of "params" in this process.
    return {key: value for key, value in group.items() if key not in {"params", "param_names"}}


def _capture_parameter(captured: OptimizerState, kept: ParameterState, state: Mapping[Any, Any]) -> None:
    if kept.is_opaque(state):
        captured.entries[kept.name] = kept.opaque(state)
        return
    for key, value in state.items():
        if has_tensors(value):
            captured.entries[f"{kept.name}/{key}"] = kept.entry(key, value)
        else:
            captured.values.setdefault(kept.name, {})[key] = value


def _by_parameter(
    described: Mapping[str, SavedEntry], named: Mapping[int, str]
) -> dict[str, dict[str | None, tuple[str, SavedEntry]]]:
    """The entries of each parameter, by the key of its state (None: all), with their names."""
    parameters, stored = set(named.values()), dict[str, dict[str | None, tuple[str, SavedEntry]]]()
    for name, entry in described.items():
        parameter, _, key = name.rpartition("/")
        if name in parameters:
            stored.setdefault(name, {})[None] = (name, entry)
        else:
            stored.setdefault(parameter, {})[key] = (name, entry)
    return stored


_SHARED_SIGNATURE = "state of no parameter"


def _shared(engine: Any) -> dict[Any, Any]:
    # State of a tensor that is in no group is dead: no step looks at it.
    return {key: value for key, value in engine.state.items() if not isinstance(key, torch.Tensor)}


def _restore_shared(engine: Any, saved: SavedOptimizer, has_any: bool) -> None:
    for key in _shared(engine):
        del engine.state[key]
    if has_any:
        engine.state.update(saved.read(SHARED, Opaque(None, _SHARED_SIGNATURE))["state"])


def restore_groups(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Restores the saved hyper-parameters of the groups, but for those of this process."""
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            if key != "names" and key not in OF_THIS_PROCESS:
                group[key] = _as_here(group.get(key), value)


def _as_here(here: Any, saved: Any) -> Any:
    """A hyper-parameter as a tensor if it is one here, for what is compiled or captured with it."""
    if isinstance(here, torch.Tensor):
        return torch.as_tensor(saved).to(here.device, here.dtype, copy=True)
    if isinstance(saved, torch.Tensor) and isinstance(here, (int, float)):
        return saved.item()
    if isinstance(saved, tuple) and isinstance(here, tuple) and len(here) == len(saved):
        return tuple(map(_as_here, here, saved))
    return saved


def _misfits_groups(
    optimizer: Any, named: Mapping[int, str], saved: SavedOptimizer, elsewhere: Collection[str]
) -> Iterator[str]:
    groups = optimizer.param_groups
    if len(groups) != len(saved.groups):
        yield f"the optimizer has {len(groups)} groups of parameters, and the checkpoint {len(saved.groups)}"
        return
    for number, (group, options, names) in enumerate(
        zip(groups, saved.groups, _names_of(optimizer, named), strict=True)
    ):
        ours, theirs = dict.fromkeys(names), dict.fromkeys(options.get("names", []))
        if lacking := [name for name in theirs if name not in ours and name not in elsewhere]:
            yield f"group {number} of the checkpoint has {quoted(lacking)}, which this optimizer has not there"
        if extra := [name for name in ours if name not in theirs]:
            yield f"group {number} of this optimizer has {quoted(extra)}, which the checkpoint has not there"
        unknown = [key for key in options if key not in group and key != "names" and key not in OF_SCHEDULERS]
        if unknown:
            yield f"group {number} of this optimizer has no option {quoted(unknown)}, which the checkpoint sets"
        for key, value in options.items():
            if key not in OF_THIS_PROCESS and _is_number(group.get(key)) and not _is_number(value):
                yield f"group {number} of this optimizer has a number as {key!r}, and the checkpoint {value!r:.80}"


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))


def _is_whole(optimizer: Any, engine: Any) -> bool:
    """Whether its state is what its `state_dict()` says, and nothing less."""
    if any(map(_has_hooks, (optimizer, engine))):
        return True
    return _overrides(engine) and not _adds_nothing(engine)


def _has_hooks(optimizer: Any) -> bool:
    names = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return any(getattr(optimizer, f"_optimizer_{name}_hooks", None) for name in names)


def _overrides(optimizer: Any) -> bool:
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or "state_dict" in vars(optimizer)


def _adds_nothing(optimizer: Any) -> bool:
    """Whether an own `state_dict()` holds the same tensors and values as torch's, in any order."""
    given = optimizer.state_dict()
    if set(given) != {"state", "param_groups"}:
        return False
    theirs = (given["state"], [_options(group) for group in given["param_groups"]])
    ours = (dict(optimizer.state), [_options(group) for group in optimizer.param_groups])
    return _counted(theirs) == _counted(ours)


def _counted(tree: Any) -> Counter[Any]:
    """The values in a nested structure: tensors by identity, others by what they print."""
    leaves = flatten(tree)[0]
    return Counter(id(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf)) for leaf in leaves)


def _check_whole(optimizer: Any, engine: Any, named: Mapping[int, str], sharding: Sharding) -> None:
    layouts = Layouts(engine, sharding)
    cut = [named[id(parameter)] for _, parameter in _owned(engine) if layouts.of("", parameter).is_cut]
    if not cut and engine is optimizer:
        return
    of = f"of {quoted(cut)}" if cut else "under ZeroRedundancyOptimizer"
    raise CheckpointError(
        f"The state of {type(engine).__name__} is what its own state_dict() and the hooks on it say, which has to be all of it, but {of} "
        f"it has a part on each rank. Use an optimizer that keeps everything in its state and param_groups, or a strategy that does not cut."
    )


def _misfits_whole(optimizer: Any, engine: Any, named: Mapping[int, str], saved: SavedOptimizer) -> Iterator[str]:
    if not (_overrides(engine) or any(map(_has_hooks, (optimizer, engine)))):
        yield f"the checkpoint has the state_dict() of a {saved.kind} with hooks on it, and here it has none"
    here, theirs = _names_of(optimizer, named), [group.get("names", []) for group in saved.groups]
    if here != theirs:  # such a state_dict goes by the positions of parameters
        yield f"the optimizer has the parameters {here!r:.300}, in this order, and the checkpoint {theirs!r:.300}"

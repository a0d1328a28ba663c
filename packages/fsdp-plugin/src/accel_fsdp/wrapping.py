"""The units of a model: modules that `fully_shard` gathers, computes with and frees together.

The whole model is always the outermost unit, which holds what is in no other. A parameter belongs
to one unit, also where several modules share it:

- A module that occurs in several units is a unit of its own.
- Units that share a parameter are gathered together. If its other owner is no unit (a head beside
  an embedding that is one), that module joins.
- A unit inside another one that shares a parameter with the outside becomes part of the outer one;
  so does, of the whole model, a unit that shares one with the model itself.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import nn

from accel_core.api.component import listed

Unit: TypeAlias = nn.Module | list[nn.Module]
Chooser: TypeAlias = Callable[[nn.Module, str], bool]
Wrap: TypeAlias = Literal["none"] | str | Sequence[str] | int | Chooser | None
Ignored: TypeAlias = Sequence[nn.Module | str] | Chooser | None

NONE = "none"
_SHOWN = 8  # candidates in a message: models have hundreds of modules


def check_wrap(wrap: object) -> None:
    """Raises `TypeError` or `ValueError` for what cannot name the units of a model."""
    if isinstance(wrap, int) and not isinstance(wrap, bool):
        chooses = wrap > 0
    elif isinstance(wrap, (str, list, tuple, set, frozenset)) and all(isinstance(name, str) for name in wrap):
        chooses = bool(_listed(wrap))
    elif wrap is None or (callable(wrap) and not isinstance(wrap, type)):
        chooses = True
    else:
        raise TypeError(
            f"FSDP(wrap={wrap!r}) is a {type(wrap).__name__}: give None for the repeated blocks of the model, names of classes, "
            f"the least number of parameters of a unit, a function (module, name) -> bool, or 'none'."
        )
    if not chooses:
        raise ValueError(
            f"FSDP(wrap={wrap!r}) chooses nothing: give at least one name of a class, or a number of parameters of at least 1; "
            f"wrap='none' shards the model as one unit."
        )


def check_ignored(ignored: object) -> None:
    """Raises `TypeError` for what cannot say which modules are left alone, of whatever model."""
    listed = isinstance(ignored, (list, tuple)) and all(isinstance(each, (nn.Module, str)) for each in ignored)
    if not (ignored is None or listed or (callable(ignored) and not isinstance(ignored, (nn.Module, type)))):
        raise TypeError(
            f"FSDP(ignored_modules={ignored!r}) is a {type(ignored).__name__}: give a list of modules and of patterns of their "
            f"names, such as ['head', 'adapters.*'], or a function (module, name) -> bool."
        )


def find_units(model: nn.Module, wrap: Wrap = None, ignored: Ignored = None) -> list[Unit]:
    """The units inside a model, inner ones first, as `fully_shard` takes them; not the model.

    Only modules with parameters that are not ignored are units; lists and dicts of modules, which
    have no forward, never are.

    Args:
        model: as the user wrote it; converted already, if its precision converts.
        wrap: None takes repeated blocks: in every outermost `nn.ModuleList` or `nn.Sequential`,
            members whose class occurs there more than once. A name or several (also separated by
            commas) take every module of these classes and their subclasses. A number takes modules
            with at least as many parameters that are in no unit yet, from the inside out. A
            function is asked with each module and its name. "none" takes nothing.
        ignored: see `ignored_parameters`.

    Returns:
        Modules; or lists of those that share parameters, which are gathered together.

    Raises:
        TypeError, ValueError: if `wrap` or `ignored` is of a wrong kind, a class or pattern matches
            nothing, or what was chosen has no forward.
    """
    check_wrap(wrap)
    tree = _Tree(model, ignored_parameters(model, ignored))
    if wrap is None:
        chosen = _repeated(model)
    elif wrap == NONE:
        chosen = []
    elif isinstance(wrap, int):
        chosen = _of_size(tree, wrap)
    elif callable(wrap):
        chosen = _runnable([module for module, name in tree.named() if wrap(module, name)], tree)
    else:
        chosen = _runnable(_of_classes(tree, _listed(wrap)), tree)
    return _Division(tree, {module for module in chosen if tree.has_parameters(module)}).ordered()


def ignored_parameters(model: nn.Module, ignored: Ignored = None) -> set[nn.Parameter]:
    """The parameters of ignored modules: whole on every rank, their gradients not reduced.

    Args:
        model: the model.
        ignored: modules of the model, and patterns of names as in `fnmatch` ("adapters.*",
            "*.norm"); or a function that is asked with each module and its name. What lies inside
            an ignored module is ignored too.

    Raises:
        TypeError: if it is of another kind.
        ValueError: if a module is none of the model's, or a pattern matches no name.
    """
    check_ignored(ignored)
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if module is not model}
    found: list[nn.Module] = []
    if callable(ignored):
        found = [module for name, module in named.items() if ignored(module, name)]
    else:
        for each in ignored or ():
            matches = [module for name, module in named.items() if _is_meant(each, module, name)]
            if not matches:
                raise _not_a_module(each, model, named)
            found += matches
    return {parameter for module in found for parameter in module.parameters()}


def describe_units(model: nn.Module, units: Sequence[Unit], ignored: Collection[nn.Parameter] = ()) -> str:
    """The units in words: "6 × Block, 1 × Embedding with Linear; 2 of 40 parameters …".

    Args:
        model: the model, before it is sharded: that gives its modules other classes.
        units: as from `find_units`.
        ignored: as from `ignored_parameters`; they are not counted.
    """
    everything = set(model.parameters()).difference(ignored)
    inside = {parameter for unit in units for module in _modules(unit) for parameter in module.parameters()}
    kinds = Counter(" with ".join(type(module).__name__ for module in _modules(unit)) for unit in units)
    listing = ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "none inside"
    return f"{listing}; {len(everything - inside)} of {len(everything)} parameters are gathered with the whole model"


class _Tree:
    """The modules of a model, each once, inner ones first; and who holds whom."""

    def __init__(self, model: nn.Module, ignored: set[nn.Parameter]) -> None:
        self.model = model
        self.ignored = ignored
        self.names = {module: name for name, module in model.named_modules()}
        self.parents: dict[nn.Module, list[nn.Module]] = {module: [] for module in self.names}
        for module in self.names:
            for child in module.children():
                self.parents[child].append(module)
        self.order: list[nn.Module] = []
        self._visit(model, set())
        self.owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in self.order:
            for parameter in set(module.parameters(recurse=False)) - ignored:
                self.owners.setdefault(parameter, []).append(module)

    def _visit(self, module: nn.Module, seen: set[nn.Module]) -> None:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                self._visit(child, seen)
        self.order.append(module)

    def named(self) -> Iterable[tuple[nn.Module, str]]:
        """Every module but the model, with its first name."""
        return [(module, self.names[module]) for module in self.order if module is not self.model]

    def has_parameters(self, module: nn.Module) -> bool:
        return any(parameter not in self.ignored for parameter in module.parameters())

    def can_be_unit(self, module: nn.Module) -> bool:
        return module is not self.model and has_forward(module) and self.has_parameters(module)


class _Division:
    """Divides the parameters of a model among units, so that each belongs to one."""

    def __init__(self, tree: _Tree, units: set[nn.Module]) -> None:
        self.tree = tree
        self.units = units
        self._given_up: set[nn.Module] = set()
        # For each module, the units that its own parameters are in: more than one if it occurs in several.
        self._innermost = self._locate(separate=True)
        # It ends: each time, a unit has been given up for good, or one has joined.
        while any(self._settle(owners) for owners in tree.owners.values()):
            self._innermost = self._locate()

    def ordered(self) -> list[Unit]:
        """Inner units first; a group stands where its last member does, behind what is inside."""
        place = {module: index for index, module in enumerate(self.tree.order)}
        groups: list[set[nn.Module]] = [{unit} for unit in self.units]
        for owners in self.tree.owners.values():
            sharing = self._sharing(owners)
            joined = [group for group in groups if len(sharing) > 1 and group & sharing]
            if joined:
                groups = [group for group in groups if group not in joined] + [_union(joined)]
        members = [sorted(group, key=place.__getitem__) for group in groups]
        return [each if len(each) > 1 else each[0] for each in sorted(members, key=lambda each: place[each[-1]])]

    def _locate(self, *, separate: bool = False) -> dict[nn.Module, set[nn.Module]]:
        """Finds the innermost units, outside in. `separate`: what occurs in several is a unit."""
        found: dict[nn.Module, set[nn.Module]] = {}
        for module in reversed(self.tree.order):
            around = _union(found[parent] for parent in self.tree.parents[module])
            if separate and len(around) > 1 and self.tree.can_be_unit(module):
                self.units.add(module)
            found[module] = {module} if module in self.units or module is self.tree.model else around
        return found

    def _sharing(self, owners: Iterable[nn.Module]) -> set[nn.Module]:
        return _union(self._innermost[owner] for owner in owners)

    def _settle(self, owners: list[nn.Module]) -> bool:
        """Whether the units of a parameter's owners had to change, so that it is in one."""
        sharing, model = self._sharing(owners), self.tree.model
        if len(sharing) == 1:
            return False
        nested = {unit for unit in sharing - {model} if self._sharing(self.tree.parents[unit]) - {model}}
        outside = [owner for owner in owners if model in self._innermost[owner]]
        if nested:
            self._give_up(nested)
        elif all(map(self._may_join, outside)):
            self.units.update(outside)
        else:
            self._give_up(sharing - {model})
        return bool(nested or outside)

    def _give_up(self, units: set[nn.Module]) -> None:
        self.units -= units
        self._given_up |= units

    def _may_join(self, owner: nn.Module) -> bool:
        free = owner not in self._given_up and self.units.isdisjoint(owner.modules())
        return free and self.tree.can_be_unit(owner)


def _union(sets: Iterable[set[nn.Module]]) -> set[nn.Module]:
    return set[nn.Module]().union(*sets)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; `fully_shard` refuses lists and dicts of modules."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is not nn.Module.forward


def _modules(unit: Unit) -> list[nn.Module]:
    return unit if isinstance(unit, list) else [unit]


def _listed(names: str | Collection[str]) -> list[str]:
    listed = names.split(",") if isinstance(names, str) else names
    return [name.strip() for name in listed if name.strip()]


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Members of a list whose class occurs in it more than once; else those further inside."""
    kinds: Counter[type] = Counter()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds.update(type(member) for member in module if has_forward(member))
    found = []
    for child in module.children():
        found += [child] if kinds[type(child)] > 1 else _repeated(child)
    return found


def _of_size(tree: _Tree, least: int) -> list[nn.Module]:
    found, taken = [], set(tree.ignored)
    for module, _ in tree.named():
        free = set(module.parameters()) - taken
        if has_forward(module) and sum(parameter.numel() for parameter in free) >= least:
            found.append(module)
            taken |= free
    return found


def _of_classes(tree: _Tree, names: Sequence[str]) -> list[nn.Module]:
    """The modules of the named classes, and of their subclasses, which a precision may make."""
    for name in names:
        if not any(name in _class_names(module) for module in tree.order):
            kinds = {type(module).__name__ for module, _ in tree.named() if tree.can_be_unit(module)}
            raise ValueError(
                f"FSDP(wrap=...) names the class {name!r}, of which {type(tree.model).__name__} has no module. It has modules of "
                f"{_nearest_first(name, kinds)}. Type one of these, or wrap=None for the repeated blocks; for several models "
                f"with different classes, give a function (module, name) -> bool."
            )
    return [module for module, _ in tree.named() if not _class_names(module).isdisjoint(names)]


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module}


def _runnable(chosen: list[nn.Module], tree: _Tree) -> list[nn.Module]:
    for module in chosen:
        if not has_forward(module):
            raise ValueError(
                f"FSDP(wrap=...) chooses {tree.names[module]!r}, a {type(module).__name__}, which has no forward before which its "
                f"parameters could be gathered. Choose its members, of {_nearest_first('', _kinds(module))}."
            )
    return chosen


def _kinds(module: nn.Module) -> set[str]:
    return {type(child).__name__ for child in module.children()}


def _is_meant(each: nn.Module | str, module: nn.Module, name: str) -> bool:
    return fnmatchcase(name, each) if isinstance(each, str) else module is each


def _not_a_module(each: nn.Module | str, model: nn.Module, named: dict[str, nn.Module]) -> ValueError:
    kind = type(model).__name__
    advice = "for several models with different modules, give a function (module, name) -> bool."
    if isinstance(each, str):
        return ValueError(
            f"FSDP(ignored_modules=...) has the pattern {each!r}, which matches no module of {kind}. It has "
            f"{_nearest_first(each, named)}. Write a pattern that matches; {advice}"
        )
    return ValueError(
        f"FSDP(ignored_modules=...) has a {type(each).__name__} that is no module of {kind}, or is none any more since a "
        f"precision has converted it. Give its name, a text, instead; {advice}"
    )


def _nearest_first(asked: str, names: Iterable[str]) -> str:
    """The names, the most similar one first; not all of them if there are many."""
    ranked = sorted(names, key=lambda name: (-difflib.SequenceMatcher(None, asked.lower(), name.lower()).ratio(), name))
    return listed([*map(repr, ranked)], most=_SHOWN) or "none"

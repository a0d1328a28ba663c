"""Activation: each hook's owner and listeners. An override of another's hook is refused.

pluggy only marks hooks (docs/decisions/0004-pluggy-marks-and-does-not-dispatch.md): an owner
hook holds its owner's bound method, called with positional arguments in the spec's order.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import pluggy

from accel_core.base.errors import PluginError
from accel_core.base.suggestions import nearest
from accel_core.contract.hook_specs import PROJECT, HookSpecs, Kind
from accel_core.plugins.offers import Selected

if TYPE_CHECKING:
    _Signatures = HookSpecs  # each slot holds a callable with the signature of its spec
else:
    _Signatures = object

HOOKS = tuple(name for name, function in vars(HookSpecs).items() if hasattr(function, "accel_kind"))
"""The names of all hooks, in the order of `HookSpecs`."""

MARK = "Mark a hook with @accel_core.hookimpl"

Methods = dict[str, Callable[..., Any]]


class Relay(_Signatures):
    """A callable per hook, with its spec's signature. Keeps the active components alive."""

    __slots__ = ("__weakref__", *HOOKS)

    def __reduce__(self) -> NoReturn:
        raise TypeError("A relay holds bound methods of components. Build an Accelerator with the same arguments.")


@dataclass(eq=False, slots=True)
class Listener:
    """A component as a listener. Its first exception is warned of, and it is called no more."""

    selected: Selected
    failure: str | None = None


@dataclass(eq=False, slots=True)
class Listeners:
    """All listeners of a hook, called in order of registration, also after one has failed."""

    hook: str
    calls: Sequence[tuple[Listener, Callable[..., object]]]

    def __call__(self, *arguments: object) -> None:
        """Calls listeners that have not failed. Passes `KeyboardInterrupt` and `SystemExit`."""
        for listener, call in self.calls:
            if listener.failure is None:
                try:
                    call(*arguments)
                except Exception as error:  # noqa: BLE001  (whatever an observer does wrong, training goes on)
                    what = f"{type(error).__name__}: {error}"
                    listener.failure = f"{self.hook}: {what}"
                    message = f"Hook {self.hook!r} of {listener.selected.describe()} raised {what}. The run goes on without its"
                    warnings.warn(f"{message} listeners. Repair it, or leave it out.", RuntimeWarning, stacklevel=2)


class Spec(NamedTuple):
    """One hook as declared: who may implement it, and its arguments in order."""

    kind: Kind
    arguments: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Activation:
    """Hooks bound for one Accelerator: owners by hook (None: the core), listeners in order."""

    relay: Relay
    owners: Mapping[str, Selected | None]
    listeners: Mapping[str, Sequence[Listener]]


def hook_specs() -> dict[str, Spec]:
    """Every hook by name, in the order of `HookSpecs`."""
    functions = [(name, vars(HookSpecs)[name]) for name in HOOKS]
    return {name: Spec(each.accel_kind, tuple(inspect.signature(each).parameters)[1:]) for name, each in functions}


def activate(components: Sequence[Selected], defaults: object) -> Activation:
    """Checks that components fit together, and binds hooks: without an owner, to `defaults`."""
    for one, other in itertools.combinations(components, 2):
        if one.component is other.component:
            what = f"One object was passed twice: as {one.describe()} and as {other.describe()}."
            raise PluginError(f"{what}\nPass it once: all its hooks are found, whatever its role.")
    specs, manager = hook_specs(), pluggy.PluginManager(PROJECT)
    implemented = [(Listener(selected), _hooks_of(manager, selected, specs)) for selected in components]
    fallback = _hooks_of(manager, Selected(defaults, "core defaults"), specs)
    relay = Relay()
    owners: dict[str, Selected | None] = {}
    listeners: dict[str, Sequence[Listener]] = {}
    for name, spec in specs.items():
        if spec.kind == "listener":
            calls = [(one, bind(methods[name], spec.arguments)) for one, methods in implemented if name in methods]
            setattr(relay, name, Listeners(name, calls))
            listeners[name] = tuple(listener for listener, _ in calls)
        else:
            owners[name], method = _owner_of(name, [(one.selected, found) for one, found in implemented], fallback)
            setattr(relay, name, bind(method, spec.arguments))
    return Activation(relay, owners, listeners)


def _hooks_of(manager: pluggy.PluginManager, selected: Selected, specs: Mapping[str, Spec]) -> Methods:
    """A component's hooks as bound methods, checked against specs. Properties are not run."""
    methods = {}
    for name in dir(selected.component):
        static = inspect.getattr_static(selected.component, name, None)
        if not isinstance(static, (FunctionType, MethodType, staticmethod, classmethod)):
            continue
        options = manager.parse_hookimpl_opts(selected.component, name)
        if options is not None:
            methods[name] = getattr(selected.component, name)
            _check_mark(selected, name, [option for option, value in options.items() if value], specs)
            _check_arguments(selected, name, specs[name].arguments, methods[name])
        elif name in specs:
            what = f"{_upper(selected)} has a method {name!r}, which is the name of a hook, without the marker:"
            raise PluginError(f"{what} it would never be called.\n{MARK}, or give the method another name.")
    if selected.group is None and not methods:
        what = f"{_upper(selected)} was passed as a plugin, but it implements no hook."
        raise PluginError(f"{what}\nHooks are: {', '.join(specs)}. {MARK}, or leave the object out.")
    return methods


def _check_mark(selected: Selected, name: str, options: Sequence[str], specs: Mapping[str, Spec]) -> None:
    """Refuses a marked method that no spec names, and options of the marker."""
    if name not in specs:
        meant = nearest(name, list(specs))
        hint = f"Hooks are: {', '.join(specs)}." if meant is None else f"Type {meant!r} if that was meant."
        what = f"marks {name!r} as a hook, but there is no such hook in the installed accel-core"
        raise PluginError(f"{_upper(selected)} {what}.\n{hint}")
    if options:
        asked = f"Hook {name!r} of {selected.describe()} is marked with {'=..., '.join(options)}=...,"
        raise PluginError(f"{asked} but hooks are bound as they are.\nWrite @accel_core.hookimpl without options.")


def _check_arguments(selected: Selected, hook: str, known: Sequence[str], method: Callable[..., Any]) -> None:
    """Refuses parameters not in the spec, also with a default: nothing would be passed."""
    parameters = inspect.signature(method).parameters.values()
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    unknown = [stars.get(one.kind, "") + one.name for one in parameters if one.name not in known or one.kind in stars]
    if unknown:
        raise PluginError(
            f"Hook {hook!r} of {selected.describe()} takes {', '.join(unknown)}, which the hook does not have.\n"
            f"Its arguments are: {', '.join(known) or 'none'}. Take those that are needed, by these names."
        )


def _owner_of(
    name: str, implemented: Sequence[tuple[Selected, Methods]], fallback: Methods
) -> tuple[Selected | None, Callable[..., Any]]:
    """The one component and method that implement an owner hook; else None and the default."""
    found = [(selected, methods[name]) for selected, methods in implemented if name in methods]
    if len(found) > 1:
        raise PluginError(
            f"Hook {name!r} has one owner, but {len(found)} active components implement it: "
            f"{' and '.join(selected.describe() for selected, _ in found)}.\n"
            f"Leave out {' or '.join(f'the {selected.noun} {selected.name!r}' for selected, _ in found)}."
        )
    if found:
        return found[0]
    if name in fallback:
        return None, fallback[name]
    raise PluginError(
        f"No strategy: hook {name!r} has no owner among the active components, and the core has no default for it. "
        f"Active: {', '.join(selected.describe() for selected, _ in implemented) or 'none'}.\n"
        f"Pass a strategy that implements it, for example Accelerator(strategy='single')."
    )


def _upper(selected: Selected) -> str:
    return f"The{selected.describe().removeprefix('the')}"


def bind(method: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
    """A callable of positional `arguments`, passing on those `method` takes; itself if all."""
    parameters = inspect.signature(method).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    if positional == list(arguments):
        return method
    taken = [*positional, *(f"{name}={name}" for name in parameters if name not in positional)]
    # Compiled from the spec's own argument names: 25 ns on top of the method, where picking from *arguments costs 120.
    source = f"lambda {', '.join(arguments)}: _method({', '.join(taken)})"
    return cast("Callable[..., Any]", eval(source, {"_method": method}))  # noqa: S307

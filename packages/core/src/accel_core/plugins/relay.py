"""The bound hooks: what the core calls where a hook runs.

The slot of an owner hook holds the bound method of its one owner, which costs what calling that
method costs. Hooks are called with positional arguments in the order of their spec.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from accel_core.contract.hook_specs import HookSpecs

if TYPE_CHECKING:
    from accel_core.plugins.selection import Selected

    _Signatures = HookSpecs  # each slot holds a callable with the signature of its spec
else:
    _Signatures = object

HOOKS = tuple(name for name, function in vars(HookSpecs).items() if hasattr(function, "accel_kind"))
"""The names of all hooks, in the order of `HookSpecs`."""


class Relay(_Signatures):
    """One callable per hook of `accel_core.contract.hook_specs.HookSpecs`, with the signature of its spec.

    Made by `activate`. It holds on to the active components; nothing of it refers back to it.
    """

    __slots__ = ("__weakref__", *HOOKS)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A relay was to be pickled or copied, but it holds bound methods of components that belong to this process "
            "and its process groups.\nBuild an Accelerator with the same arguments where it is needed."
        )


class Listener:
    """One component in the role of a listener. The first exception that it raises is warned of and is its last."""

    __slots__ = ("failure", "selected")

    def __init__(self, selected: Selected) -> None:
        self.selected = selected
        self.failure: str | None = None


class Listeners:
    """All listeners of one hook, called in the order of registration; a failing one does not silence the next."""

    __slots__ = ("_calls", "_hook")

    def __init__(self, hook: str, calls: Sequence[tuple[Listener, Callable[..., object]]]) -> None:
        self._hook = hook
        self._calls = tuple(calls)

    def __call__(self, *arguments: object) -> None:
        """Calls every listener that has not failed yet. `KeyboardInterrupt` and `SystemExit` pass through."""
        for listener, call in self._calls:
            if listener.failure is None:
                try:
                    call(*arguments)
                except Exception as error:  # noqa: BLE001  (whatever an observer does wrong, training goes on)
                    listener.failure = f"{self._hook}: {type(error).__name__}: {error}"
                    warnings.warn(
                        f"Hook {self._hook!r} of {listener.selected.describe()} raised {type(error).__name__}: {error}. The run "
                        f"goes on without its listeners. Repair it, or leave it out.",
                        RuntimeWarning,
                        stacklevel=2,
                    )


def bind(method: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
    """A callable of the spec's positional `arguments` that passes on those that `method` takes: `method` itself if it takes all."""
    parameters = inspect.signature(method).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    if positional == list(arguments):
        return method
    taken = [*positional, *(f"{name}={name}" for name in parameters if name not in positional)]
    # Compiled from the spec's own argument names: 25 ns on top of the method, where picking from *arguments costs 120.
    adapter: Callable[..., Any] = eval(  # noqa: S307
        f"lambda {', '.join(arguments)}: _method({', '.join(taken)})", {"_method": method}
    )
    return adapter

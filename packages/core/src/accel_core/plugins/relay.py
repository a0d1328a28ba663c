"""The bound hooks: what the core calls where a hook runs.

A relay has one slot per hook. The slot of an owner hook holds the bound method of its one owner, so
that calling it costs what calling that method costs; dispatching by name would cost several
microseconds per call and take `None` for "not handled". Hooks are called with positional arguments
in the order of their spec: `relay.backward(loss, weight, closes, options)`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from accel_core.contract.layout import Layout, Shard
    from accel_core.contract.loader_progress import Feed
    from accel_core.contract.optimizer_state import OptimizerState, SavedOptimizer
    from accel_core.contract.tensor_layouts import GradientState, State
    from accel_core.loop.preparation import PrepareRequest
    from accel_core.loop.run import Asynchronous, Run
    from accel_core.plugins.selection import Selected
    from accel_core.processes.world import World


class Relay:
    """One callable per hook of `accel_core.contract.hook_specs.HookSpecs`, with the signature of its spec.

    Made by `activate`. It holds on to the active components; nothing of it refers back to it.
    """

    __slots__ = (
        "__weakref__",
        "apply_step",
        "backward",
        "build_model",
        "check_gradients",
        "check_optimizer",
        "clip_gradients",
        "context_parallel",
        "convert_model",
        "finish",
        "forward_backward",
        "gradient_state",
        "layout",
        "load_checkpoint",
        "load_optimizer_state",
        "model_loaded",
        "model_state",
        "no_sync",
        "optimizer_misfits",
        "optimizer_state",
        "optimizer_step",
        "prepare_loader",
        "prepare_model",
        "release_model",
        "revert_model",
        "save_checkpoint",
        "scale_loss",
        "start",
        "synchronise_gradients",
        "trigger_sync_in_backward",
        "unscale_gradients",
        "wait_for_checkpoint",
    )

    start: Callable[[World, Layout, bool], None]
    finish: Callable[[], None]
    layout: Callable[[World], Layout]
    build_model: Callable[[Callable[[], nn.Module], Path | None], nn.Module]
    convert_model: Callable[[nn.Module, bool], None]
    revert_model: Callable[[nn.Module], None]
    release_model: Callable[[nn.Module, nn.Module], None]
    prepare_model: Callable[[nn.Module, Sequence[Optimizer], PrepareRequest], nn.Module]
    check_optimizer: Callable[[Optimizer], None]
    prepare_loader: Callable[
        [
            DataLoader[Any],
            Shard,
            Feed,
            torch.device | None,
            int,
            int,
            ProcessGroup | None,
            Callable[..., Any] | None,
        ],
        DataLoader[Any],
    ]
    no_sync: Callable[[nn.Module], AbstractContextManager[None]]
    trigger_sync_in_backward: Callable[[nn.Module], AbstractContextManager[None]]
    synchronise_gradients: Callable[[], None]
    check_gradients: Callable[[Optimizer], None]
    gradient_state: Callable[[nn.Module, nn.Module], GradientState]
    context_parallel: Callable[
        [Sequence[torch.Tensor], Sequence[int], Collection[torch.Tensor]], AbstractContextManager[None]
    ]
    scale_loss: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, float, bool, dict[str, Any]], None]
    unscale_gradients: Callable[[Optimizer], None]
    clip_gradients: Callable[[Sequence[nn.Parameter], float, float], torch.Tensor]
    optimizer_step: Callable[[Optimizer, Callable[[], Any]], Any]
    apply_step: Callable[[Optimizer, Callable[[], Any]], Any]
    forward_backward: Callable[
        [
            nn.Module,
            Iterable[Any],
            Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor | float]],
            Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]],
            Callable[[torch.Tensor], torch.Tensor],
        ],
        torch.Tensor,
    ]

    save_checkpoint: Callable[[Run, str | os.PathLike[str] | None, Asynchronous], str]
    load_checkpoint: Callable[[Run, str | os.PathLike[str] | None], None]
    wait_for_checkpoint: Callable[[Run], None]
    model_state: Callable[[nn.Module, nn.Module], State]
    model_loaded: Callable[[nn.Module, nn.Module], None]
    optimizer_state: Callable[[Optimizer, Mapping[int, str]], OptimizerState]
    optimizer_misfits: Callable[[Optimizer, Mapping[int, str], SavedOptimizer], list[str]]
    load_optimizer_state: Callable[[Optimizer, Mapping[int, str], SavedOptimizer], None]

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

    def switch_off(self, hook: str, error: Exception) -> None:
        """Remembers the failure and warns of it."""
        self.failure = f"{hook}: {type(error).__name__}: {error}"
        warnings.warn(
            f"Hook {hook!r} of {self.selected.describe()} raised {type(error).__name__}: {error}. The run goes on "
            f"without its listeners. Repair it, or leave it out.",
            RuntimeWarning,
            stacklevel=3,
        )


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
                    listener.switch_off(self._hook, error)


def bind(method: Callable[..., Any], arguments: Sequence[str]) -> Callable[..., Any]:
    """A callable that takes the spec's `arguments` positionally and passes on those that `method` takes.

    That is `method` itself if it takes them all in the same order. Its parameters are known to be
    among `arguments`.
    """
    parameters = inspect.signature(method).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    if positional == list(arguments):
        return method
    taken = [*positional, *(f"{name}={name}" for name in parameters if name not in positional)]
    # Compiled from the spec's own argument names: 25 ns on top of the method, where picking from *arguments costs 120.
    source = f"lambda {', '.join(arguments)}: _method({', '.join(taken)})"
    adapter: Callable[..., Any] = eval(source, {"_method": method})  # noqa: S307
    return adapter

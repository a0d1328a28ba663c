"""Hooks around a module's forward: what libraries attach, ask for and remove by name.

A hook sits at `module._hf_hook`, and the forward without it at `module._old_forward`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


class ModelHook:
    """A hook around the forward of a module. Subclass it, and override what is needed.

    Attributes:
        no_grad: whether the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called once, when the hook is attached. Returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:  # noqa: ARG002  (for subclasses)
        """Called before the forward. Returns the arguments that it is called with."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002  (for subclasses)
        """Called after the forward. Returns what the caller gets."""
        return output

    def begin(self, module: nn.Module) -> None:
        """Called before `pre_forward`. Raises if the forward cannot run now."""

    def end(self, module: nn.Module) -> None:
        """Called after `post_forward`, or an error: leaves nothing behind."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed. Returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each part of them in their order. `hooks` has none of this class: those have theirs."""

    def __init__(self, *hooks: ModelHook) -> None:
        nested = [each.hooks if type(each) is SequentialHook else (each,) for each in hooks]
        self.hooks: tuple[ModelHook, ...] = tuple(itertools.chain.from_iterable(nested))
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """See `ModelHook.init_hook`."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `ModelHook.pre_forward`."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def begin(self, module: nn.Module) -> None:
        """See `ModelHook.begin`."""
        for hook in self.hooks:
            hook.begin(module)

    def end(self, module: nn.Module) -> None:
        """See `ModelHook.end`."""
        for hook in self.hooks:
            hook.end(module)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """See `ModelHook.post_forward`."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """See `ModelHook.detach_hook`."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hooks_of(module: nn.Module) -> Sequence[Any]:
    """The hooks that a module has, in their order."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else getattr(hook, "hooks", (hook,))


def add_hook_to_module(module: M, hook: ModelHook, append: bool = False) -> M:
    """Has a hook act around each call of the module's forward, in place; returns the module.

    A hook that it has already is detached, or, with `append`, acts before the new one.
    """
    before = getattr(module, "_hf_hook", None)
    remove_hook_from_module(module)
    if append and before is not None:
        hook = SequentialHook(before, hook)
    vars(module)["_old_forward"] = module.forward
    module = hook.init_hook(module)  # type: ignore[assignment]
    vars(module)["_hf_hook"] = hook
    _replace_forward(module, _hooked(vars(module)["_old_forward"]))
    return module


def _hooked(old: Callable[..., Any]) -> Callable[..., Any]:
    """A forward with the name and signature of the old one, that asks the module's hook."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        hook = module._hf_hook
        hook.begin(module)
        try:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
            if hook.no_grad:
                with torch.no_grad():
                    output = module._old_forward(*args, **kwargs)
            else:
                output = module._old_forward(*args, **kwargs)
            return hook.post_forward(module, output)
        finally:
            hook.end(module)

    return functools.wraps(old)(forward)


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """On the instance; a graph module calls its class, which it has for itself."""
    if isinstance(module, torch.fx.GraphModule):
        type(module).forward = forward
    else:
        vars(module)["forward"] = functools.update_wrapper(functools.partial(forward, module), forward)


def remove_hook_from_module(module: M, recurse: bool = False) -> M:
    """Detaches a module's hook, with `recurse` its children's too, and restores the forward."""
    attributes: Any = vars(module)
    if (hook := attributes.pop("_hf_hook", None)) is not None:
        hook.detach_hook(module)
    if (old := attributes.pop("_old_forward", None)) is not None:
        if isinstance(module, torch.fx.GraphModule):
            type(module).forward = old.__func__
        elif getattr(old, "__func__", None) is getattr(type(module), "forward", None):
            attributes.pop("forward", None)  # it was the class's own: a copy of the module finds its own again
        else:
            attributes["forward"] = old
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Detaches the hooks of a module and of everything in it."""
    remove_hook_from_module(module, recurse=True)

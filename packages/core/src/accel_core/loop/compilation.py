"""Compilation of a model in place, whole or by block; names, checkpoints and identity stay."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from accel_core.base.class_override import ClassOverride, override_class, restore_class
from accel_core.base.suggestions import choices, nearest
from accel_core.options.handlers import REGIONAL, TorchDynamoPlugin
from accel_core.options.option_sources import OPTIONS
from accel_core.options.resolution import Option, as_text, refuse_beside, resolve

VARIABLE = "ACCELERATE_DYNAMO_BACKEND"
_BEFORE = "_accel_before"  # on a compiled call of ours: what stood in its place
_OWN = "_accel_own"  # on a gradient: it lies in memory of its own


def resolve_compilation(
    backend: object, plugin: object, outside: Callable[[], Mapping[str, Any]] = dict
) -> tuple[Option[Any], Mapping[str, Any] | None]:
    """The backend, and options for `compile_calls` (None: none); `outside` gives further fields."""
    if plugin is None:
        option: Option[Any] = resolve(backend, VARIABLE, as_text, OPTIONS["dynamo_backend"])
        chosen = _known_backend(option.value, f"dynamo_backend={option.value!r} ({option.source})")
        plugin = None if chosen is None else TorchDynamoPlugin(backend=chosen, **outside())
    elif isinstance(plugin, TorchDynamoPlugin):
        refuse_beside("dynamo_plugin", plugin, "dynamo_backend", backend, VARIABLE, plugin.backend)
        option = Option(plugin.backend, "argument")
        chosen = _known_backend(plugin.backend, f"TorchDynamoPlugin(backend={plugin.backend!r})")
    else:
        raise TypeError(f"dynamo_plugin is a {type(plugin).__name__}, expected TorchDynamoPlugin(...).")
    given = {} if plugin is None else {**plugin.to_kwargs(), "backend": chosen}
    off = given.pop("disable", False) or chosen is None
    return option, None if off else given


def compile_calls(model: nn.Module, options: Mapping[str, Any], hooked: Iterable[nn.Module] = ()) -> None:
    """Makes calls of `model` run compiled; there is no wrapper, so nothing is named `_orig_mod`.

    With `use_regional_compilation=True` only its repeated blocks run compiled, and share one
    compilation: the members of each outermost `nn.ModuleList` or `nn.Sequential` of one class and
    equal parameters. Copies and pickles run uncompiled. Other `options` are of `torch.compile`.
    Hooks of the `hooked` modules cannot be compiled: of the innermost, the forward alone is.
    """
    given, outside = dict(options), set(hooked)
    regional = given.pop(REGIONAL, False)
    regions = list(dict.fromkeys(_repeated(model))) if regional else []
    if regional and not regions:
        what = f"{REGIONAL}=True was asked for, but {type(model).__name__} has no nn.ModuleList or nn.Sequential with"
        warnings.warn(f"{what} members of one class and equal parameters. It is compiled as a whole.", stacklevel=2)
    if _replays(given):
        override_class(model, _Replayed)
    codes: dict[Hashable, CodeType] = {}
    for module in dict.fromkeys(each for region in regions or [model] for each in _whole_parts(region, outside)):
        kind = (_kind(module), module in outside) if regions else id(module)
        codes[kind] = _compile(module, given, codes.get(kind), module in outside)


def forget_compiled(model: nn.Module) -> None:
    """Makes calls of `model` and its blocks run as before `compile_calls`."""
    restore_class(model, _Replayed)
    for module in model.modules():
        _undo(module)


def _whole_parts(region: nn.Module, hooked: set[nn.Module]) -> list[nn.Module]:
    """The region; or the hooked modules inside of it that have no others inside themselves."""
    inner = [part for child in region.children() for part in _whole_parts(child, hooked)]
    return [part for part in inner if part in hooked] or [region]


def _compile(module: nn.Module, options: Mapping[str, Any], code: CodeType | None, inside: bool) -> CodeType:
    """Compiles calls, or the forward; the result lets an equal module share the code."""
    # `nn.Module.compile` leaves modules of torch's own classes uncompiled without a word: the compiler skips frames of theirs that
    # it is entered through, and not that of a function around the call. It keeps what it compiled with the code object of that, and
    # stops after the eighth variant of one: with a single one the ninth model of a process would run uncompiled.
    _undo(module)
    forward = module.forward if inside else None
    bound = getattr(forward, "__self__", None) is module
    function: Any = getattr(forward, "__func__", forward) if bound else forward  # torch 2.9 compiles bound methods anew

    def call(*args: Any, **kwargs: Any) -> Any:
        if function is None:
            return module._call_impl(*args, **kwargs)
        return function(module, *args, **kwargs) if bound else function(*args, **kwargs)

    call.__code__ = call.__code__.replace() if code is None else code
    if options.get("options") is not None:
        options = {**options, "options": dict(options["options"])}  # torch takes entries out of it
    compiled: Any = torch.compile(call, **options)
    if forward is None:
        setattr(compiled, _BEFORE, module._compiled_call_impl)
        module._compiled_call_impl = compiled
    else:
        setattr(compiled, _BEFORE, vars(module).get("forward"))
        compiled.__wrapped__ = forward  # which has the signature
        module.forward = compiled
    return call.__code__


def _replays(options: Mapping[str, Any]) -> bool:
    """Whether torch may replay what it compiles by CUDA graphs."""
    default = os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1"
    asked = (options.get("options") or {}).get("triton.cudagraphs", default)
    return asked or options.get("mode") in ("reduce-overhead", "max-autotune") or options.get("backend") == "cudagraphs"


class _Replayed(ClassOverride):
    """Lets micro-batches add up: a gradient in the memory of a CUDA graph would be that of the next replay.

    What is there before a call is copied out of it. torch alone refuses, or adds to another value:
    https://github.com/pytorch/pytorch/issues/169545.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.parameters():  # type: ignore[attr-defined]
            gradient = parameter.grad
            if gradient is not None and not hasattr(gradient, _OWN) and type(gradient) is torch.Tensor:
                parameter.grad = gradient.clone()
                setattr(parameter.grad, _OWN, True)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _undo(module: nn.Module) -> None:
    """Puts back what `_compile` has replaced."""
    called, forward = module._compiled_call_impl, vars(module).get("forward")
    module._compiled_call_impl = getattr(called, _BEFORE, called)
    if hasattr(forward, _BEFORE):
        del vars(module)["forward"]
        if (before := getattr(forward, _BEFORE)) is not None:
            module.forward = before


def _repeated(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = list(module)
        if len(set(map(type, members))) == 1 and len(set(map(_kind, members))) < len(members):
            return members
    return [region for child in module.children() for region in _repeated(child)]


def _kind(module: nn.Module) -> Hashable:
    """A key that is equal for modules that can share a compilation."""
    parameters = ((name, value.shape, value.dtype, value.requires_grad) for name, value in module.named_parameters())
    return type(module), tuple(parameters)


def _known_backend(backend: Any, asked: str) -> Any:
    """A backend's own name, or the function that was given; None for "no"."""
    if callable(backend):
        return backend
    name = str(getattr(backend, "value", backend))  # an enumeration's member stands for its value
    if name.lower() == "no":  # to list the others imports the compiler, which takes a second
        return None
    known = ["no", "eager", *torch.compiler.list_backends(exclude_tags=())]
    name = name if name in known else name.lower()
    if name not in known:
        hint = choices(nearest(name, known), sorted(set(known)))
        raise ValueError(f"{asked} is not a backend of torch.compile. {hint}")
    return name

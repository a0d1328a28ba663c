"""From the arguments of the Accelerator to the parts that it works with, in the order in which they are made.

World, then components (strategy, precision, loader, the user's plugins), then the hooks bound to their owners, then the
layout. Nothing here is kept but the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_core.config import Option, as_bool, as_steps, as_text, resolve
from accel_core.defaults import CoreDefaults
from accel_core.handlers import AutocastKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs, KwargsHandler
from accel_core.plugins import Activation, Offer, Selected, activate, build, find, list_offers, passed
from accel_core.precision import Precision
from accel_core.strategies.strategy import Strategy
from accel_core.world import World

if TYPE_CHECKING:
    from accel_core.layout import Layout

Choice = tuple[str, Selected, str]
"""A role, the component that fills it, and where the choice came from."""


@dataclass(frozen=True)
class Assembly:
    """The parts of one Accelerator."""

    world: World
    layout: Layout
    choices: tuple[Choice, ...]
    activation: Activation
    defaults: CoreDefaults
    strategy: Strategy
    precision: Precision
    mixed_precision: str
    accumulation: GradientAccumulationPlugin
    autocast: AutocastKwargs
    compile_options: Mapping[str, Any] | None


@dataclass(frozen=True)
class Arguments:
    """What was given to the constructor; None where nothing was."""

    mixed_precision: object
    gradient_accumulation_steps: int | None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None
    cpu: bool | None
    dynamo_backend: str | None
    strategy: object
    loader_options: Mapping[str, Any]
    plugins: Sequence[object]
    handlers: Sequence[KwargsHandler]


def assemble(given: Arguments) -> Assembly:
    """Makes every part, or raises; nothing is left running by a failure but the process group."""
    handlers = _by_class(given.handlers)
    accumulation = _accumulation(given)
    compile_options = _compile_options(given.dynamo_backend)
    offers = list_offers()
    precision = _precision(given.mixed_precision, offers)
    loader = _loader(given.loader_options, offers)
    plugins = [("plugin", passed(plugin), "argument") for plugin in given.plugins]
    process_group = handlers.pop(InitProcessGroupKwargs, InitProcessGroupKwargs())
    autocast = handlers.pop(AutocastKwargs, AutocastKwargs())
    cpu = resolve(given.cpu, "ACCELERATE_USE_CPU", as_bool, False).value
    world = World.current(
        cpu=cpu,
        timeout=process_group.timeout,
        backend=process_group.backend,
        init_method=process_group.init_method,
    )
    strategy = _strategy(given.strategy, world, handlers, offers)
    for handler in handlers:
        warnings.warn(
            f"kwargs_handlers has a {handler.__name__}, which nothing that is active takes: strategy "
            f"{strategy[1].name!r}, precision {precision[1].name!r}. It has no effect.",
            stacklevel=4,
        )
    choices = (strategy, precision, *loader, *plugins)
    defaults = CoreDefaults()
    activation = activate([selected for _, selected, _ in choices], defaults)
    return Assembly(
        world=world,
        layout=activation.relay.layout(world),
        choices=choices,
        activation=activation,
        defaults=defaults,
        strategy=strategy[1].component,
        precision=precision[1].component,
        mixed_precision=precision[1].name,
        accumulation=accumulation,
        autocast=autocast,
        compile_options=compile_options,
    )


def _by_class(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for handler in handlers:
        if not isinstance(handler, KwargsHandler):
            raise TypeError(
                f"kwargs_handlers holds a {type(handler).__name__}, expected objects such as "
                f"DistributedDataParallelKwargs(...) or InitProcessGroupKwargs(...)."
            )
        if type(handler) in found:
            raise ValueError(
                f"kwargs_handlers holds two {type(handler).__name__}. Put all options into one of them, for only one can "
                f"hold."
            )
        found[type(handler)] = handler
    return found


def _accumulation(given: Arguments) -> GradientAccumulationPlugin:
    steps, plugin = given.gradient_accumulation_steps, given.gradient_accumulation_plugin
    if plugin is not None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            raise TypeError(
                f"gradient_accumulation_plugin is a {type(plugin).__name__}, expected "
                f"GradientAccumulationPlugin(num_steps=...)."
            )
        if steps is not None:
            raise ValueError(
                f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin={plugin} were both given. Give "
                f"one: GradientAccumulationPlugin(num_steps={steps}, ...), or the number of steps alone."
            )
        return plugin
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):  # type: ignore[redundant-expr]
        raise ValueError(
            f"gradient_accumulation_steps={steps!r}: expected an integer of at least 1, the number of micro-batches in a "
            f"window."
        )
    option = resolve(steps, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", as_steps, 1)
    return GradientAccumulationPlugin(num_steps=option.value)


def _compile_options(backend: str | None) -> Mapping[str, Any] | None:
    option = resolve(backend, "ACCELERATE_DYNAMO_BACKEND", as_text, "no")
    name = str(getattr(option.value, "value", option.value)).lower()
    if name == "no":
        return None
    import torch

    known = ["eager", *torch.compiler.list_backends(exclude_tags=())]
    if name not in known:
        raise ValueError(
            f"dynamo_backend={option.value!r} ({option.source}) is not a backend of torch.compile. Known: "
            f"{', '.join(sorted({'no', *known}))}."
        )
    return {"backend": name}


def _precision(argument: object, offers: Sequence[Offer]) -> Choice:
    option: Option[object] = resolve(argument, "ACCELERATE_MIXED_PRECISION", as_text, "no")
    choice = getattr(option.value, "value", option.value)  # an enumeration's member stands for its value
    selected = build("accel.precisions", choice, offers=offers)
    if not isinstance(selected.component, Precision):
        raise TypeError(
            f"mixed_precision={option.value!r} ({option.source}) gives a {type(selected.component).__name__}, expected a "
            f"name such as 'no' or 'bf16', or an accel_core.Precision."
        )
    return ("precision", selected, option.source)


def _loader(options: Mapping[str, Any], offers: Sequence[Offer]) -> tuple[Choice, ...]:
    installed = any(offer.group == "accel.loaders" and offer.name == _LOADER for offer in offers)
    if installed or options:  # options need somebody to take them: `build` says what to install
        return (("loader", build("accel.loaders", _LOADER, options, offers), "default"),)
    return ()


_LOADER = "sharded"


def _strategy(argument: object, world: World, handlers: dict[type, Any], offers: Sequence[Offer]) -> Choice:
    default = "ddp" if world.size > 1 else "single"
    option: Option[object] = resolve(argument, "ACCELERATE_STRATEGY", as_text, default)
    options: dict[str, Any] = {}
    if isinstance(option.value, str):
        factory = find("accel.strategies", option.value, offers).load()
        handler = handlers.pop(getattr(factory, "handler", None), None)  # type: ignore[arg-type]
        options = handler.to_kwargs() if handler is not None else {}
    else:
        handler = handlers.get(getattr(option.value, "handler", None))  # type: ignore[arg-type]
        if handler is not None:
            raise ValueError(
                f"strategy={type(option.value).__name__}(...) and kwargs_handlers=[{type(handler).__name__}(...)] were "
                f"both given, and both configure it. An object built in code is complete: give it the options."
            )
    selected = build("accel.strategies", option.value, options, offers)
    if not isinstance(selected.component, Strategy):
        raise TypeError(
            f"strategy={option.value!r} ({option.source}) gives a {type(selected.component).__name__}, expected a name "
            f"such as 'ddp', or an accel_core.Strategy."
        )
    return ("strategy", selected, option.source)

"""From the arguments of the Accelerator to the parts that it works with, in the order in which they are made.

World, then components (strategy, precision, loader, the user's plugins), then the hooks bound to
their owners, then the layout. Nothing here is kept but the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_core.base.errors import PluginError
from accel_core.contract.default_components import DETECTOR, RECORDER
from accel_core.contract.hook_specs import CHECKPOINT_HOOKS
from accel_core.contract.precision_policy import Precision
from accel_core.contract.strategy import Strategy
from accel_core.facade.default_hooks import CoreDefaults
from accel_core.loop.compilation import resolve_compilation
from accel_core.options.component_options import Sections
from accel_core.options.handlers import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    TrackingKwargs,
)
from accel_core.options.option_sources import (
    DEFAULT_LOADER,
    DEFAULT_STRATEGIES,
    LOADER_OPTIONS,
    OPTIONS,
    given_outside,
    variable_of,
)
from accel_core.options.resolution import (
    Option,
    as_sequence,
    as_steps,
    as_text,
    flag,
    in_force,
    refuse_beside,
    refuse_beside_object,
    resolve,
    resolve_options,
)
from accel_core.plugins import Activation, Group, Offer, Selected, activate, build, find, list_offers, passed
from accel_core.plugins.offers import find_default
from accel_core.processes.world import World

if TYPE_CHECKING:
    from accel_core.contract.default_components import DetectorFactory, Recorder, RecorderFactory
    from accel_core.contract.layout import Layout
    from accel_core.plugins.explain import Explanation
    from accel_core.tracking.selection import Chosen


class Choice(NamedTuple):
    """A role, the component that fills it, and where the choice came from: "argument", a variable, or "default"."""

    role: str
    selected: Selected
    source: str


class Assembly(NamedTuple):
    """The parts of one Accelerator."""

    world: World
    layout: Layout
    choices: tuple[Choice, ...]
    options: Mapping[str, Option[Any]]
    activation: Activation
    defaults: CoreDefaults
    strategy: Strategy
    loader: object
    precision: Precision
    mixed_precision: str
    accumulation: GradientAccumulationPlugin
    autocast: AutocastKwargs
    compile_options: Mapping[str, Any] | None
    handlers: Mapping[type, KwargsHandler]
    detector: DetectorFactory | None
    trackers: Chosen | None
    recorder: RecorderFactory | None
    tracking: TrackingKwargs


class Arguments(NamedTuple):
    """The constructor's arguments; None where none was given. Nothing is checked yet, hence `object`."""

    mixed_precision: object
    gradient_accumulation_steps: object
    gradient_accumulation_plugin: object
    cpu: object
    dynamo_backend: object
    strategy: object
    loader: object
    dataloader_config: object
    loader_options: Mapping[str, object]
    plugins: Sequence[object]
    handlers: Sequence[KwargsHandler]
    dynamo_plugin: object
    detect_nonfinite: object
    log_with: object


def assemble(given: Arguments) -> Assembly:
    """Makes every part, or raises; nothing is left running by a failure but the process group."""
    handlers = _by_class(as_sequence("kwargs_handlers", given.handlers))
    sections = Sections()
    accumulation, steps = _accumulation(given, sections)
    cpu = flag("cpu", given.cpu, "ACCELERATE_USE_CPU", OPTIONS["cpu"])
    nonfinite = flag(
        "detect_nonfinite", given.detect_nonfinite, "ACCELERATE_DETECT_NONFINITE", OPTIONS["detect_nonfinite"]
    )
    if given.dynamo_plugin is not None:
        sections.refuse_beside("dynamo", "dynamo_plugin")
    backend, compile_options = resolve_compilation(
        given.dynamo_backend, given.dynamo_plugin, lambda: sections.share("dynamo")
    )
    offers = list_offers()
    detects = find_default(*DETECTOR, "detect_nonfinite=True", offers).load() if nonfinite.value else None
    precision = _precision(given.mixed_precision, handlers, offers, sections)
    loader, loader_options = _loader(given, offers, sections)
    plugins = [Choice("plugin", passed(plugin), "argument") for plugin in as_sequence("plugins", given.plugins)]
    trackers, records, tracking = _trackers(given.log_with, handlers, offers, sections)
    world = _world(cpu.value, handlers, sections)
    strategy = _strategy(given.strategy, world, handlers, offers, sections)
    _warn_of_idle(handlers, strategy, precision, world, trackers)
    recorded = ", ".join(trackers.names) if trackers is not None else ""
    sections.finish(offers, f"{_in_words(strategy, precision, world)}, trackers: {recorded or 'none'}")
    choices = (strategy, precision, *loader, *plugins)
    defaults = CoreDefaults()
    activation = activate([choice.selected for choice in choices], defaults)
    _check_checkpoints(activation)
    recording = [] if trackers is None else [Choice("tracker", each, trackers.source) for each in trackers.selected]
    layout = activation.relay.layout(world)
    _check_layout(layout, world, strategy)
    return Assembly(
        world=world,
        layout=layout,
        choices=(*choices, *recording),
        options={
            "cpu": cpu,
            "gradient_accumulation_steps": steps,
            "dynamo_backend": backend,
            "detect_nonfinite": nonfinite,
            **loader_options,
            **sections.options,
        },
        activation=activation,
        defaults=defaults,
        strategy=strategy.selected.component,
        loader=loader[0].selected.component if loader else None,
        precision=precision.selected.component,
        mixed_precision=precision.selected.name,
        accumulation=accumulation,
        autocast=handlers.get(AutocastKwargs) or AutocastKwargs(),
        compile_options=compile_options,
        handlers=handlers,
        detector=detects,
        trackers=trackers,
        recorder=records,
        tracking=tracking,
    )


def explained(parts: Assembly, options: Mapping[str, Option[Any]], recorder: Recorder | None) -> Explanation:
    """What an Accelerator says of its set-up."""
    from accel_core.plugins.explain import Detail, explain

    told = {} if recorder is None else recorder.details()
    details = [Detail("tracker", name, "state", text) for name, text in told.items()]
    return explain(parts.activation, parts.choices, options, details)


def _by_class(handlers: Sequence[KwargsHandler]) -> dict[type[KwargsHandler], Any]:
    found: dict[type[KwargsHandler], Any] = {}
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


def _warn_of_idle(
    handlers: Mapping[type[KwargsHandler], Any],
    strategy: Choice,
    precision: Choice,
    world: World,
    trackers: Chosen | None,
) -> None:
    """Options without effect say so, once, at the line that gave them."""
    taken: set[type] = {type(strategy.selected.component).handler or object, *precision.selected.component.handlers}
    if world.group is not None:
        taken.add(InitProcessGroupKwargs)
    if precision.selected.component.policy.compute is not None:
        taken.add(AutocastKwargs)
    if trackers is not None:
        taken.add(TrackingKwargs)
    for handler in handlers:
        if handler not in taken and not handler.on_request:
            warnings.warn(
                f"kwargs_handlers has a {handler.__name__}, which nothing that is active takes: "
                f"{_in_words(strategy, precision, world)}. It has no effect.",
                stacklevel=4,  # the line that calls Accelerator(...)
            )


def _in_words(strategy: Choice, precision: Choice, world: World) -> str:
    return f"{world.size} process(es), strategy {strategy.selected.name!r}, precision {precision.selected.name!r}"


def _world(cpu: bool, handlers: Mapping[type, Any], sections: Sections) -> World:
    """The world of this process. What was said outside of the code for its process group is read where that is started."""
    process_group = handlers.get(InitProcessGroupKwargs)
    if process_group is not None:
        sections.refuse_beside("process_group", f"kwargs_handlers=[{type(process_group).__name__}(...)]")
    world = World.current(cpu=cpu, **({} if process_group is None else process_group.to_kwargs()))
    if world.group is not None:
        sections.use("process_group", world.told or {})
    return world


def _trackers(
    argument: object, handlers: Mapping[type, Any], offers: Sequence[Offer], sections: Sections
) -> tuple[Chosen | None, RecorderFactory | None, TrackingKwargs]:
    """The trackers, None where none was asked for, what records with them, and how they are treated. They are no owners and no listeners of hooks."""
    rules = handlers.get(TrackingKwargs)
    if rules is not None:
        sections.refuse_beside("tracking", "kwargs_handlers=[TrackingKwargs(...)]")
    if argument is None and given_outside(variable_of("log_with")) is None:
        return None, None, rules or TrackingKwargs()
    from accel_core.tracking.selection import choose  # which most runs need not import

    chosen = choose(argument, offers, sections)
    if not chosen.selected and not chosen.left_out:  # an empty list, or "all" of nothing
        return None, None, rules or TrackingKwargs(**sections.share("tracking"))
    factory = find_default(*RECORDER, "log_with", offers).load()
    return chosen, factory, rules or TrackingKwargs(**sections.share("tracking"))


def _check_checkpoints(activation: Activation) -> None:
    """One format saves and loads: what another one wrote it could not read, and its failures nobody would hear of."""
    owners = {hook: activation.owners[hook] for hook in CHECKPOINT_HOOKS}
    saves, loads, waits = owners.values()
    if saves is not loads or (waits is not None and waits is not saves):
        told = ", ".join(
            f"{hook} by {'the default' if each is None else each.describe()}" for hook, each in owners.items()
        )
        raise PluginError(
            f"Checkpoints would be saved and loaded by different owners: {told}. Implement save_checkpoint and load_checkpoint in one "
            f"plugin, and wait_for_checkpoint there too if it writes behind."
        )


def _check_layout(layout: Layout, world: World, strategy: Choice) -> None:
    count, group = layout.shard.count, layout.data_group
    size = world.size if group is None else torch.distributed.get_world_size(group)
    if count != size:
        raise PluginError(
            f"The strategy {strategy.selected.name!r} shares the data out to {count} data-parallel ranks, but its data group "
            f"has {size} ({'the whole world' if group is None else 'its own group'}), so metrics would count samples twice. "
            f"Its layout() is to give a data_group with one rank per shard."
        )


def _accumulation(given: Arguments, sections: Sections) -> tuple[GradientAccumulationPlugin, Option[int]]:
    steps: Any = given.gradient_accumulation_steps
    plugin = given.gradient_accumulation_plugin
    if plugin is not None:
        if not isinstance(plugin, GradientAccumulationPlugin):
            raise TypeError(
                f"gradient_accumulation_plugin is a {type(plugin).__name__}, expected "
                f"GradientAccumulationPlugin(num_steps=...)."
            )
        refuse_beside("gradient_accumulation_plugin", plugin, "gradient_accumulation_steps", steps, _STEPS_VARIABLE)
        sections.refuse_beside("accumulation", "gradient_accumulation_plugin")
        return plugin, Option(plugin.num_steps, "argument")
    if steps is not None:
        GradientAccumulationPlugin(num_steps=steps)  # which checks it
    option = resolve(steps, _STEPS_VARIABLE, as_steps, OPTIONS["gradient_accumulation_steps"])
    return GradientAccumulationPlugin(num_steps=option.value, **sections.share("accumulation")), option


_STEPS_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def _precision(argument: object, handlers: Mapping[type, Any], offers: Sequence[Offer], sections: Sections) -> Choice:
    option: Option[object] = resolve(argument, "ACCELERATE_MIXED_PRECISION", as_text, OPTIONS["mixed_precision"])
    choice = getattr(option.value, "value", option.value)  # an enumeration's member stands for its value
    factory = find("accel.precisions", choice, offers).load() if isinstance(choice, str) else type(choice)
    given = [handlers[kind] for kind in getattr(factory, "handlers", ()) if kind in handlers]
    names = " and ".join(f"{type(handler).__name__}(...)" for handler in given)
    if len(given) > 1:
        raise ValueError(
            f"kwargs_handlers has {names}, and each of them configures mixed_precision={option.value!r}. Leave in the one that "
            f"is to hold."
        )
    if given and not isinstance(choice, str):
        raise ValueError(
            f"mixed_precision={type(choice).__name__}(...) and kwargs_handlers=[{names}] were both given, and both configure "
            f"it. An object built in code is complete: give it the options."
        )
    options = _options(choice, "accel.precisions", given[0] if given else None, offers, sections)
    selected = build("accel.precisions", choice, options, offers)
    if not isinstance(selected.component, Precision):
        raise TypeError(
            f"mixed_precision={option.value!r} ({option.source}) gives a {type(selected.component).__name__}, expected a "
            f"name such as 'no' or 'bf16', or an accel_core.Precision."
        )
    return Choice("precision", selected, option.source)


def _options(
    choice: object, group: Group, handler: KwargsHandler | None, offers: Sequence[Offer], sections: Sections
) -> dict[str, Any]:
    """The options for what is chosen by name: those of `handler`, which is complete, or those given outside of the code."""
    if not isinstance(choice, str):
        sections.refuse_beside_object(choice, [offer for offer in offers if offer.group == group])
        return {}
    offer = find(group, choice, offers)
    if handler is not None:
        sections.refuse_beside(offer.name, f"{type(handler).__name__}(...)")
        return handler.to_kwargs()
    elsewhere = {name: name for name in LOADER_OPTIONS} if group == "accel.loaders" else {}
    return sections.take(offer.name, offer.load, elsewhere)


def _loader(
    given: Arguments, offers: Sequence[Offer], sections: Sections
) -> tuple[tuple[Choice, ...], Mapping[str, Option[Any]]]:
    """The loader component, none where nothing was asked for and the default name is not installed; and its options."""
    config = given.dataloader_config
    options = resolve_options(given.loader_options, config)
    passed_on = {name: option.value for name, option in options.items() if option.source != "default"}
    choice: Option[object] = resolve(given.loader, "ACCELERATE_LOADER", as_text, DEFAULT_LOADER)
    is_installed = any(offer.group == "accel.loaders" and offer.name == DEFAULT_LOADER for offer in offers)
    if choice.source == "default" and not is_installed and not passed_on and config is None:
        return (), options  # the core's own serves a world of one, and says what to install in a larger one
    refuse_beside_object(config, choice.value)
    if config is not None and isinstance(choice.value, str):
        sections.refuse_beside(find("accel.loaders", choice.value, offers).name, f"{type(config).__name__}(...)")
    own = _options(choice.value, "accel.loaders", None, offers, sections)
    selected = build("accel.loaders", choice.value, {**passed_on, **own}, offers)
    in_use = in_force(options, selected.component, from_object=selected.offer is None)
    return (Choice("loader", selected, choice.source),), in_use


def _strategy(
    argument: object, world: World, handlers: Mapping[type, Any], offers: Sequence[Offer], sections: Sections
) -> Choice:
    default = DEFAULT_STRATEGIES[world.size == 1]
    option: Option[object] = resolve(argument, "ACCELERATE_STRATEGY", as_text, default)
    by_name = isinstance(option.value, str)
    factory = find("accel.strategies", str(option.value), offers).load() if by_name else option.value
    handler = handlers.get(getattr(factory, "handler", None) or object)
    if handler is not None and not by_name:
        raise ValueError(
            f"strategy={type(option.value).__name__}(...) and kwargs_handlers=[{type(handler).__name__}(...)] were "
            f"both given, and both configure it. An object built in code is complete: give it the options."
        )
    options = _options(option.value, "accel.strategies", handler, offers, sections)
    selected = build("accel.strategies", option.value, options, offers)
    if not isinstance(selected.component, Strategy):
        raise TypeError(
            f"strategy={option.value!r} ({option.source}) gives a {type(selected.component).__name__}, expected a name "
            f"such as 'ddp', or an accel_core.Strategy."
        )
    return Choice("strategy", selected, option.source)

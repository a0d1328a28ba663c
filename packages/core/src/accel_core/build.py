"""The parts of an Accelerator, made from its arguments in order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from accel_core.base.deprecation import level_of_the_user
from accel_core.base.errors import PluginError
from accel_core.base.installation import how_to_install
from accel_core.contract.default_components import DETECTOR, RECORDER
from accel_core.contract.hook_specs import CHECKPOINT_HOOKS
from accel_core.contract.precision_policy import FULL, Precision
from accel_core.contract.strategy import Strategy
from accel_core.facade.default_hooks import CoreDefaults
from accel_core.loop.compilation import resolve_compilation
from accel_core.loop.scheduler_gate import SchedulerRule, rule_of
from accel_core.options.component_options import Sections
from accel_core.options.handlers import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    TrackingKwargs,
    resolve_project,
)
from accel_core.options.option_sources import DEFAULT_LOADER, DEFAULT_STRATEGIES, LOADER_OPTIONS, OPTIONS, variable_of
from accel_core.options.resolution import (
    Option,
    as_list,
    as_sequence,
    as_steps,
    as_text,
    flag,
    in_force,
    refuse_beside,
    resolve,
    resolve_options,
)
from accel_core.plugins import Activation, Group, Offer, Selected, activate, build, find, list_offers, passed
from accel_core.plugins.offers import NOUNS, find_default
from accel_core.processes.rendezvous import refuse_unknown_devices
from accel_core.processes.world import World

if TYPE_CHECKING:
    from accel_core.contract.default_components import DetectorFactory, Recorder, RecorderFactory
    from accel_core.contract.strategy import Layout
    from accel_core.plugins.explain import Explanation

Handlers = Mapping[type[KwargsHandler], Any]


class Choice(NamedTuple):
    """A role, its component, and who chose it: "argument", a variable, or "default"."""

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
    scheduler_rule: SchedulerRule
    autocast: AutocastKwargs
    compile_options: Mapping[str, Any] | None
    handlers: Handlers
    project: ProjectConfiguration
    detector: DetectorFactory | None
    trackers: Sequence[str]
    recorder: Recorder | None

    def explain(self, loaders: Sequence[object] = ()) -> Explanation:
        """See `Accelerator.explain`."""
        from accel_core.plugins.explain import Detail, explain

        told = {} if self.recorder is None else self.recorder.details()
        details = [Detail("tracker", name, "state", text) for name, text in told.items()]
        if self.world.device.type != "cpu" and not all(getattr(each, "pin_memory", True) for each in loaders):
            text = "batches are copied faster, and without waiting, out of pinned memory: DataLoader(pin_memory=True)"
            details.append(Detail("loader", type(self.loader).__name__, "hint", text))
        has_tf32 = getattr(torch.get_device_module(self.world.device), "is_tf32_supported", bool)
        with suppress(RuntimeError):  # of torch, if it was told in the newer of its two ways
            if self.precision.policy == FULL and has_tf32() and torch.get_float32_matmul_precision() == "highest":
                text = "this device multiplies float32 several times faster in TF32: mixed_precision='tf32'"
                details.append(Detail("precision", self.mixed_precision, "hint", text))
        return explain(self.activation, self.choices, self.options, details)


def assemble(given: Mapping[str, Any]) -> Assembly:
    """Makes every part from the arguments by name, or raises, leaving only the process group."""
    handlers, sections = _by_class(given["kwargs_handlers"]), Sections()
    asked = _Asked(given, handlers, list_offers(), sections)
    project_dir = asked.option("project_dir", parse=lambda text, _: os.path.expanduser(text))
    project = resolve_project(project_dir.value, given["project_config"], project_dir.source)
    accumulation, steps = asked.accumulation()
    cpu, nonfinite = asked.flag("cpu"), asked.flag("detect_nonfinite")
    dynamo = given["dynamo_plugin"]
    if dynamo is not None:
        sections.refuse_beside("dynamo", "dynamo_plugin")
    backend, compile_options = resolve_compilation(given["dynamo_backend"], dynamo, lambda: sections.share("dynamo"))
    detects = find_default(*DETECTOR, "detect_nonfinite=True", asked.offers).load() if nonfinite.value else None
    precision = asked.component("mixed_precision", "accel.precisions", Precision, "no")
    loader, loader_options = asked.loader()
    plugins = [Choice("plugin", passed(plugin), "argument") for plugin in as_sequence("plugins", given["plugins"])]
    recording, trackers, record = asked.trackers()
    world = asked.world(cpu.value)
    strategy = asked.component("strategy", "accel.strategies", Strategy, DEFAULT_STRATEGIES[world.size == 1])
    active = f"{world.size} process(es), strategy {strategy.selected.name!r}, precision {precision.selected.name!r}"
    _warn_of_idle(handlers, strategy.selected.component, precision.selected.component, world, bool(record), active)
    sections.finish(asked.offers, f"{active}, trackers: {', '.join(trackers) or 'none'}")
    choices = (strategy, precision, *loader, *plugins)
    defaults = CoreDefaults()
    activation = activate([choice.selected for choice in choices], defaults)
    _check_checkpoints(activation)
    layout = activation.relay.layout(world)
    _check_layout(layout, world, strategy.selected.name)
    if layout.device is not None:
        world.compute_on(layout.device)
    elif world.device.type == "cpu" and not cpu.value:
        refuse_unknown_devices()
    component = loader[0].selected.component if loader else None
    per_process = given["step_scheduler_per_process"] and not getattr(component, "split_batches", False)
    with_optimizer, multiplied = given["step_scheduler_with_optimizer"], world.size if per_process else None
    own = {"cpu": cpu, "gradient_accumulation_steps": steps, "dynamo_backend": backend, "detect_nonfinite": nonfinite}
    return Assembly(
        world=world,
        layout=layout,
        choices=(*choices, *recording),
        options={**own, **loader_options, **sections.options, "project_dir": project_dir},
        activation=activation,
        defaults=defaults,
        strategy=strategy.selected.component,
        loader=component,
        precision=precision.selected.component,
        mixed_precision=precision.selected.name,
        accumulation=accumulation,
        scheduler_rule=rule_of(with_optimizer, multiplied, accumulation.adjust_scheduler),
        autocast=handlers.get(AutocastKwargs) or AutocastKwargs(),
        compile_options=compile_options,
        handlers=handlers,
        project=project,
        detector=detects,
        trackers=trackers,
        recorder=None if record is None else record(world, project),
    )


class _Asked(NamedTuple):
    """The request: arguments by name (None: not given), option objects, and outside options."""

    given: Mapping[str, Any]
    handlers: Handlers
    offers: Sequence[Offer]
    sections: Sections

    def option(self, name: str, default: object = None, parse: Callable[[str, str], Any] = as_text) -> Option[Any]:
        return resolve(self.given[name], variable_of(name), parse, OPTIONS[name] if default is None else default)

    def flag(self, name: str) -> Option[Any]:
        return flag(name, self.given[name], variable_of(name), OPTIONS[name])

    def accumulation(self) -> tuple[GradientAccumulationPlugin, Option[int]]:
        name, plugin = "gradient_accumulation_steps", self.given["gradient_accumulation_plugin"]
        if plugin is None:
            steps = self.option(name, parse=as_steps)
            return GradientAccumulationPlugin(num_steps=steps.value, **self.sections.share("accumulation")), steps
        refuse_beside(
            "gradient_accumulation_plugin", plugin, name, self.given[name], variable_of(name), plugin.num_steps
        )
        self.sections.refuse_beside("accumulation", "gradient_accumulation_plugin")
        return plugin, Option(plugin.num_steps, "argument")

    def component(self, argument: str, group: Group, base: type, default: str) -> Choice:
        """The strategy or precision, with the options of its handler, or those given outside."""
        option = self.option(argument, default)
        choice = option.value.value if isinstance(option.value, Enum) else option.value
        by_name = isinstance(choice, str)
        asked = find(group, choice, self.offers).load() if by_name else choice
        kinds: Any = getattr(asked, "handlers", ()) if base is Precision else (getattr(asked, "handler", None),)
        given = [self.handlers[kind] for kind in kinds if kind in self.handlers]
        names = " and ".join(f"{type(handler).__name__}(...)" for handler in given)
        if len(given) > 1:
            what = f"kwargs_handlers has {names}, and each of them configures {argument}={option.value!r}."
            raise ValueError(f"{what} Leave in one.")
        if given and not by_name:
            what = f"{argument}={type(choice).__name__}(...) and kwargs_handlers=[{names}] were both given,"
            raise ValueError(f"{what} and both configure it. An object built in code is complete: give it the options.")
        selected = build(group, choice, self._options(choice, group, given[0] if given else None), self.offers)
        if not isinstance(selected.component, base):
            what = f"{argument}={option.value!r} ({option.source}) gives a {type(selected.component).__name__},"
            raise TypeError(f"{what} expected a name such as {default!r}, or an accel_core.{base.__name__}.")
        return Choice(NOUNS[group], selected, option.source)

    def _options(self, choice: object, group: Group, handler: KwargsHandler | None) -> dict[str, Any]:
        """Options for a choice by name: of `handler`, which is complete, or those given outside."""
        if not isinstance(choice, str):
            self.sections.refuse_beside_object(choice, [offer for offer in self.offers if offer.group == group])
            return {}
        offer = find(group, choice, self.offers)
        if handler is not None:
            self.sections.refuse_beside(offer.name, f"{type(handler).__name__}(...)")
            return handler.to_kwargs()
        elsewhere = {name: name for name in LOADER_OPTIONS} if group == "accel.loaders" else {}
        return self.sections.take(offer.name, offer.load, elsewhere)

    def loader(self) -> tuple[tuple[Choice, ...], Mapping[str, Option[Any]]]:
        """The loader component, if asked for or installed as the default, and its options."""
        config, group = self.given["dataloader_config"], "accel.loaders"
        options = resolve_options({name: self.given.get(name) for name in LOADER_OPTIONS}, config)
        passed_on = {name: option.value for name, option in options.items() if option.source != "default"}
        choice = self.option("loader", DEFAULT_LOADER)
        is_installed = (group, DEFAULT_LOADER) in [(offer.group, offer.name) for offer in self.offers]
        if choice.source == "default" and not is_installed and not passed_on and config is None:
            return (), options  # the core's own serves a world of one, and says what to install in a larger one
        if not isinstance(choice.value, str):
            refuse_beside("loader", f"{type(choice.value).__name__}(...)", "dataloader_config", config, "")
        elif config is not None:
            name = find("accel.loaders", choice.value, self.offers).name
            self.sections.refuse_beside(name, f"{type(config).__name__}(...)")
        own = self._options(choice.value, "accel.loaders", None)
        selected = build("accel.loaders", choice.value, {**passed_on, **own}, self.offers)
        in_use = in_force(options, selected.component, from_object=selected.offer is None)
        return (Choice("loader", selected, choice.source),), in_use

    def world(self, cpu: bool) -> World:
        """The world of this process; outside options of its process group are read at its start."""
        handler = self.handlers.get(InitProcessGroupKwargs)
        if handler is not None:
            self.sections.refuse_beside("process_group", "kwargs_handlers=[InitProcessGroupKwargs(...)]")
        world = World.current(cpu=cpu, **({} if handler is None else handler.to_kwargs()))
        if world.group is not None:
            self.sections.use("process_group", world.told or {})
        return world

    def trackers(self) -> tuple[list[Choice], list[str], Callable[[World, ProjectConfiguration], Recorder] | None]:
        """The trackers, their names, and what makes the recorder, None if nothing is recorded."""
        rules, asked = self.handlers.get(TrackingKwargs), self.option("log_with", (), as_list)
        if rules is not None:
            self.sections.refuse_beside("tracking", "kwargs_handlers=[TrackingKwargs(...)]")
        if asked.value in ("all", ["all"]) and not any(offer.group == "accel.trackers" for offer in self.offers):
            what = "log_with='all' was asked for, and no tracker is installed."
            warnings.warn(f"{what} {how_to_install('accel-trackers')}", stacklevel=level_of_the_user())
            return [], [], None
        if asked.value in ("", [], ()):
            return [], [], None
        factory = cast("RecorderFactory", find_default(*RECORDER, "log_with", self.offers).load())
        chosen = factory.choose(asked, self.offers, self.sections)
        rules = rules or TrackingKwargs(**self.sections.share("tracking"))
        choices = [Choice("tracker", each, asked.source) for each in chosen.selected]
        return choices, chosen.names, lambda world, project: factory(chosen, rules, world, project)


def _by_class(given: Any) -> dict[type[KwargsHandler], Any]:
    handlers: Sequence[Any] = () if given is None else as_sequence("kwargs_handlers", given)
    for handler in handlers:
        if not isinstance(handler, KwargsHandler):
            kind = type(handler).__name__
            raise TypeError(f"kwargs_handlers holds a {kind}, expected objects such as AutocastKwargs(...).")
        if [type(each) for each in handlers].count(type(handler)) > 1:
            raise ValueError(f"kwargs_handlers holds two {type(handler).__name__}. Put all options into one of them.")
    return {type(handler): handler for handler in handlers}


def _warn_of_idle(
    handlers: Handlers, strategy: Strategy, precision: Precision, world: World, records: bool, active: str
) -> None:
    """Options without effect say so, once, at the line that gave them."""
    alone, full = world.group is None, precision.policy.compute is None
    idle = {InitProcessGroupKwargs: alone, AutocastKwargs: full, TrackingKwargs: not records}
    for kind in handlers:
        if idle.get(kind, True) and kind not in (strategy.handler, *precision.handlers) and not kind.on_request:
            what = f"kwargs_handlers has a {kind.__name__}, which nothing that is active takes: {active}"
            warnings.warn(f"{what}. It has no effect.", stacklevel=level_of_the_user())


def _check_checkpoints(activation: Activation) -> None:
    """Raises unless one owner saves, loads and waits: it alone can read its checkpoints."""
    owners = {hook: activation.owners[hook] for hook in CHECKPOINT_HOOKS}
    saves, loads, waits = owners.values()
    if saves is not loads or (waits is not None and waits is not saves):
        who = ", ".join(f"{hook} by {'the default' if one is None else one.describe()}" for hook, one in owners.items())
        raise PluginError(f"Checkpoints would be saved and loaded by different owners: {who}. Let one plugin own all.")


def _check_layout(layout: Layout, world: World, strategy: str) -> None:
    size = world.size if layout.data_group is None else torch.distributed.get_world_size(layout.data_group)
    if layout.shard.count != size:
        raise PluginError(
            f"The strategy {strategy!r} shares the data out to {layout.shard.count} data-parallel ranks, but its data group has {size} "
            f"({'the whole world' if layout.data_group is None else 'its own group'}), so metrics would count samples twice. Its "
            f"layout() is to give a data_group with one rank per shard."
        )

"""What the Accelerator was given and what the environment says, as arguments of `accel_core.Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import accel_core
from accel_compat.environment import Environment, from_environment
from accel_compat.loaders import Loaders
from accel_compat.plugins import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from accel_compat.state import AcceleratorState
from accel_core.api.launcher import given_outside, variable_of

HANDLERS: Mapping[type[Any], str] = {
    DistributedDataParallelKwargs: "ddp_handler",
    GradScalerKwargs: "scaler_handler",
    InitProcessGroupKwargs: "init_handler",
    FP8RecipeKwargs: "fp8_recipe_handler",
    AutocastKwargs: "autocast_handler",
    ProfileKwargs: "profile_handler",
    AORecipeKwargs: "ao_recipe_handler",
    TERecipeKwargs: "te_recipe_handler",
    MSAMPRecipeKwargs: "msamp_recipe_handler",
}
"""Option classes, and the attribute of the Accelerator that has the object."""

_READ_HERE = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_DYNAMO_BACKEND")


@dataclass
class Plugins:
    """The plugins of a run, of which one is the strategy."""

    deepspeed_plugin: Any = None
    fsdp_plugin: Any = None
    megatron_lm_plugin: Any = None
    parallelism_config: Any = None
    torch_tp_plugin: Any = None

    def strategy(self, world_size: int) -> Any:
        """The strategy; None where no plugin asks for one."""
        deepspeed = self.deepspeed_plugin
        if isinstance(deepspeed, Mapping):
            deepspeed = next(iter(deepspeed.values()))
        for plugin in (deepspeed, self.megatron_lm_plugin):
            if plugin is not None:
                return _ours(plugin, world_size)
        if self.parallelism_config is not None:
            return self.parallelism_config.ours(world_size, self.fsdp_plugin)
        return None if self.fsdp_plugin is None else _ours(self.fsdp_plugin, world_size)


def plugins_of(given: Plugins, environment: Environment) -> Plugins:
    """What was given, else what the first Accelerator of the process has, else what the environment says."""
    state = AcceleratorState._shared_state

    def first(name: str) -> Any:
        known = state.get("deepspeed_plugins" if name == "deepspeed_plugin" else name)
        return next(
            (each for each in (getattr(given, name), known) if each is not None), getattr(environment, name, None)
        )

    if given.torch_tp_plugin is not None and given.parallelism_config is None:
        given.parallelism_config = ParallelismConfig(tp_size=given.torch_tp_plugin.tp_size)
    return Plugins(**{name: first(name) for name in vars(given)})


def precision_of(mixed_precision: Any, environment: Environment, fsdp_plugin: Any = None) -> Any:
    """The precision of the plugin's own policy, else what was given, else of the process, else of the environment, else "no".

    Raises `ValueError` if a policy and a precision of another dtype were given.
    """
    own = fsdp_plugin.precision() if hasattr(fsdp_plugin, "precision") else None
    if own is not None:
        kind = type(own).__name__.lower()
        if mixed_precision is not None and str(mixed_precision).lower() != kind:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} and a plugin with mixed_precision_policy={fsdp_plugin.mixed_precision_policy!r} "
                f"were both given. Leave one out, or give mixed_precision={kind!r}."
            )
        return own
    if mixed_precision is not None:
        return mixed_precision if isinstance(mixed_precision, accel_core.Precision) else str(mixed_precision).lower()
    known = AcceleratorState._shared_state.get("_mixed_precision")
    outside = given_outside(variable_of("mixed_precision"))
    return known or environment.mixed_precision or ("no" if outside is None else outside.text)


def accumulation_of(
    steps: int, plugin: GradientAccumulationPlugin | None, environment: Environment
) -> GradientAccumulationPlugin:
    """The plugin that was given; else one with the steps of the environment, else those that were given."""
    if plugin is not None:
        if steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={steps} and a gradient_accumulation_plugin were both given. Leave the first out."
            )
        return plugin
    outside = given_outside(variable_of("gradient_accumulation_steps"))
    known = environment.gradient_accumulation_steps
    return GradientAccumulationPlugin(num_steps=known or (steps if outside is None else int(outside.text)))


def dynamo_of(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Options of `torch.compile`; `ValueError` for two."""
    if backend is not None and plugin is not None:
        raise ValueError("dynamo_backend and dynamo_plugin were both given. Leave the first out.")
    if plugin is not None:
        return plugin
    return TorchDynamoPlugin() if backend is None else TorchDynamoPlugin(backend=backend)


def handlers_by_attribute(handlers: Iterable[Any] | None) -> dict[str, Any]:
    """Option objects by the attribute that has them; `ValueError` for two of a class."""
    found: dict[str, Any] = dict.fromkeys(HANDLERS.values())
    for handler in handlers or ():
        assert isinstance(handler, KwargsHandler), (
            f"kwargs_handlers has {handler!r}, expected objects of accelerate.utils such as AutocastKwargs(...)."
        )
        attribute = next((HANDLERS[kind] for kind in type(handler).__mro__ if kind in HANDLERS), type(handler).__name__)
        if found.get(attribute) is not None:
            raise ValueError(f"kwargs_handlers has two {type(handler).__name__}. Put all options into one of them.")
        found[attribute] = handler
    return found


def complete_fp8_recipe(handlers: dict[str, Any], precision: Any) -> None:
    """Adds the recipe of fp8 that the environment describes, where none was given; torchao's, if it says nothing.

    Raises `ValueError` for a recipe that was given with another precision.
    """
    given = next((handlers[name] for name in handlers if "recipe_handler" in name and handlers[name] is not None), None)
    if given is not None and precision in ("no", "fp16", "bf16"):
        raise ValueError(
            f"{type(given).__name__} was given with mixed_precision={precision!r}. Write mixed_precision='fp8', or leave it out."
        )
    if given is None and precision == "fp8":
        backend = os.environ.get("ACCELERATE_FP8_BACKEND", "NO").upper()
        kind = {"NO": AORecipeKwargs, "AO": AORecipeKwargs, "TE": TERecipeKwargs, "MSAMP": MSAMPRecipeKwargs}.get(
            backend
        )
        if kind is None:
            raise ValueError(f"ACCELERATE_FP8_BACKEND is {backend!r}: expected AO or TE.")
        handlers[HANDLERS[kind]] = kind()


def handlers_in_use(
    handlers: dict[str, Any], strategy: accel_core.Strategy | None, precision: Any, world_size: int
) -> list[accel_core.KwargsHandler]:
    """Our objects for those that something takes; others have no effect, and are left out. A recipe of fp8 is added to `handlers`."""
    complete_fp8_recipe(handlers, precision)
    name = precision if isinstance(precision, str) else ""
    taken = {
        "ddp_handler": strategy is None and world_size > 1 and given_outside(variable_of("strategy")) is None,
        "scaler_handler": name == "fp16",
        "autocast_handler": name not in ("no", ""),
        "init_handler": False,  # the processes have it
        "fp8_recipe_handler": name == "fp8",
        "ao_recipe_handler": name == "fp8",
        "te_recipe_handler": name == "fp8",
        "msamp_recipe_handler": name == "fp8",
    }
    used = [handler for attribute, handler in handlers.items() if handler is not None and taken.get(attribute, True)]
    shards = strategy is not None and not strategy.replicates_parameters
    made = [each.ours(shards) if isinstance(each, AORecipeKwargs) else _ours(each) for each in used]
    return [each for each in made if each is not None]


def loaders_of(config: DataLoaderConfiguration, rng_types: Sequence[Any] | None) -> Loaders:
    """The loader component for these options."""
    names = [str(getattr(each, "value", each)) for each in (["generator"] if rng_types is None else rng_types)]
    return Loaders(**vars(_ours(config)), rng_types=names)


def project_of(project_dir: Any, config: ProjectConfiguration | None) -> accel_core.ProjectConfiguration:
    """The project's folders: those of the configuration, else of the argument."""
    config = ProjectConfiguration(project_dir=project_dir) if config is None else config
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    return _ours(config)  # type: ignore[no-any-return]


def environment() -> Environment:
    """What the variables of this process say."""
    return from_environment(os.environ)


@contextmanager
def read_already() -> Iterator[None]:
    """Takes variables away for the block whose values are arguments by now."""
    kept = {name: os.environ.pop(name) for name in _READ_HERE if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _ours(given: Any, *args: Any) -> Any:
    return given.ours(*args) if hasattr(given, "ours") else given

"""Names of DeepSpeed that libraries import, with accel-deepspeed or without: what is not installed raises when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from accel_compat.plugins.deepspeed import MISSING, DeepSpeedPlugin
from accel_core import NotInstalledError

__all__ = [
    "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DummyOptim", "DummyScheduler",
    "HfDeepSpeedConfig", "get_active_deepspeed_plugin",
]  # fmt: skip


def _missing(name: str) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotInstalledError(f"{name}: {MISSING}")

    return type(name, (), {"__new__": fail, "__doc__": MISSING})


def _class(name: str) -> Any:
    if find_spec("accel_deepspeed") is None:  # an extra
        return _missing(name)
    return getattr(import_module("accel_deepspeed"), name)


DummyOptim, DummyScheduler, HfDeepSpeedConfig = map(_class, ("DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"))


class _NoWrapper:
    """For `isinstance`, which is false of every object: nothing is wrapped here."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{cls.__name__} wraps nothing here: models, optimizers and schedulers are used as they are.")


class DeepSpeedEngineWrapper(_NoWrapper):
    """For `isinstance`: no engine is wrapped."""


class DeepSpeedOptimizerWrapper(_NoWrapper):
    """For `isinstance`: no optimizer is wrapped."""


class DeepSpeedSchedulerWrapper(_NoWrapper):
    """For `isinstance`: no scheduler is wrapped, and each is saved and stepped by its user."""


def answer_as_engine(model: nn.Module, plugin: DeepSpeedPlugin) -> None:
    """Gives a model that DeepSpeed trains the names of its engine, by which transformers' Trainer saves and resumes."""
    import_module("accel_deepspeed").add_engine_names(model, plugin.deepspeed_config)


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """The plugin of a run under DeepSpeed, of several the selected one; `ValueError` without."""
    plugins = getattr(state, "deepspeed_plugins", None) or getattr(state, "deepspeed_plugin", None)
    found = [each for each in plugins.values() if each.selected] if isinstance(plugins, Mapping) else [plugins]
    if not found or found[0] is None:
        raise ValueError(
            "There is no active DeepSpeedPlugin: write Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))."
        )
    plugin: DeepSpeedPlugin = found[0]
    return plugin

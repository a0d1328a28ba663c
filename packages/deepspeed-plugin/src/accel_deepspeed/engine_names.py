"""What transformers' Trainer asks of a DeepSpeed engine, as attributes of a prepared model.

The Trainer saves and resumes by the engine's own checkpoints. Everything else uses `save_state`,
whose checkpoints load under any strategy and in any number of processes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.serialization import safe_globals

from accel_deepspeed.prepared_model import PreparedModel, engine_of

if TYPE_CHECKING:
    from accel_deepspeed.model_engine import ModelEngine

_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def add_engine_names(prepared: nn.Module, config: Mapping[str, Any]) -> None:
    """Gives a prepared model `config`, `save_checkpoint` and `load_checkpoint` as of an engine. Another stays as it is."""
    if isinstance(prepared, PreparedModel):
        here: weakref.ref[nn.Module] = weakref.ref(prepared)
        names = {
            "config": config,
            "save_checkpoint": partial(_save, here, config),
            "load_checkpoint": partial(_load, here, config),
            "_zero3_consolidated_16bit_state_dict": partial(_gathered, here),
        }
        vars(prepared).update(names)  # beside those of the user's model, which an engine does not show


def _save(
    prepared: weakref.ref[nn.Module],
    config: Mapping[str, Any],
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Writes DeepSpeed's own checkpoint of model and optimizer. A collective."""
    state, engine = dict(client_state or {}), _engine(prepared)
    if engine.state is None:
        state["optimizer"] = engine.optimizer.state_dict()
    with engine.engine_for_files(_norm(config)) as saves:
        return bool(saves.save_checkpoint(str(save_dir), tag, state, save_latest, exclude_frozen_parameters))


def _load(
    prepared: weakref.ref[nn.Module],
    config: Mapping[str, Any],
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, Any]:
    """Loads one of as many processes. A collective. Runs no code that a file names."""
    engine = _engine(prepared)
    with _without_code(), engine.engine_for_files(_norm(config)) as loads:
        path, state = loads.load_checkpoint(
            str(load_dir),
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states and engine.state is not None,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
    if path is None:
        return path, state
    engine.drop_gradients()
    if engine.state is not None:
        engine.adopt_loaded()
    elif (saved := state.pop("optimizer", None)) and load_optimizer_states and not load_module_only:
        engine.optimizer.load_state_dict(saved)
    return path, state


def _gathered(prepared: weakref.ref[nn.Module], exclude_frozen_parameters: bool = False) -> Any:
    """All weights on the main process, of a model that is shared out. A collective."""
    return _engine(prepared).engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)


def _norm(config: Mapping[str, Any]) -> float:
    norm = config.get("gradient_clipping")
    return float(norm) if isinstance(norm, (int, float)) else 0.0


def _engine(prepared: weakref.ref[nn.Module]) -> ModelEngine:
    model = prepared()
    engine = None if model is None else engine_of(model)
    if engine is None:
        raise RuntimeError(
            "A checkpoint of DeepSpeed was asked of a model that has no engine: its optimizer was not prepared, or the training has "
            "ended. Call it while the model is trained, or save the weights by accelerator.save_model(model)."
        )
    return engine


@contextmanager
def _without_code() -> Iterator[None]:
    """Has torch refuse pickled code, which DeepSpeed would let it run."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        with safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before

"""The module that `prepare` returns for a trained model; it calls its engine."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

if TYPE_CHECKING:
    from accel_megatron.model_engine import ModelEngine

_ENGINE = "_accel_engine"


class PreparedModel(nn.Module):
    """The user's model in `module`; other attributes are the model's.

    Attributes:
        synchronises: whether backwards of the next forwards send gradients.
    """

    def __init__(self, model: nn.Module, engine: ModelEngine) -> None:
        super().__init__()
        self.module = model
        vars(self).update({"synchronises": True, _ENGINE: engine})
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model, if it is whole; a stage of a pipeline raises `RuntimeError`."""
        engine: ModelEngine | None = vars(self)[_ENGINE]
        if engine is None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "This model was called to be trained after end_training() or free_memory() had ended its engine. Call the model inside "
                    "it, accelerator.unwrap_model(model); or end the training later."
                )
            return self.module(*args, **kwargs)
        if is_pipeline(engine):
            return self.module(*args, **kwargs)  # which raises, for it is a stage
        return engine.forward(args, kwargs, vars(self)["synchronises"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.module.zero_grad(set_to_none)
        if (engine := engine_of(self)) is not None:
            engine.clear()

    def __getattr__(self, name: str) -> Any:
        modules = vars(self).get("_modules", {})
        if name in modules:
            return modules[name]
        if name.startswith("_") or "module" not in modules:
            return super().__getattr__(name)
        return getattr(modules["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = None if name in vars(self) else vars(self).get("_modules", {}).get("module")
        if inner is not None and not hasattr(type(self), name) and name[0] != "_" and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "This model was to be copied or pickled, but Megatron's buffers of this process hold its gradients. Copy or pickle the model "
            "inside it, accelerator.unwrap_model(model), before it is prepared; or save it by accelerator.save_model(model)."
        )


def engine_of(prepared: nn.Module) -> ModelEngine | None:
    """The engine of a prepared model; None if it is evaluated only, or has ended."""
    found: ModelEngine | None = vars(prepared).get(_ENGINE)
    return found


def end_engine(prepared: nn.Module) -> None:
    """Takes the engine off a prepared model."""
    vars(prepared)[_ENGINE] = None


def is_pipeline(engine: ModelEngine) -> bool:
    """Whether ranks have stages of the model."""
    return int(getattr(engine.config, "pipeline_model_parallel_size", 1)) > 1


class NoSync:
    """Backwards of forwards inside keep their gradients on each rank. Hot."""

    __slots__ = ("_before", "_own")

    def __init__(self, prepared: nn.Module) -> None:
        self._own = vars(prepared)
        self._before = True

    def __enter__(self) -> None:
        self._before = self._own["synchronises"]
        self._own["synchronises"] = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own["synchronises"] = self._before

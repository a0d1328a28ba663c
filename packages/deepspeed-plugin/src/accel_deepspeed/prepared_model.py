"""The module that `prepare` returns for a trained model; it calls its engine."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

if TYPE_CHECKING:
    from accel_deepspeed.model_engine import ModelEngine

_ENGINE = "_accel_engine"


class PreparedModel(nn.Module):
    """The user's model in `module`, called by its engine; other attributes are the model's.

    Args:
        model: of the user, trained.
        shares_parameters: whether each rank has a part of every parameter (stage 3).

    Attributes:
        synchronises: whether backwards of the next forwards send gradients.
    """

    def __init__(self, model: nn.Module, shares_parameters: bool) -> None:
        super().__init__()
        self.module = model
        own = vars(self)
        own.update({"shares_parameters": shares_parameters, "synchronises": True, _ENGINE: None, "_ended": False})
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model.

        Raises:
            RuntimeError: if it is to be trained, and its optimizer was not prepared; after the end
                of the training.
        """
        own = vars(self)
        engine: ModelEngine | None = own[_ENGINE]
        if engine is not None:
            return engine.forward(args, kwargs, own["synchronises"])
        if own["_ended"]:
            raise RuntimeError(
                "This model was called after its engine had ended (end_training() or free_memory() was called). Call the model inside it, "
                "accelerator.unwrap_model(model), if parameters are not shared out (zero_stage=3); or end the training later."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(self.module).__name__} was called to be trained, but DeepSpeed needs the optimizer that steps it, and none that holds "
                f"its parameters was prepared. Give it to prepare() too; or prepare the model with evaluation_mode=True."
            )
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, those in partitions too."""
        self.module.zero_grad(set_to_none)
        engine: ModelEngine | None = vars(self)[_ENGINE]
        if engine is not None:
            engine.drop_gradients()

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights, with the prefix "module.". RuntimeError if this rank has only a part."""
        if self.shares_parameters:
            raise RuntimeError(
                "model.state_dict() was called under ZeRO stage 3, where each rank has a part of every parameter. Call "
                "accelerator.get_state_dict(model) on all ranks."
            )
        return super().state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "This model was to be copied or pickled, but it is trained by a DeepSpeed engine, which belongs to this process. Copy or pickle "
            "the model inside it, accelerator.unwrap_model(model), before it is prepared; or save it by accelerator.save_model(model)."
        )


def engine_of(prepared: nn.Module) -> ModelEngine | None:
    """The engine of a prepared model; None if it has none (yet), or is evaluated only."""
    found: ModelEngine | None = vars(prepared).get(_ENGINE)
    return found


def set_engine(prepared: nn.Module, engine: ModelEngine | None) -> None:
    """Gives a prepared model its engine; None ends it."""
    vars(prepared)[_ENGINE] = engine
    vars(prepared)["_ended"] = engine is None


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

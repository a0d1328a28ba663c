"""Methods that compute beside `forward`: run through calls of models, in which strategies act."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(eq=False)
class ForwardMethod:
    """A method of a model, run through calls of the prepared one; copies have their own."""

    prepared: nn.Module
    path: str  # of the user's model in it
    function: Callable[..., Any]  # not bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the method, computed in a call of the prepared model."""
        model = self.prepared.get_submodule(self.path)
        own: dict[str, Any] = vars(model)
        before = {"forward": own["forward"]} if "forward" in own else {}

        def restore() -> None:
            own.pop("forward", None)
            own.update(before)

        def forward(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method may call the model
            return self.function(model, *args, **kwargs)

        own["forward"] = forward
        try:
            return self.prepared(*args, **kwargs)
        finally:
            restore()


def mark_forward_method(prepared: nn.Module, original: nn.Module, name: str) -> None:
    """Has a method of the user's model run through calls of the prepared one, or `ValueError`."""
    if isinstance(vars(prepared).get(name), ForwardMethod) or name == "forward":
        return
    method = getattr(original, name, None)
    if not inspect.ismethod(method):
        raise ValueError(f"mark_forward_method(model, {name!r}): {type(original).__name__} has no method of that name.")
    path = next(path for path, module in prepared.named_modules() if module is original)
    vars(prepared)[name] = ForwardMethod(prepared, path, method.__func__)


def unmark(prepared: nn.Module) -> None:
    """Gives the methods of a model back."""
    for name in [name for name, value in vars(prepared).items() if isinstance(value, ForwardMethod)]:
        del vars(prepared)[name]

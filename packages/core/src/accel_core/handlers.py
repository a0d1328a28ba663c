"""Options under the older names: small data classes handed to `Accelerator(kwargs_handlers=[...])`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal


@dataclass
class KwargsHandler:
    """Base of the option classes. A field that was not set is left to the receiver's own default.

    Attributes:
        on_request: whether its options wait for a call of the user's, so that they are never without a receiver.
    """

    on_request: ClassVar[bool] = False

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from the defaults of the class."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != _default_of(field)
        }


def _default_of(field: Any) -> Any:
    factory = field.default_factory
    return factory() if callable(factory) else field.default


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is started.

    Args:
        backend: backend of `torch.distributed`; None: gloo on CPU, the device's own beside gloo on an accelerator.
        init_method: URL at which the ranks meet; None: what the launcher says.
        timeout: how long a collective may wait; None: torch's default. It holds for every group that is created.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(
                f"InitProcessGroupKwargs(timeout={self.timeout!r}): expected a datetime.timedelta, e.g. "
                f"timedelta(seconds=600)."
            )


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `Accelerator.autocast`.

    Args:
        enabled: False runs the block in full precision.
        cache_enabled: whether weights that were cast are kept until the block ends; None: torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated, beyond `gradient_accumulation_steps`.

    Args:
        num_steps: micro-batches in a window.
        adjust_scheduler: True, given explicitly: an LR scheduler advances by the micro-batches of the window at each
            optimizer step. Otherwise one `scheduler.step()` is one step.
        sync_with_dataloader: whether a window also closes at the end of a prepared loader.
        sync_each_batch: whether gradients are synchronised at each micro-batch (less memory under some strategies, more
            communication; the result is the same).
        mean_over: over how many micro-batches the gradient is averaged: "window", those that are in it, or "steps", `num_steps`
            in a shorter window too, as other libraries do.
    """

    num_steps: int = 1
    adjust_scheduler: bool | None = None
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    mean_over: Literal["window", "steps"] = "window"

    def __post_init__(self) -> None:
        if self.mean_over not in ("window", "steps"):
            raise ValueError(
                f"GradientAccumulationPlugin(mean_over={self.mean_over!r}): expected 'window', the micro-batches that are in it, or "
                f"'steps', num_steps always."
            )
        if type(self.num_steps) is not int or self.num_steps < 1:
            raise ValueError(
                f"GradientAccumulationPlugin(num_steps={self.num_steps!r}): expected an integer of at least 1, the "
                f"number of micro-batches in a window, e.g. GradientAccumulationPlugin(num_steps=4)."
            )

"""Options under the older names: small data classes handed to `Accelerator(kwargs_handlers=[...])`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal

REGIONAL = "use_regional_compilation"


@dataclass
class KwargsHandler:
    """Base of the option classes. A field that was not set is left to the receiver's own default.

    Attributes:
        on_request: whether its options wait for a call of the user's, so that they are never
            without a receiver.
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
    """Options for the start of the process group.

    Args:
        backend: backend of `torch.distributed`; None: gloo on CPU, the device's own beside gloo on
            an accelerator.
        init_method: URL at which the ranks meet; None: what the launcher says.
        timeout: how long a collective may wait, in every group that is created; None: torch's
            default.
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
        cache_enabled: whether weights that were cast are kept until the block ends; None: torch's
            default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation, beyond `gradient_accumulation_steps`.

    Args:
        num_steps: micro-batches in a window.
        adjust_scheduler: True: an LR scheduler advances by the micro-batches of the window at each
            optimizer step. Otherwise one `scheduler.step()` is one step.
        sync_with_dataloader: whether a window also closes at the end of a prepared loader.
        sync_each_batch: whether gradients are synchronised at each micro-batch (less memory under
            some strategies, more communication; the result is the same).
        mean_over: over how many micro-batches the gradient is averaged: "window", those that are in
            it, or "steps", `num_steps` in a shorter window too, as other libraries do.
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


@dataclass
class TrackingKwargs(KwargsHandler):
    """Options for trackers that raise, or take long: they are switched off with one warning, and the training goes on.

    Args:
        strict: whether a tracker's failure, or a value that it cannot record, ends the run with a
            `TrackerError`.
        start_timeout: seconds that a tracker may take to start; the first record waits for it.
        stall_timeout: seconds that it may take for one record. Nobody waits for that.
        finish_timeout: seconds that `end_training`, or the end of the program, waits until
            everything is recorded.
        most_pending: how many records may wait for one tracker, at least 1. Every 10,000 values of
            histograms, images, tensors, arrays and lists, every 10,000 characters of texts, and
            every 100 cells of a table count as one more.

    Raises:
        ValueError: for a number that is not positive.
    """

    strict: bool = False
    start_timeout: float = 120.0
    stall_timeout: float = 60.0
    finish_timeout: float = 300.0
    most_pending: int = 100_000

    def __post_init__(self) -> None:
        for name in ("start_timeout", "stall_timeout", "finish_timeout", "most_pending"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                unit = "a number of records, at least 1" if name == "most_pending" else "a positive number of seconds"
                raise ValueError(f"TrackingKwargs({name}={value!r}): expected {unit}.")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options for compiling prepared models: `Accelerator(dynamo_plugin=TorchDynamoPlugin(mode="reduce-overhead"))`.

    The object is complete: what was said outside of the code is refused beside it. All but the last
    two fields are handed to `torch.compile`.

    Args:
        backend: a name that `torch.compile` knows in either case, a member of `DynamoBackend`, or a
            function of a graph module and its example inputs. "no": nothing is compiled.
        mode: a preset of "inductor", such as "reduce-overhead" or "max-autotune".
        fullgraph: whether a model that is not one graph is an error.
        dynamic: True traces with sizes that may change, False compiles anew for each, None begins
            with fixed ones.
        options: options of the backend, by name. Not together with `mode`.
        disable: True leaves everything uncompiled, to compare with.
        use_regional_compilation: whether the repeated blocks of a model are compiled instead of the
            model: equal ones share one compilation, so that the first step comes soon.

    Raises:
        TypeError: for a value of another type.
        ValueError: if `mode` and `options` are both given.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    def __post_init__(self) -> None:
        for name in ("fullgraph", "dynamic", "disable", REGIONAL):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "dynamic" and value is None):
                raise TypeError(f"TorchDynamoPlugin({name}={value!r}) is a {type(value).__name__}: give True or False.")
        if self.mode is not None and self.options is not None:
            raise ValueError(
                f"TorchDynamoPlugin(mode={self.mode!r}, options={self.options!r}): a mode is a set of options, and torch takes "
                f"one of the two. Leave mode out and name what it stands for in options too, or leave options out."
            )

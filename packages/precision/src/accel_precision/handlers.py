"""Options of precisions under the older names, for `Accelerator(kwargs_handlers=[...])`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel_core import KwargsHandler


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of dynamic loss scaling: `Accelerator(kwargs_handlers=[GradScalerKwargs(...)])`.

    Args:
        init_scale: what losses are multiplied by at first, above 0.
        growth_factor: what the scale is multiplied by after `growth_interval` steps in a row
            without overflow, above 1.
        backoff_factor: what the scale is multiplied by after an overflow, between 0 and 1.
        growth_interval: in steps, at least 1.
        enabled: False leaves losses as they are, and leaves no step out.

    Raises:
        ValueError: for a value out of its range.
        TypeError: for a value of another type.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        check_scaling(self, type(self).__name__)


def check_scaling(options: GradScalerKwargs, owner: str) -> None:
    """Raises for options that no scale could live with.

    Args:
        options: the five.
        owner: what the user gave them to, as in messages.
    """
    for name in ("init_scale", "growth_factor", "backoff_factor"):
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{owner}({name}={value!r}) is a {type(value).__name__}: expected a number.")
    interval = options.growth_interval
    if isinstance(interval, bool) or not isinstance(interval, int):
        raise TypeError(
            f"{owner}(growth_interval={interval!r}) is a {type(interval).__name__}: expected an integer, a number of steps."
        )
    if not isinstance(options.enabled, bool):
        raise TypeError(
            f"{owner}(enabled={options.enabled!r}) is a {type(options.enabled).__name__}: expected True or False."
        )
    for name, holds, formula, example in (
        ("init_scale", 0 < options.init_scale < math.inf, "0 < init_scale < inf", "65536.0"),
        ("growth_factor", 1 < options.growth_factor < math.inf, "1 < growth_factor < inf", "2.0"),
        ("backoff_factor", 0 < options.backoff_factor < 1, "0 < backoff_factor < 1", "0.5"),
        ("growth_interval", interval >= 1, "growth_interval >= 1", "2000"),
    ):
        if not holds:
            raise ValueError(f"{owner}({name}={getattr(options, name)!r}): expected {formula}, e.g. {name}={example}.")

"""Half precision: mixed, for matrix products only, or pure, for everything.

bfloat16 has the range of single precision, and needs nothing else. float16 has more digits and a
small range, so that losses are scaled: see `accel_precision.scaling`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_core import Precision, PrecisionPolicy, World, hookimpl
from accel_precision.capability import require
from accel_precision.handlers import GradScalerKwargs
from accel_precision.scaling import LossScaling

if TYPE_CHECKING:
    from torch.optim import Optimizer


class HalfPrecision(Precision):
    """The base class of these precisions: refuses hardware that cannot compute in the dtype.

    Abstract: a subclass sets `policy`.

    Attributes:
        scaling: the loss scale; None: losses are not scaled.
    """

    scaling: LossScaling | None = None
    _device: torch.device | None = None

    @hookimpl
    def start(self, world: World, replicated: bool) -> None:
        """Remembers where models will run, and puts the scale there."""
        self._device = world.device
        if self.scaling is not None:
            self.scaling.start(world, replicated)

    @hookimpl
    def convert_model(self) -> None:
        """Changes no model; raises `ValueError` if the device cannot compute in the dtype."""
        dtype = self.policy.compute or self.policy.param
        if self._device is not None and dtype is not None:
            require(f"{type(self).__name__}()", dtype, self._device)


class ScaledPrecision(HalfPrecision):
    """The base class of precisions with loss scaling and its options. A subclass gives its dtypes.

    An optimizer whose step is left out has `step_was_skipped`, and
    `accelerator.optimizer_step_was_skipped` is True. What is saved and loaded is the scale.
    """

    scaling: LossScaling
    handlers = (GradScalerKwargs,)

    def __init__(
        self,
        output_dtype: torch.dtype | None = torch.float32,
        reduce_dtype: torch.dtype | None = None,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self.policy = self._dtypes(output_dtype, reduce_dtype)
        self.scaling = LossScaling(
            GradScalerKwargs(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        )

    @staticmethod
    @abstractmethod
    def _dtypes(output: torch.dtype | None, reduce: torch.dtype | None) -> PrecisionPolicy:
        """The policy of this precision."""

    @hookimpl
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """See `LossScaling.scale`."""
        return self.scaling.scale(loss)

    @hookimpl
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """See `LossScaling.unscale`."""
        self.scaling.unscale(optimizer)

    @hookimpl
    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """See `LossScaling.step`."""
        return self.scaling.step(optimizer, step)

    def state_dict(self) -> dict[str, Any]:
        """See `LossScaling.state_dict`."""
        return self.scaling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LossScaling.load_state_dict`."""
        self.scaling.load_state_dict(state)

    def details(self) -> Mapping[str, str]:
        """The dtypes, and where the scale stands. Waits for the device."""
        return {"policy": str(self.policy), "scaler": str(self.scaling)}


class BF16(HalfPrecision):
    """Matrix products in bfloat16, everything else as it is.

    Args:
        output_dtype: number format of the floating-point results of the model, so that losses are
            computed in it. None leaves them as they are, at no cost.
        reduce_dtype: number format in which processes exchange gradients; None: their own.
    """

    def __init__(
        self, output_dtype: torch.dtype | None = torch.float32, reduce_dtype: torch.dtype | None = None
    ) -> None:
        self.policy = PrecisionPolicy(compute=torch.bfloat16, output=output_dtype, reduce=reduce_dtype)


class BF16True(HalfPrecision):
    """Parameters, gradients, states and products in bfloat16: half the memory.

    Updates that are smaller than 1/256 of a parameter are lost, unless the
    optimizer rounds them by chance or keeps what is left over. Floating inputs of the model are
    cast; integers are not.

    Args:
        output_dtype: number format of the floating-point results of the model, so that losses are
            computed in it. None leaves them as they are, at no cost.
        reduce_dtype: number format in which processes exchange gradients; None: their own.
    """

    def __init__(
        self, output_dtype: torch.dtype | None = torch.float32, reduce_dtype: torch.dtype | None = None
    ) -> None:
        self.policy = _pure(torch.bfloat16, output_dtype, reduce_dtype)


class FP16(ScaledPrecision):
    """Matrix products in float16 with loss scaling, everything else as it is.

    Args:
        output_dtype: number format of the floating-point results of the model, so that losses are
            computed in it. None leaves them as they are, at no cost.
        reduce_dtype: number format in which processes exchange gradients; None: their own.
        init_scale: first factor by which losses are multiplied, above 0.
        growth_factor: factor by which the scale grows after `growth_interval` steps in a row
            without overflow, above 1.
        backoff_factor: factor by which the scale shrinks after an overflow, between 0 and 1.
        growth_interval: number of steps in a row without overflow after which the scale grows, at
            least 1.
        enabled: scale losses, and skip steps that overflow. False does neither.

    Raises:
        ValueError: for a value out of its range.
        TypeError: for a value of another type.
    """

    @staticmethod
    def _dtypes(output: torch.dtype | None, reduce: torch.dtype | None) -> PrecisionPolicy:
        return PrecisionPolicy(compute=torch.float16, output=output, reduce=reduce)


class FP16True(ScaledPrecision):
    """Parameters, gradients and states in float16, with loss scaling: half the memory.

    For small or careful models only: gradients are float16 after unscaling
    too, so what is below 6e-8 is lost before the step, and an optimizer's epsilon below that is
    zero. Floating inputs of the model are cast; integers are not.

    Args:
        output_dtype: number format of the floating-point results of the model, so that losses are
            computed in it. None leaves them as they are, at no cost.
        reduce_dtype: number format in which processes exchange gradients; None: their own.
        init_scale: first factor by which losses are multiplied, above 0.
        growth_factor: factor by which the scale grows after `growth_interval` steps in a row
            without overflow, above 1.
        backoff_factor: factor by which the scale shrinks after an overflow, between 0 and 1.
        growth_interval: number of steps in a row without overflow after which the scale grows, at
            least 1.
        enabled: scale losses, and skip steps that overflow. False does neither.

    Raises:
        ValueError: for a value out of its range.
        TypeError: for a value of another type.
    """

    @staticmethod
    def _dtypes(output: torch.dtype | None, reduce: torch.dtype | None) -> PrecisionPolicy:
        return _pure(torch.float16, output, reduce)


def _pure(dtype: torch.dtype, output: torch.dtype | None, reduce: torch.dtype | None) -> PrecisionPolicy:
    return PrecisionPolicy(param=dtype, input=dtype, output=output, reduce=reduce)

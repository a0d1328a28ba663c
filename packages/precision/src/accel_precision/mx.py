"""`mixed_precision="mxfp8"`: linear layers in a format with a scale for each 32 values.

It is a prototype of torchao (`torchao.prototype`), whose interface may move; tried with torchao
0.18. NVFP4 is left out: torchao has kernels of it for training on Blackwell alone, which were never
run here, and no emulation.

Format: OCP Microscaling Formats (MX) Specification v1.0; scales are rounded up to a power of two
("RCEIL").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_core import NotInstalledError, PluginError, Precision, PrecisionPolicy, hookimpl
from accel_core.api.component import how_to_install
from accel_precision.fp8.capability import MXFP8_PRODUCTS, emulates, find
from accel_precision.layer_swap import Rows32, become, has_become, revert, revert_all
from accel_precision.layers import Conversions, Filter, Rule, size_misfit

if TYPE_CHECKING:
    from accel_core import World

_BLOCK = 32
_REMEDIES = {
    "without MX": "mixed_precision='fp8' or 'bf16'",
    "for its numbers at the cost of speed": "mixed_precision=MXFP8(emulate=True)",
}


class MXFP8(Precision):
    """Matrix products of linear layers in MXFP8 by torchao, other products in bfloat16.

    All linear layers are converted whose two sizes are divisible by 32, except the first and the
    last one. Parameters, names and checkpoints stay those of the ordinary model. Products need
    compute capability 10.0 (Blackwell); on a CPU they are emulated, and `accelerator.explain()`
    says so. The products on Blackwell were never run here.

    Args:
        emulate: compute products in high precision from values that were rounded, on any hardware,
            slowly. None: on a CPU alone; an accelerator has to be capable of it.
        high_precision_weight_gradient: compute gradients of weights in bfloat16.
        skip: names of layers that stay as they are, with `*` and `?` as wildcards; the name of a
            module stands for all layers in it.
        convert_ends: convert the first and the last linear layer too.
        module_filter_func: called with each linear layer and its name, says whether it is
            converted.
        output_dtype: number format of what a model returns. None leaves it in bfloat16, at no
            cost.
        reduce_dtype: number format in which gradients travel between processes. None: their own.

    Raises:
        NotInstalledError: if torchao is not installed.
        ValueError: if options contradict each other; in `prepare`: if the hardware is not capable,
            or nothing can be converted.
    """

    def __init__(
        self,
        *,
        emulate: bool | None = None,
        high_precision_weight_gradient: bool = False,
        skip: Sequence[str] = (),
        convert_ends: bool = False,
        module_filter_func: Filter | None = None,
        output_dtype: torch.dtype | None = torch.float32,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.policy = PrecisionPolicy(compute=torch.bfloat16, output=output_dtype, reduce=reduce_dtype)
        self._asked = emulate
        self._high_precision_weight_gradient = high_precision_weight_gradient
        self._conversions = Conversions("mxfp8", Rule.of(skip, convert_ends, module_filter_func))
        self._device: torch.device | None = None
        self._emulates: bool | None = None
        if find_spec("torchao") is None:
            raise NotInstalledError(
                "mxfp8 was asked for, and torchao, which computes it, is not installed. "
                f"{how_to_install('accel-precision[torchao]')}"
            )

    @property
    def converted(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the converted layers, by the name of the model's class."""
        return self._conversions.converted

    @hookimpl
    def start(self, world: World) -> None:
        """Remembers where models will run."""
        self._device = world.device

    @hookimpl
    def convert_model(self, model: nn.Module) -> None:
        """Converts layers in place, on every rank the same ones."""
        assert self._device is not None, "start() runs in the constructor of the Accelerator"
        self._emulates = emulates(self._asked, find(self._device), MXFP8_PRODUCTS, _REMEDIES)
        choice = self._conversions.choose(model, _misfit)
        for layer in choice.taken.values():
            revert(layer)
            become(layer, _converted(layer, self._emulates, self._high_precision_weight_gradient), Rows32)
        self._conversions.record(choice)

    @hookimpl
    def revert_model(self, model: nn.Module) -> None:
        """Layers are `nn.Linear` again."""
        revert_all(model)

    def details(self) -> Mapping[str, str]:
        """Whether products are emulated, and what has become of each model."""
        found = {"policy": str(self.policy), "back end": f"torchao {version('torchao')}, prototype"}
        if self._emulates is not None:
            found["products"] = "emulated" if self._emulates else "in MXFP8, by the device"
        return {**found, **self._conversions.details()}


def _misfit(layer: nn.Linear) -> str | None:
    return None if has_become(layer) else size_misfit(layer, _BLOCK)


def _converted(layer: nn.Linear, emulate: bool, high_precision_weight_gradient: bool) -> nn.Linear:
    kind, preference = _engine()
    made: nn.Linear = kind(
        layer.in_features,
        layer.out_features,
        bias=False,  # both come from the layer
        device="meta",
        kernel_preference=preference.EMULATED if emulate else preference.AUTO,
        wgrad_with_hp=high_precision_weight_gradient,
    )
    made.weight, made.bias = layer.weight, layer.bias
    return made


def _engine() -> tuple[Any, Any]:
    """The layer, and torchao's enumeration of its kernels."""
    try:
        from accel_precision.mx_layers import KernelPreference, MXLinear
    except ImportError as error:
        raise PluginError(
            f"mxfp8 was asked for, but the torchao that is installed has its layer somewhere else: {error}. This version of "
            f"accel-precision was tried with torchao 0.18, which needs torch 2.11: pip install 'torchao==0.18.*', or use mixed_precision='fp8'."
        ) from error
    return MXLinear, KernelPreference

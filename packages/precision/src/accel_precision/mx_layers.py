"""torchao's linear layer in MXFP8, under autocast. Imports a prototype; import it late."""

from __future__ import annotations

import torch
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, _to_mxfp8_then_scaled_mm
from torchao.quantization.quantize_.common import KernelPreference

__all__ = ["KernelPreference", "MXLinear"]


class MXLinear(MXFP8Linear):  # type: ignore[misc]  # torchao is untyped
    """An `MXFP8Linear` whose weight is cast to the dtype of the input, as autocast does.

    torchao's own forward hands both to kernels that take one dtype. The function that it calls has
    no public name; tried with torchao 0.18.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        output: torch.Tensor = _to_mxfp8_then_scaled_mm(
            input,
            self.weight.to(input.dtype),
            kernel_preference=self.kernel_preference,
            scale_calculation_mode=self.scale_calculation_mode,
            wgrad_with_hp=self.wgrad_with_hp,
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)

"""Linear layers that torchao, Transformer Engine or bitsandbytes replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from accel_compat.availability import torchao_required


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and the last linear layer, which are the most sensitive ones."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Collection[str | None]) -> bool:
    """Whether fp8 can have a layer: it is none of those, and a linear one has sizes that 16 divides."""
    fits = not isinstance(module, nn.Linear) or (module.in_features % 16 == 0 and module.out_features % 16 == 0)
    return fits and fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether fp8 can have a layer of `module` which is neither its first nor its last."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether torchao computes a layer in fp8."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Converts the linear layers, but for the first and the last, in place. `mixed_precision="fp8"` does more."""
    from torchao.float8 import convert_to_float8_training

    ends = find_first_last_linear_layers(model)
    chosen = module_filter_func or (lambda module, name: filter_linear_layers(module, name, ends))
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a layer is of Transformer Engine."""
    return any(type(module).__module__.startswith("transformer_engine.") for module in model.modules())


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a layer of bitsandbytes has weights of 4 bits."""
    return any(
        type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes.")
        for module in model.modules()
    )

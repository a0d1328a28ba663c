"""fp8 by torchao 0.18: linear layers become `Float8Linear` and keep their parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_core.api.component import override_class
from accel_precision.fp8.gathered import plain_weight
from accel_precision.layer_swap import Rows16, become, has_become, revert
from accel_precision.layers import size_misfit

if TYPE_CHECKING:
    from accel_precision.fp8.recipes import AORecipeKwargs
    from accel_precision.layers import Choice, Conversions


def convert(
    model: nn.Module, recipe: AORecipeKwargs, conversions: Conversions, *, emulate: bool, gathered: bool
) -> Choice:
    """Converts the layers that the user's rule takes, in place.

    Args:
        model: the user's model; layers that were converted before are converted anew.
        recipe: the options.
        conversions: chooses the layers.
        emulate: whether products are emulated.
        gathered: whether weights are wrapped, so that they travel in fp8.

    Raises:
        ValueError: from `Conversions.choose`, before anything is changed.
    """
    choice = conversions.choose(model, partial(_misfit, tied=_tied(model) if gathered else Counter()))
    config = configuration(recipe, emulate=emulate, gathered=gathered)
    for layer in choice.taken.values():
        _undo(layer)
        become(layer, _converted(layer, config), Rows16)
    if gathered:
        from accel_precision.fp8.gathering import Gathering

        override_class(model, Gathering)
    return choice


def configuration(recipe: AORecipeKwargs, *, emulate: bool, gathered: bool) -> Any:
    """The `Float8LinearConfig` of a recipe."""
    from torchao.float8 import Float8LinearConfig

    config = recipe.config or Float8LinearConfig.from_recipe_name(recipe.recipe)
    return replace(config, emulate=emulate, enable_fsdp_float8_all_gather=gathered)


def wants_gathering(recipe: AORecipeKwargs) -> bool:
    """Whether weights are to travel in fp8."""
    return recipe.enable_fsdp_float8_all_gather or bool(getattr(recipe.config, "enable_fsdp_float8_all_gather", False))


def wants_emulation(recipe: AORecipeKwargs) -> bool | None:
    """The user's choice of emulation: by option, or a configuration that emulates; None if open."""
    return True if recipe.emulate is None and getattr(recipe.config, "emulate", False) else recipe.emulate


def _converted(layer: nn.Linear, config: Any) -> nn.Linear:
    from torchao.float8 import convert_to_float8_training

    converted: nn.Linear = convert_to_float8_training(layer, config=config)
    return converted


def _undo(layer: nn.Linear) -> None:
    revert(layer)
    inside = plain_weight(layer.weight)
    if inside is not layer.weight:
        layer.weight = nn.Parameter(inside.detach(), layer.weight.requires_grad)


def _misfit(layer: nn.Linear, tied: Counter[int]) -> str | None:
    if tied[id(layer.weight)] > 1:
        return "its weight has a second name, and only one of them could be gathered in fp8"
    return None if has_become(layer) else size_misfit(layer, 16)


def _tied(model: nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))

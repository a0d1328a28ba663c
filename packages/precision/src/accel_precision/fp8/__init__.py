"""fp8: matrix products of linear layers in eight bits, by torchao or Transformer Engine."""

from accel_precision.fp8.component import FP8
from accel_precision.fp8.gathered import plain_weight
from accel_precision.fp8.recipes import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs

__all__ = ["FP8", "AORecipeKwargs", "FP8RecipeKwargs", "TERecipeKwargs", "plain_weight"]

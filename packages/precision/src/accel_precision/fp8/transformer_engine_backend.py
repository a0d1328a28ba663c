"""fp8 by Transformer Engine: its linear layers and layer norms, called in its autocast.

Transformer Engine runs on NVIDIA's devices only, and cannot be installed without one. **Nothing of
`convert` and below it was ever run here**: it is written against the documented interface of
versions 2.0 and later, and its tests are skipped where the engine is missing. `scaling` and the
choice of layers are tested everywhere.

The scales that the engine learns are not saved: parameters keep the names and values of the
ordinary model, so that checkpoints are those of any other precision, and after `load_state` the
engine learns its scales anew, as at the start.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_core.api.component import ClassOverride, override_class, restore_class
from accel_precision.fp8.capability import FP8_PRODUCTS, MXFP8_PRODUCTS
from accel_precision.fp8.recipes import changed
from accel_precision.layers import size_misfit

if TYPE_CHECKING:
    from accel_precision.fp8.capability import Found
    from accel_precision.fp8.recipes import TERecipeKwargs
    from accel_precision.layers import Choice, Conversions

_CALLS = "_accel_te_calls"


def convert(model: nn.Module, recipe: TERecipeKwargs, conversions: Conversions) -> Choice:
    """Replaces linear layers and layer norms by the engine's, which share their parameters.

    Raises:
        ValueError: from `Conversions.choose`, before anything is changed.
    """
    choice = conversions.choose(model, partial(_misfit, model))
    for layer in choice.taken.values():
        _replace(model, layer, _linear(layer))
    for norm in _norms(model):
        _replace(model, norm, _norm(norm))
    name, options = scaling(recipe)
    vars(model)[_CALLS] = (_recipe(name, options), recipe.use_autocast_during_eval)
    override_class(model, _Autocast)
    return choice


def revert(model: nn.Module) -> None:
    """Has calls of a model that was converted compute in the dtype of its parameters."""
    restore_class(model, _Autocast)


def check_device(found: Found, recipe: TERecipeKwargs) -> None:
    """Raises `ValueError` unless the engine runs on a device; it emulates nothing."""
    need = MXFP8_PRODUCTS if recipe.use_mxfp8_block_scaling else FP8_PRODUCTS
    if found.capability is None or found.capability < need.cuda:
        raise ValueError(
            f"{need.products.capitalize()} by Transformer Engine were asked for, and this is a {found}; it runs on NVIDIA's devices of "
            f"compute capability {'.'.join(map(str, need.cuda))} or more. Use FP8(backend='torchao'), which emulates them where it is "
            f"told to, or mixed_precision='bf16'."
        )


def scaling(recipe: TERecipeKwargs) -> tuple[str, dict[str, Any]]:
    """The class in `transformer_engine.common.recipe` and its given arguments; formats by name."""
    names = ["fp8_format"]
    if not recipe.use_mxfp8_block_scaling:
        names += ["margin", "amax_history_len", "override_linear_precision"]
    options = {name: getattr(recipe, name) for name in names if name in changed(recipe)}
    if recipe.use_mxfp8_block_scaling:
        return "MXFP8BlockScaling", options
    return "DelayedScaling", {"amax_compute_algo": recipe.amax_compute_algo, **options}


class _Autocast(ClassOverride):
    """Calls the model inside the engine's autocast; in evaluation only if asked for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recipe, evaluates = vars(self)[_CALLS]
        with _autocast(recipe, enabled=evaluates or self.training):  # type: ignore[attr-defined]
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _Stateless(ClassOverride):
    """An engine's module whose `state_dict()` is that of the ordinary module."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def _autocast(recipe: Any, *, enabled: bool) -> AbstractContextManager[None]:
    import transformer_engine.pytorch as te

    if hasattr(te, "autocast"):  # since 2.8; the older name warns there
        context: AbstractContextManager[None] = te.autocast(enabled=enabled, recipe=recipe)
    else:
        context = te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
    return context


def _recipe(name: str, options: dict[str, Any]) -> Any:
    from transformer_engine.common import recipe

    formats = {"fp8_format": recipe.Format[options["fp8_format"]]} if "fp8_format" in options else {}
    return getattr(recipe, name)(**{**options, **formats})


def _linear(layer: nn.Linear) -> nn.Module:
    import transformer_engine.pytorch as te

    made: nn.Module = te.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device="meta",  # no memory: the parameters come from the layer
    )
    return _sharing(made, layer)


def _norm(layer: nn.LayerNorm) -> nn.Module:
    import transformer_engine.pytorch as te

    made: nn.Module = te.LayerNorm(layer.normalized_shape, eps=layer.eps, dtype=layer.weight.dtype, device="meta")
    return _sharing(made, layer)


def _sharing(made: nn.Module, layer: nn.Module) -> nn.Module:
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(made, name, parameter)
    made.train(layer.training)
    return override_class(made, _Stateless)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts `new` into each place where `old` stands."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _norms(model: nn.Module) -> list[nn.LayerNorm]:
    """The norms that the engine has: over one dim, with weight and bias, without hooks."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.LayerNorm
        and len(module.normalized_shape) == 1
        and len(list(module.parameters(recurse=False))) == 2
        and not _has_hooks(module)
        and module is not model
    ]


def _misfit(model: nn.Module, layer: nn.Linear) -> str | None:
    if layer is model:
        return "it is the model itself, which cannot be replaced: put it into an nn.Module"
    if _has_hooks(layer):
        return "it has hooks, which would be lost"
    return size_misfit(layer, 16)


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks or the like hang on a module, which its successor would lack (torch 2.13)."""
    return any(
        vars(module)[name]
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )

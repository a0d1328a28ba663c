"""`mixed_precision="fp8"`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from accel_core import KwargsHandler, NotInstalledError, Precision, PrecisionPolicy, hookimpl
from accel_core.api.component import how_to_install
from accel_precision.fp8.capability import FP8_PRODUCTS, emulates, find
from accel_precision.fp8.recipes import (
    AORecipeKwargs,
    Backend,
    FP8RecipeKwargs,
    LayerOptions,
    Recipe,
    RecipeName,
    TERecipeKwargs,
)
from accel_precision.layer_swap import revert_all
from accel_precision.layers import Conversions, Filter, Rule

if TYPE_CHECKING:
    from torch import nn

    from accel_core import World

_EXTRAS: Mapping[Backend, str] = {"torchao": "torchao", "transformer_engine": "transformer-engine"}
"""The distribution, which is also the name of an extra of accel-precision, by the module that it brings; in the order of preference."""


class FP8(Precision):
    """Matrix products of linear layers in fp8, other products in bfloat16.

        accelerator = Accelerator(mixed_precision="fp8")
        accelerator = Accelerator(mixed_precision=FP8("rowwise", skip=["lm_head"]))
        accelerator = Accelerator(mixed_precision=FP8(backend="transformer_engine"))

    `prepare` converts layers in place. Parameters, their names, and checkpoints stay those of the
    ordinary model: what is trained in fp8 loads in bf16, and the reverse. All linear layers are
    converted whose two sizes are divisible by 16, except the first and the last one of the model,
    which are the most sensitive ones; subclasses of `nn.Linear`, which compute in their own way,
    stay as they are. Models that are only evaluated are converted too: they compute as they did in
    training. `accelerator.explain()`, and the log at the level "info", tell which layers were
    converted and why the others were not.

    Products need compute capability 8.9 (or AMD's MI300, MI350, RDNA4). On a CPU they are emulated,
    which `explain()` says too: the numbers are those of fp8, the speed is not. Measured against
    float32 on small models, gradients differ by 7 to 15 percent.

    Args:
        recipe: how numbers are scaled into the range of fp8: with one factor per tensor (fastest),
            per row, or per row with gradients of weights in high precision (most exact); in Python
            also an object with all options of a back end, beside which other options about layers
            and products are an error. None: "tensorwise", or the default of the back end.
        backend: library that computes in fp8. None: the one that `recipe` is for, else torchao,
            else Transformer Engine, whichever is installed.
        emulate: compute products in float32 from values that were rounded to fp8, on any hardware,
            slowly. None: on a CPU alone.
        enable_fsdp_float8_all_gather: send weights in fp8 under a strategy that shards them, which
            halves what travels. With the recipe "tensorwise" only; an error under
            other strategies.
        skip: names of layers that stay as they are, with `*` and `?` as wildcards; the name of a
            module stands for all layers in it.
        convert_ends: convert the first and the last linear layer too. They are the most sensitive
            ones.
        module_filter_func: a function that decides for each linear layer, see `LayerOptions`.
        output_dtype: number format of what a model returns. None leaves it in bfloat16, at no
            cost.
        reduce_dtype: number format in which gradients travel between processes. None: their own.

    Raises:
        NotInstalledError: if the back end is not installed.
        ValueError: if options contradict each other; in `prepare`: if the hardware is not capable,
            or nothing can be converted.
    """

    handlers: ClassVar[tuple[type[KwargsHandler], ...]] = (AORecipeKwargs, TERecipeKwargs, FP8RecipeKwargs)

    def __init__(
        self,
        recipe: RecipeName | AORecipeKwargs | TERecipeKwargs | FP8RecipeKwargs | None = None,
        *,
        backend: Backend | None = None,
        emulate: bool | None = None,
        enable_fsdp_float8_all_gather: bool | None = None,
        skip: Sequence[str] | None = None,
        convert_ends: bool | None = None,
        module_filter_func: Filter | None = None,
        output_dtype: torch.dtype | None = torch.float32,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.policy = PrecisionPolicy(compute=torch.bfloat16, output=output_dtype, reduce=reduce_dtype)
        layers = _given(skip=skip, convert_ends=convert_ends, module_filter_func=module_filter_func)
        of_torchao = _given(emulate=emulate, enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather)
        given = [*of_torchao, *layers]
        if isinstance(recipe, LayerOptions) and given:
            raise ValueError(
                f"FP8(recipe={type(recipe).__name__}(...)) was given {', '.join(given)} too, and the object is complete. Give them to "
                f"it: {type(recipe).__name__}({given[0]}=...)."
            )
        self.backend = choose_backend(
            backend,
            recipe,
            lambda module: find_spec(module) is not None,
            list(of_torchao),
        )
        self.recipe = _recipe(recipe, self.backend, layers, of_torchao)
        self._conversions = Conversions(
            "fp8", Rule.of(self.recipe.skip, self.recipe.convert_ends, self.recipe.module_filter_func)
        )
        self._device: torch.device | None = None
        self._replicated = True
        self._emulates: bool | None = None

    @property
    def converted(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the converted layers, by the name of the model's class."""
        return self._conversions.converted

    @hookimpl
    def start(self, world: World, replicated: bool) -> None:
        """Remembers where models will run, and whether every rank holds them whole."""
        self._device, self._replicated = world.device, replicated

    @hookimpl
    def convert_model(self, model: nn.Module, evaluation: bool) -> None:
        """Converts layers in place, on every rank the same ones."""
        assert self._device is not None, "start() runs in the constructor of the Accelerator"
        if isinstance(self.recipe, TERecipeKwargs):
            from accel_precision.fp8 import transformer_engine_backend

            transformer_engine_backend.check_device(find(self._device), self.recipe)
            choice = transformer_engine_backend.convert(model, self.recipe, self._conversions)
        else:
            from accel_precision.fp8 import torchao_backend

            gathered = torchao_backend.wants_gathering(self.recipe)
            self._check_gathering(gathered)
            asked = torchao_backend.wants_emulation(self.recipe)
            self._emulates = emulates(asked, find(self._device), FP8_PRODUCTS, _REMEDIES)
            choice = torchao_backend.convert(
                model,
                self.recipe,
                self._conversions,
                emulate=self._emulates,
                gathered=gathered and not evaluation,  # a strategy may leave such a model whole
            )
        self._conversions.record(choice)

    @hookimpl
    def revert_model(self, model: nn.Module) -> None:
        """Layers are `nn.Linear` again. Transformer Engine's stay, and compute in their dtype.

        So do sharded ones whose weights travel in fp8 (`enable_fsdp_float8_all_gather`): no other
        layer can compute with these.
        """
        if self.backend == "transformer_engine":
            from accel_precision.fp8 import transformer_engine_backend

            transformer_engine_backend.revert(model)
        else:
            revert_all(model)

    def details(self) -> Mapping[str, str]:
        """Back end, recipe, whether products are emulated, and what has become of each model."""
        found = {
            "policy": str(self.policy),
            "back end": f"{self.backend} {version(_EXTRAS[self.backend])}",
            "recipe": _in_words(self.recipe),
        }
        if self._emulates is not None:
            found["products"] = "emulated in float32" if self._emulates else "in fp8, by the device"
        return {**found, **self._conversions.details()}

    def _check_gathering(self, gathered: bool) -> None:
        if gathered and self._replicated:
            raise ValueError(
                "fp8 was given enable_fsdp_float8_all_gather=True, but the strategy holds whole parameters on every rank, so none is "
                "gathered. Leave the option out, or use strategy='fsdp'."
            )


_REMEDIES = {
    "without fp8": "mixed_precision='bf16'",
    "for its numbers at the cost of speed": "mixed_precision=FP8(emulate=True)",
}


def choose_backend(
    asked: Backend | None, recipe: object, installed: Callable[[str], bool], of_torchao: Sequence[str] = ()
) -> Backend:
    """The back end: the one asked for, the recipe's, else the first that is installed.

    Args:
        asked: by name; None: not at all.
        recipe: what was given as such.
        installed: says whether a module can be imported.
        of_torchao: names of further options that were given, and that only torchao has.

    Raises:
        ValueError: for an unknown one, or one that has not the options that were given.
        NotInstalledError: with what to install.
    """
    if asked is not None and asked not in _EXTRAS:
        raise ValueError(
            f"FP8(backend={asked!r}): expected one of {', '.join(map(repr, _EXTRAS))}, or None for the first that is installed."
        )
    implied = _owner(recipe) or ("torchao" if of_torchao else None)
    if asked is not None and implied not in (None, asked):
        named = f"recipe={recipe!r}" if isinstance(recipe, str) else f"recipe={type(recipe).__name__}(...)"
        given = ", ".join(([] if recipe is None else [named]) + list(of_torchao))
        raise ValueError(
            f"FP8(backend={asked!r}) was given {given}, which are options of {implied!r}. Leave backend out, or give "
            f"recipe={'AORecipeKwargs' if asked == 'torchao' else 'TERecipeKwargs'}(...)."
        )
    wanted = asked or implied or next((backend for backend in _EXTRAS if installed(backend)), None) or "torchao"
    if not installed(wanted):
        raise NotInstalledError(
            f"fp8 was asked for, with the back end {wanted!r}, which is not installed. "
            f"{how_to_install(f'accel-precision[{_EXTRAS[wanted]}]')}"
        )
    return wanted


def _owner(recipe: object) -> Backend | None:
    if isinstance(recipe, FP8RecipeKwargs):
        return recipe.wanted
    if isinstance(recipe, TERecipeKwargs):
        return "transformer_engine"
    return "torchao" if isinstance(recipe, (str, AORecipeKwargs)) else None


def _recipe(
    given: object, backend: Backend, layers: Mapping[str, object], of_torchao: Mapping[str, object]
) -> AORecipeKwargs | TERecipeKwargs:
    if isinstance(given, FP8RecipeKwargs):
        return given.recipe_for(backend)
    if isinstance(given, (AORecipeKwargs, TERecipeKwargs)):
        return given
    if given is not None and not isinstance(given, str):
        raise TypeError(
            f"FP8(recipe={given!r}) is a {type(given).__name__}, expected the name of a recipe such as 'rowwise', or "
            f"AORecipeKwargs(...) or TERecipeKwargs(...)."
        )
    options: dict[str, object] = dict(layers)
    if backend == "transformer_engine":
        return TERecipeKwargs(**options)  # type: ignore[arg-type]
    if given is not None:
        options["recipe"] = given
    return AORecipeKwargs(**options, **of_torchao)  # type: ignore[arg-type]


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _in_words(recipe: Recipe) -> str:
    if isinstance(recipe, TERecipeKwargs):
        return "MXFP8 block scaling" if recipe.use_mxfp8_block_scaling else "delayed scaling"
    return recipe.recipe if recipe.config is None else "a Float8LinearConfig of the user's"

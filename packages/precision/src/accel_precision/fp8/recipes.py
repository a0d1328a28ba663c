"""Options of fp8 as data classes, for `FP8(recipe=...)` and `kwargs_handlers=[...]`.

Which class is given decides the back end: `AORecipeKwargs` is torchao's, `TERecipeKwargs` is
Transformer Engine's. `FP8RecipeKwargs` is the older union of both, which says by `backend` whose it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from accel_core import KwargsHandler

if TYPE_CHECKING:
    from torch import nn

Backend = Literal["torchao", "transformer_engine"]
RecipeName = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_OLDER_BACKENDS: Mapping[str, Backend] = {"AO": "torchao", "TE": "transformer_engine"}


@dataclass(kw_only=True)
class LayerOptions(KwargsHandler):
    """The choice of linear layers to convert, for either back end.

    Args:
        skip: patterns of names, with `*` and `?`, of layers that stay as they are; the name of a
            module stands for all layers in it: `skip=["lm_head", "encoder.layers.0"]`.
        convert_ends: whether the first and the last linear layer are converted too. They are the
            most sensitive ones.
        module_filter_func: called with each linear layer and its name, says whether it is
            converted; it decides about the first and the last layer too.
    """

    skip: Sequence[str] = ()
    convert_ends: bool = False
    module_filter_func: Callable[[nn.Module, str], bool] | None = None

    def to_kwargs(self) -> dict[str, Any]:
        """The object itself is the argument `recipe` of `FP8`."""
        return {"recipe": self}


@dataclass
class AORecipeKwargs(LayerOptions):
    """fp8 by torchao. The further arguments are those of `LayerOptions`.

    Args:
        config: a `torchao.float8.Float8LinearConfig`, instead of `recipe` and
            `enable_fsdp_float8_all_gather`.
        recipe: how scales are chosen: one per tensor (fastest), one per row, or one per row with
            the gradient of weights in high precision (most exact).
        emulate: True: products are computed in float32 from values that were rounded to fp8, on any
            hardware, slowly. False: they run in fp8. None: emulated on a CPU, and real on an
            accelerator, which has to be capable of it.
        enable_fsdp_float8_all_gather: whether a strategy that shards parameters gathers weights in
            fp8, which halves what travels. With `recipe="tensorwise"` only.
    """

    config: Any = None
    recipe: RecipeName = "tensorwise"
    emulate: bool | None = None
    enable_fsdp_float8_all_gather: bool = False

    def __post_init__(self) -> None:
        _check_choice(self, "recipe", self.recipe, get_args(RecipeName))
        if self.enable_fsdp_float8_all_gather and self.recipe != "tensorwise":
            raise ValueError(
                f"AORecipeKwargs(recipe={self.recipe!r}, enable_fsdp_float8_all_gather=True): weights that are gathered in fp8 have "
                f"one scale per tensor. Use recipe='tensorwise', or leave enable_fsdp_float8_all_gather out."
            )
        if self.config is not None:
            self._check_config()

    def _check_config(self) -> None:
        found = type(self.config).__name__
        if found != "Float8LinearConfig":
            raise TypeError(
                f"AORecipeKwargs(config=...) was given a {found}, expected a torchao.float8.Float8LinearConfig. A recipe by name "
                f"is AORecipeKwargs(recipe='rowwise')."
            )
        beside = [name for name in ("recipe", "enable_fsdp_float8_all_gather") if name in changed(self)]
        if beside:
            raise ValueError(
                f"AORecipeKwargs was given config= and {', '.join(beside)}, and a Float8LinearConfig says both. Leave one out: "
                f"Float8LinearConfig.from_recipe_name({self.recipe!r}) is the configuration of a recipe."
            )


@dataclass
class TERecipeKwargs(LayerOptions):
    """fp8 by Transformer Engine. The further arguments are those of `LayerOptions`.

    Args:
        use_autocast_during_eval: whether fp8 is used in evaluation too; without, evaluation
            computes in bf16.
        margin: scales leave room for values 2**margin times as large as the largest one that was
            seen.
        interval: Transformer Engine computes scales at every step, so that only 1 is admitted.
        fp8_format: "HYBRID" (e4m3 forward, e5m2 backward), "E4M3", or None: the engine's default.
        amax_history_len: how many steps the largest values are remembered for.
        amax_compute_algo: whether a scale follows the largest of them, or the most recent one.
        override_linear_precision: for the products of forward, gradient of inputs, gradient of
            weights: whether it is computed in high precision.
        use_mxfp8_block_scaling: whether each block of 32 values has a scale of its own, instead of
            delayed scaling; needs compute capability 10.0.
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: Literal["HYBRID", "E4M3"] | None = None
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False

    def __post_init__(self) -> None:
        _check_scaling(self)
        of_delayed = ("margin", "amax_history_len", "amax_compute_algo", "override_linear_precision")
        idle = [name for name in of_delayed if name in changed(self)] if self.use_mxfp8_block_scaling else []
        if idle:
            raise ValueError(
                f"TERecipeKwargs(use_mxfp8_block_scaling=True) was given {', '.join(idle)}, which only delayed scaling has. Leave "
                f"them out, or leave use_mxfp8_block_scaling out."
            )


@dataclass
class FP8RecipeKwargs(LayerOptions):
    """The fields of `TERecipeKwargs` under the older name, for either back end.

    Args:
        backend: "AO", "TE", or None: Transformer Engine if one of its options was given, else
            whichever is installed, torchao first.
        opt_level: of MS-AMP, which is not supported: anything but None raises.
    """

    backend: Literal["AO", "TE"] | None = None
    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: Literal["HYBRID", "E4M3"] | None = None
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    opt_level: str | None = None

    def __post_init__(self) -> None:
        if self.opt_level is not None or str(self.backend) == "MSAMP":
            raise ValueError(
                f"FP8RecipeKwargs(backend={self.backend!r}, opt_level={self.opt_level!r}) asks for MS-AMP, which is no longer maintained "
                f"and not supported. Use AORecipeKwargs() for torchao, or TERecipeKwargs() for Transformer Engine."
            )
        _check_choice(self, "backend", self.backend, (*_OLDER_BACKENDS, None))
        _check_scaling(self)
        if self.backend == "AO" and self._of_te():
            raise ValueError(
                f"FP8RecipeKwargs(backend='AO') was given {', '.join(self._of_te())}, which only Transformer Engine has. Leave them "
                f"out, or say backend='TE'. AORecipeKwargs has the options of torchao."
            )

    @property
    def wanted(self) -> Backend | None:
        """The back end that these options need; None if either serves."""
        if self.backend is None:
            return "transformer_engine" if self._of_te() else None
        return _OLDER_BACKENDS[self.backend]

    def recipe_for(self, backend: Backend) -> AORecipeKwargs | TERecipeKwargs:
        """These options as the newer class for a back end."""
        shared = {name: getattr(self, name) for name in _names(LayerOptions)}
        if backend == "torchao":
            return AORecipeKwargs(**shared)
        return TERecipeKwargs(**shared, **{name: getattr(self, name) for name in self._of_te()})

    def _of_te(self) -> list[str]:
        return [name for name in changed(self) if name in _names(TERecipeKwargs) - _names(LayerOptions)]


Recipe = AORecipeKwargs | TERecipeKwargs


def changed(options: KwargsHandler) -> list[str]:
    """The names of the fields that differ from the defaults of the class."""
    return [field.name for field in fields(options) if getattr(options, field.name) != field.default]


def _names(kind: type[LayerOptions]) -> set[str]:
    return {field.name for field in fields(kind)}


def _check_scaling(options: TERecipeKwargs | FP8RecipeKwargs) -> None:
    _check_choice(options, "fp8_format", options.fp8_format, ("HYBRID", "E4M3", None))
    _check_choice(options, "amax_compute_algo", options.amax_compute_algo, ("max", "most_recent"))
    name = type(options).__name__
    if options.interval != 1:
        raise ValueError(
            f"{name}(interval={options.interval!r}): Transformer Engine computes scales at every step, and has no such option any "
            f"more. Leave interval out."
        )
    if options.amax_history_len < 1:
        raise ValueError(
            f"{name}(amax_history_len={options.amax_history_len!r}): expected at least 1, the number of steps that are remembered."
        )
    if len(options.override_linear_precision) != 3:
        raise ValueError(
            f"{name}(override_linear_precision={options.override_linear_precision!r}): expected three flags, for the products of "
            f"forward, gradient of inputs and gradient of weights, e.g. (False, False, True)."
        )


def _check_choice(options: KwargsHandler, name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{type(options).__name__}({name}={value!r}): expected one of {listed}.")

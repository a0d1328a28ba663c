"""Options of fp8. Variables `ACCELERATE_FP8_…` fill in what is not given."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import accel_precision
from accel_compat.plugins.handlers import KwargsHandler
from accel_compat.plugins.variables import fill, flag, variable
from accel_core import NotInstalledError

Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]
_PREFIX = "ACCELERATE_FP8_"


@dataclass
class AORecipeKwargs(KwargsHandler):
    """fp8 by torchao. Without a configuration, inner sizes are padded and weights gathered in fp8."""

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if self.config is not None:
            return
        if find_spec("torchao") is None:
            raise NotInstalledError(
                "AORecipeKwargs configures torchao, which is not installed. Type: pip install torchao"
            )
        from torchao.float8 import Float8LinearConfig

        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            if getattr(self, name) is None:
                setattr(self, name, flag(os.environ.get(_PREFIX + name.upper(), "true")))
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )

    def ours(self, shards: bool = True) -> accel_precision.AORecipeKwargs:
        """Our recipe for torchao; without shards nothing is gathered, and a configuration may say so all the same."""
        config = self.config if shards else replace(self.config, enable_fsdp_float8_all_gather=False)
        return accel_precision.AORecipeKwargs(config=config, module_filter_func=self.module_filter_func)


@dataclass
class TERecipeKwargs(KwargsHandler):
    """fp8 by Transformer Engine."""

    use_autocast_during_eval: bool | None = variable(_PREFIX + "USE_AUTOCAST_DURING_EVAL", flag, False)
    margin: int | None = variable(_PREFIX + "MARGIN", int, 0)
    interval: int | None = variable(_PREFIX + "INTERVAL", int, 1)
    fp8_format: FP8Format | None = variable(_PREFIX + "FORMAT", str, "HYBRID")
    amax_history_len: int | None = variable(_PREFIX + "AMAX_HISTORY_LEN", int, 1024)
    amax_compute_algo: AmaxComputeAlgorithm | None = variable(_PREFIX + "AMAX_COMPUTE_ALGO", str, "most_recent")
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = variable(_PREFIX + "USE_MXFP8_BLOCK_SCALING", flag, False)

    def __post_init__(self) -> None:
        fill(self)
        self.fp8_format = str(self.fp8_format).upper()  # type: ignore[assignment]  # checked below
        self.amax_compute_algo = str(self.amax_compute_algo).lower()  # type: ignore[assignment]  # checked below
        if self.fp8_format not in ("HYBRID", "E4M3", "E5M2"):
            raise ValueError(f"`fp8_format` must be one of HYBRID, E4M3 and E5M2, not {self.fp8_format!r}.")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"`amax_compute_algo` must be one of max and most_recent, not {self.amax_compute_algo!r}.")
        if self.override_linear_precision is None:
            products = ("FPROP", "DGRAD", "WGRAD")
            forward, inputs, weights = (flag(os.environ.get(f"{_PREFIX}OVERRIDE_{name}", "no")) for name in products)
            self.override_linear_precision = (forward, inputs, weights)

    def ours(self) -> accel_precision.TERecipeKwargs | accel_precision.FP8RecipeKwargs:
        """Our recipe for Transformer Engine."""
        names = accel_precision.TERecipeKwargs.__dataclass_fields__
        return accel_precision.TERecipeKwargs(**{name: value for name, value in vars(self).items() if name in names})


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """fp8 by MS-AMP, which is no longer maintained and not offered: `ours()` says so."""

    opt_level: OptLevel | None = variable(_PREFIX + "OPT_LEVEL", str, "O2")

    def __post_init__(self) -> None:
        fill(self)
        if self.opt_level not in ("O1", "O2"):
            raise ValueError(f"`opt_level` must be O1 or O2, not {self.opt_level!r}.")

    def ours(self) -> Any:
        """Raises `ValueError`."""
        raise ValueError(
            "MS-AMP is no longer maintained, and not offered. Use AORecipeKwargs() for torchao, or TERecipeKwargs()."
        )


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older union of the two classes above; `backend` says whose it is."""

    backend: Backend | None = variable(_PREFIX + "BACKEND", str, "TE")

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is deprecated: write TERecipeKwargs or AORecipeKwargs.", FutureWarning, stacklevel=3
        )
        super().__post_init__()
        self.backend = str(self.backend).upper()  # type: ignore[assignment]  # checked below
        if self.backend not in ("MSAMP", "TE"):
            raise ValueError(f"`backend` of FP8RecipeKwargs must be MSAMP or TE, not {self.backend!r}.")

    def ours(self) -> Any:
        """The recipe of the back end."""
        return MSAMPRecipeKwargs.ours(self) if self.backend == "MSAMP" else super().ours()

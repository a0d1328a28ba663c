"""How one linear layer is quantised: by the layers of bitsandbytes, or by torchao."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import nn

from accel_core import NotInstalledError
from accel_core.api.component import how_to_install

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """Options of bitsandbytes for `load_and_quantize_model`.

    Both forms run on CPUs, too. Tested there only; accelerators were not.

    Args:
        load_in_8bit: weights of 8 bits, in rows; inputs are quantised for each call.
        llm_int8_threshold: inputs from this magnitude on are computed in full precision.
        load_in_4bit: weights of 4 bits, in blocks.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: whether the scales of blocks are quantised, too.
        bnb_4bit_compute_dtype: of products with 4-bit weights: "fp32", "fp16", "bf16", or a dtype.
        torch_dtype: of all other floating weights. None: float16, for 4 bits the dtype of products.
        skip_modules: names of modules that are not quantised. None: the head, and what is tied.
        keep_in_fp32_modules: names of modules that are not quantised, and float32.

    Raises `ValueError` unless one of the two forms is asked for, and for unknown words.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: torch.dtype | str = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(
                f"BnbQuantizationConfig(load_in_8bit={self.load_in_8bit}, load_in_4bit={self.load_in_4bit}): set one of them."
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is neither 'fp4' nor 'nf4'.")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        otherwise = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype or otherwise)

    @property
    def target_dtype(self) -> torch.dtype | str:
        """The dtype that a quantised weight counts as, for `infer_auto_device_map`."""
        return torch.int8 if self.load_in_8bit else "int4"


def _dtype(option: str, given: torch.dtype | str) -> torch.dtype:
    found = _DTYPES.get(given, getattr(torch, given.removeprefix("torch."), None)) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{option}={given!r} is none of {', '.join(map(repr, _DTYPES))}, and no floating dtype.")
    return found


class Quantizer(Protocol):
    """Quantises linear layers, one at a time. `dtype` is that of other weights, None as they are.

    `offloads`: whether its weights may come and go between two calls of a layer.
    """

    offloads: bool

    target_dtype: torch.dtype | str
    dtype: torch.dtype | None
    skipped: list[str] | None
    kept_wide: list[str]

    def quantize(self, linear: nn.Linear) -> nn.Module:
        """The layer that stands for one with its weights, on their device."""

    def mark(self, model: nn.Module) -> None:
        """Leaves the attributes by which other libraries know a quantised model."""


def quantizer_of(config: object) -> Quantizer:
    """The quantiser for options of bitsandbytes or torchao. `TypeError` for others."""
    if isinstance(config, BnbQuantizationConfig):
        return _Bitsandbytes(config)
    if any(f"{kind.__module__}.{kind.__name__}" == "torchao.core.config.AOBaseConfig" for kind in type(config).__mro__):
        return _Torchao(config)
    raise TypeError(
        f"bnb_quantization_config= is a {type(config).__name__}: pass a BnbQuantizationConfig, or options of "
        f"torchao.quantization, such as its Int8WeightOnlyConfig."
    )


class _Bitsandbytes:
    offloads = False

    def __init__(self, config: BnbQuantizationConfig) -> None:
        self._engine = _engine("bitsandbytes.nn", "bitsandbytes")
        self._config = config
        self.target_dtype, self.dtype = config.target_dtype, cast("torch.dtype | None", config.torch_dtype)
        self.skipped, self.kept_wide = config.skip_modules, list(config.keep_in_fp32_modules or ())

    def quantize(self, linear: nn.Linear) -> nn.Module:
        """Weights are quantised as they come to a device, and are not trained."""
        config, engine, device = self._config, self._engine, linear.weight.device
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        weight = linear.weight.detach()
        with torch.device("meta"):
            if config.load_in_8bit:
                layer = engine.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold)
            else:
                statistics, kind = config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_type
                layer = engine.Linear4bit(*sizes, config.bnb_4bit_compute_dtype, statistics, kind)
        if config.load_in_8bit:
            # From a device it would stay as it is until its first call: only on the way from the host it is quantised.
            layer.weight = engine.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        else:
            layer.weight = engine.Params4bit(
                weight, requires_grad=False, compress_statistics=statistics, quant_type=kind, module=layer
            )
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        quantized: nn.Module = layer.to(device).train(linear.training)
        return quantized

    def mark(self, model: nn.Module) -> None:
        """By these peft knows which layers to train beside."""
        for name, value in (
            ("is_loaded_in_8bit", self._config.load_in_8bit),
            ("is_loaded_in_4bit", self._config.load_in_4bit),
        ):
            setattr(model, name, value)


class _Torchao:
    offloads = True
    dtype: torch.dtype | None = None

    def __init__(self, config: Any) -> None:
        self._quantize = _engine("torchao.quantization", "torchao").quantize_
        self._config = config
        self.target_dtype: torch.dtype | str = "int4" if "Int4" in type(config).__name__ else torch.int8
        self.skipped: list[str] | None = None
        self.kept_wide: list[str] = []

    def quantize(self, linear: nn.Linear) -> nn.Module:
        """The same layer, with another weight. Raises if torchao leaves it as it is, which it does in silence."""
        holder = nn.Sequential(linear)
        self._quantize(holder, self._config)
        if type(holder[0]) is nn.Linear and type(holder[0].weight) is nn.Parameter:
            raise ValueError(
                f"torchao left a linear layer of {linear.in_features} to {linear.out_features} features as it is by {self._config!r}, whose "
                f"groups may not divide it. Pass another configuration, or its name in skip_modules=."
            )
        return holder[0].requires_grad_(False)

    def mark(self, model: nn.Module) -> None:
        """Nobody asks."""


def _engine(module: str, distribution: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalledError(
            f"load_and_quantize_model() needs {distribution}, which cannot be imported ({error}). "
            f"{how_to_install(f'accel-big-model[{distribution}]')}"
        ) from error

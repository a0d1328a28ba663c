"""`DeepSpeedPlugin`: the options of DeepSpeed, as `DeepSpeed` of accel-deepspeed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_compat.plugins.variables import fill, flag, variable
from accel_core import NotInstalledError
from accel_core.api.component import how_to_install

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Strategy

MISSING = f"accel-deepspeed is not installed. {how_to_install('accel-deepspeed')}"
_PREFIX = "ACCELERATE_DEEPSPEED_"
_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Fields that stand for keys of the configuration."""


def _number(value: str) -> Any:
    return int(value) if value.isdigit() else value


def _float(value: str) -> Any:
    return value if value == "auto" else float(value)


@dataclass
class DeepSpeedPlugin:
    """Options of DeepSpeed, or the configuration of its own; `deepspeed_config` is the result of both.

    Attributes:
        hf_ds_config: a dictionary, the path of a JSON file, or an `HfDeepSpeedConfig`; what was
            built from the other options, if it was not given.
        selected: whether it is the active one of several.
    """

    hf_ds_config: Any = variable(_PREFIX + "CONFIG_FILE", str, "none")
    gradient_accumulation_steps: Any = variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _number, "auto")
    gradient_clipping: Any = variable("ACCELERATE_GRADIENT_CLIPPING", _float, "auto")
    zero_stage: Any = variable(_PREFIX + "ZERO_STAGE", int, 2)
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = variable(_PREFIX + "OFFLOAD_OPTIMIZER_DEVICE", str, "none")
    offload_param_device: str | None = variable(_PREFIX + "OFFLOAD_PARAM_DEVICE", str, "none")
    offload_optimizer_nvme_path: str | None = variable(_PREFIX + "OFFLOAD_OPTIMIZER_NVME_PATH", str, "none")
    offload_param_nvme_path: str | None = variable(_PREFIX + "OFFLOAD_PARAM_NVME_PATH", str, "none")
    zero3_init_flag: bool | None = variable(_PREFIX + "ZERO3_INIT", flag)
    zero3_save_16bit_model: bool | None = variable(_PREFIX + "ZERO3_SAVE_16BIT_MODEL", flag, False)
    transformer_moe_cls_names: str | None = variable(_PREFIX + "MOE_LAYER_CLS_NAMES")
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = variable("ACCELERATE_FP8_OPT_LEVEL", str, "O1")

    def __post_init__(self) -> None:
        try:
            kind = import_module("accel_deepspeed").HfDeepSpeedConfig  # an extra
        except ModuleNotFoundError as error:
            raise NotInstalledError(f"DeepSpeedPlugin: {MISSING}") from error
        fill(self)
        if self.enable_msamp is None:
            self.enable_msamp = os.environ.get("ACCELERATE_FP8_BACKEND") == "MSAMP"
        if self.enable_msamp:
            raise ValueError("enable_msamp=True: MS-AMP is no longer maintained, and not offered. Leave it out.")
        if isinstance(self.hf_ds_config, str) and self.hf_ds_config == "none":
            self.hf_ds_config = kind(self._made())
        else:
            self._take_over(kind)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")  # the loop reports
        if self.zero3_init_flag is None:
            self.zero3_init_flag = self.hf_ds_config.is_zero3()
        elif self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warnings.warn("zero3_init_flag is for stage 3 of ZeRO, and is set to False.", stacklevel=3)
            self.zero3_init_flag = False
        self._selected = False

    def _made(self) -> dict[str, Any]:
        def place(name: str) -> dict[str, Any]:
            device, path = getattr(self, f"offload_{name}_device"), getattr(self, f"offload_{name}_nvme_path")
            return {"device": device, "nvme_path": path if device == "nvme" else None}

        made: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": {
                "stage": self.zero_stage,
                "offload_optimizer": place("optimizer"),
                "offload_param": place("param"),
                "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
            },
        }
        return {**made, **({"gradient_clipping": self.gradient_clipping} if self.gradient_clipping else {})}

    def _take_over(self, kind: type[Any]) -> None:
        """Fills "auto" of a given configuration from the fields, and the fields from the rest of it."""
        if not isinstance(self.hf_ds_config, kind):
            self.hf_ds_config = kind(self.hf_ds_config)
        config = self.hf_ds_config.config
        config.setdefault("gradient_accumulation_steps", 1)
        if "zero_optimization" not in config:
            raise ValueError("Please specify the ZeRO optimization config: the key 'zero_optimization' is missing.")
        given = {key: getattr(self, name) for name, key in _KEYS.items() if getattr(self, name) is not None}
        for key in given:
            self.fill_match(key, must_match=False, **given)
        for name, key in _KEYS.items():
            if (value := self.hf_ds_config.get_value(key)) not in (None, "auto"):
                setattr(self, name, value)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Puts a value in the place of "auto"; lists one that differs if it `must_match`."""
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(key) == "auto":
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"`{ds_key_long}` not found in kwargs: the configuration has 'auto' there. Give a value."
                )
            node[key] = kwargs[ds_key_long]
        elif must_match and node.get(key) is not None and node[key] != kwargs.get(ds_key_long, node[key]):
            found = f"- ds {ds_key_long}={node[key]} vs arg {ds_key_long}={kwargs[ds_key_long]}"
            [] if mismatches is None else mismatches.append(found)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fills every "auto" from `kwargs`, by dotted keys; `ValueError` lists values that differ."""
        mismatches = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", mismatches, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, mismatches, must_match, **kwargs)
        if mismatches and not prefix:
            listing = "\n".join(mismatches)
            raise ValueError(f"Please correct the following DeepSpeed config values that mismatch kwargs:\n{listing}")

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a dotted key of the configuration holds "auto"."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration, or `default`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Writes a precision into the configuration, where it says nothing of its own."""
        config, low = self.deepspeed_config, {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(mixed_precision)
        if low is not None:
            other = "bf16" if low == "fp16" else "fp16"
            if str(config.get(other, {}).get("enabled", False)).lower() == "true":
                raise ValueError(
                    f"mixed_precision={mixed_precision!r} was asked for, and the configuration has {other!r}."
                )
            config.setdefault(low, {"enabled": True, **({"auto_cast": True} if low == "fp16" else {})})
        for name in ("fp16", "bf16"):
            config.setdefault(name, {"enabled": False})
            kwargs: dict[str, Any] = {f"{name}.enabled": name == low}
            self.fill_match(f"{name}.enabled", must_match=False, **kwargs)

    def set_deepspeed_weakref(self) -> None:
        """Tells transformers that models are built under this configuration."""
        integrations: Any = import_module("transformers.integrations")
        config = {**self.deepspeed_config}
        for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(name, "auto") == "auto":
                config[name] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        integrations.unset_hf_deepspeed_config()
        self.dschf = integrations.HfDeepSpeedConfig(config)  # transformers has a weak reference to it

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are shared out while transformers builds them."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Builds models in the block with sharing out, or without it."""
        before = self.zero3_init_flag
        if before == enable:
            yield
            return
        try:
            self.zero3_init_flag = enable
            self.set_deepspeed_weakref()
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Marks the modules of `transformer_moe_cls_names` as gathered as a whole in stage 3."""
        if self.transformer_moe_cls_names is None:
            return
        from deepspeed.utils import set_z3_leaf_modules

        from accel_compat.plugins.module_classes import get_module_class_from_name

        names = self.transformer_moe_cls_names.split(",")
        kinds = {name: get_module_class_from_name(model, name) for name in names}
        if missing := [name for name, kind in kinds.items() if kind is None]:
            raise ValueError(f"Could not find a transformer layer class called {', '.join(missing)} in the model.")
        set_z3_leaf_modules(model, list(kinds.values()))

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Makes it the active one; `AcceleratorState().select_deepspeed_plugin(name)` calls it."""
        if not _from_accelerator_state:
            raise ValueError("A DeepSpeedPlugin is selected by AcceleratorState().select_deepspeed_plugin(name).")
        if self.zero3_init_flag:
            self.set_deepspeed_weakref()
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    @property
    def selected(self) -> bool:
        """Whether it is the active one."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError("A DeepSpeedPlugin is selected by AcceleratorState().select_deepspeed_plugin(name).")

    def ours(self, world_size: int) -> Strategy:  # noqa: ARG002  # every plugin of a strategy is told
        """The strategy; it reads `hf_ds_config` again when a model is prepared."""
        made: Strategy = import_module("accel_deepspeed").DeepSpeedPlugin(
            hf_ds_config=self.hf_ds_config, transformer_moe_cls_names=self.transformer_moe_cls_names
        )
        return made

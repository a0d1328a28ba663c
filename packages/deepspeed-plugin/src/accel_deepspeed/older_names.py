"""A DeepSpeed plugin's older names, for libraries: dotted keys and attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_deepspeed.configuration_file import load

if TYPE_CHECKING:
    from accel_deepspeed.configuration import Configuration


class HfDeepSpeedConfig:
    """A configuration that can be asked by dotted keys, such as "zero_optimization.stage".

    Args:
        config_file_or_dict: the path of a JSON file, or a dictionary, of which a copy is taken; or
            another object of this class.

    Attributes:
        config: the dictionary. `DeepSpeedPlugin` reads it again when a model is prepared.
    """

    def __init__(self, config_file_or_dict: object) -> None:
        self.config, _ = load(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section in which a dotted key stands, or None, and the key in it."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, or `default`."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Deletes a dotted key and its content. ValueError if it `must_exist` and does not."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"The configuration has no {ds_key_long!r} to delete: it has {', '.join(self.config)}.")

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a dotted key holds "auto"."""
        return bool(self.get_value(ds_key_long) == "auto")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a dotted key is there, and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a dotted key is there, and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients are shared out, and parameters are not."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are shared out."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether optimizer state or parameters are offloaded."""
        sections = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{name}.device") in ("cpu", "nvme") for name in sections)


class OlderAttributes:
    """Attributes of `state.deepspeed_plugin`, for transformers and its like, as a base class.

    Attributes:
        configuration: what was read.
    """

    configuration: Configuration
    _hf_ds_config: HfDeepSpeedConfig | None = None

    @property
    def hf_ds_config(self) -> HfDeepSpeedConfig:
        """The configuration with dotted keys; another may be set before a model is prepared."""
        if self._hf_ds_config is None:
            self._hf_ds_config = HfDeepSpeedConfig(whole(self.configuration))
        return self._hf_ds_config

    @hf_ds_config.setter
    def hf_ds_config(self, config: HfDeepSpeedConfig) -> None:
        self._hf_ds_config = config
        self.configuration = self.configuration.reread(config)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The dictionary of `hf_ds_config`."""
        return self.hf_ds_config.config

    @deepspeed_config.setter
    def deepspeed_config(self, config: Mapping[str, Any]) -> None:
        if config is not self.hf_ds_config.config:
            self.hf_ds_config = HfDeepSpeedConfig(config)

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO."""
        return self.configuration.stage

    @property
    def gradient_clipping(self) -> float | None:
        """The norm to which gradients are clipped before each step; None or 0: not at all."""
        return self.configuration.clipping

    @property
    def offload_optimizer_device(self) -> str:
        """The place of optimizer state: "none", "cpu" or "nvme"."""
        return self.configuration.offload_optimizer

    @property
    def offload_param_device(self) -> str:
        """The place of parameters not in use: "none", "cpu" or "nvme"."""
        return self.configuration.offload_param

    @property
    def zero3_init_flag(self) -> bool:
        """False: only `accelerator.build_model` shards a model while it is built."""
        return False

    def is_zero3_init_enabled(self) -> bool:
        """See `zero3_init_flag`."""
        return self.zero3_init_flag

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a dotted key of the configuration holds "auto"."""
        return self.hf_ds_config.is_auto(ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration, or `default`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def current_configuration(self) -> Configuration:
        """The configuration, with changes of libraries to `hf_ds_config.config`."""
        if self._hf_ds_config is not None:
            self.configuration = self.configuration.reread(self._hf_ds_config)
        return self.configuration


def whole(configuration: Configuration) -> dict[str, Any]:
    """The configuration as it was written, with what the arguments beside it say."""
    sections = {"optimizer": configuration.optimizer, "scheduler": configuration.scheduler}
    return {
        **configuration.values,
        "gradient_clipping": "auto" if configuration.clipping is None else configuration.clipping,
        **{name: section for name, section in sections.items() if section is not None},
    }

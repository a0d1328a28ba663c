"""`AcceleratorState`: all its objects are one, the set-up of the Accelerator that was made first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from accel_compat.state.processes import PartialState, Shared
from accel_core import DistributedType


class AcceleratorState(PartialState):
    """The set-up of this process: its processes, its precision, and the plugins of the run.

    An `Accelerator` makes it; later Accelerators have the same precision and plugins. `ValueError` before there is one, and for
    another precision behind it.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs = (
        *PartialState._known_attrs,
        "deepspeed_plugin",
        "fsdp_plugin",
        "megatron_lm_plugin",
        "dynamo_plugin",
    )

    fsdp_plugin: Any = Shared()
    megatron_lm_plugin: Any = Shared()
    dynamo_plugin: Any = Shared()
    parallelism_config: Any = Shared()
    torch_tp_plugin: Any = Shared()
    device_mesh: Any = Shared()
    deepspeed_plugins: Any = Shared()

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        _distributed_type: str | None = None,
        _device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if self._shared_state:
            self._refuse_another(mixed_precision, cpu)
            self.__dict__.update(PartialState._shared_state)
            return
        if not _from_accelerator:
            raise ValueError(
                "AcceleratorState() was asked for before there is an Accelerator. Make one first: Accelerator()."
            )
        processes = PartialState(cpu, **kwargs)
        if _distributed_type is not None:
            processes.distributed_type = DistributedType(_distributed_type)
        self.__dict__.update(PartialState._shared_state)
        self._mixed_precision = mixed_precision or "no"
        self.dynamo_plugin = dynamo_plugin
        plugins = deepspeed_plugin if isinstance(deepspeed_plugin, Mapping) else {"default": deepspeed_plugin}
        self.deepspeed_plugins = None if deepspeed_plugin is None else dict(plugins)
        self._active = next(iter(plugins))
        self.fsdp_plugin, self.megatron_lm_plugin = fsdp_plugin, megatron_lm_plugin
        self.parallelism_config, self.torch_tp_plugin = parallelism_config, torch_tp_plugin
        self.device_mesh = _device_mesh

    @property
    def initialized(self) -> bool:  # type: ignore[override]
        """Whether an Accelerator has made the state."""
        return bool(AcceleratorState._shared_state)

    @property
    def mixed_precision(self) -> str:
        """The name of the precision: "no", "fp16", "bf16", "fp8", or another that is installed."""
        return str(self._mixed_precision)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, and the plugin has the options of torch's second FSDP."""
        return self.distributed_type == DistributedType.FSDP and getattr(self.fsdp_plugin, "fsdp_version", 2) == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin of the run; None where it is not run by DeepSpeed."""
        return None if self.deepspeed_plugins is None else self.deepspeed_plugins[self._active]

    def get_deepspeed_plugin(self, name: str) -> Any:
        """One of several plugins, by its key."""
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """What is prepared from now on runs under the plugin of this key; `ValueError` for another than the one in use."""
        if name not in self.deepspeed_plugins or name != self._active:
            raise ValueError(
                f"select_deepspeed_plugin({name!r}) was asked for, but {self._active!r} is in use, and one Accelerator has one "
                f"strategy. Make a second one with that plugin alone, behind AcceleratorState._reset_state()."
            )

    def _refuse_another(self, mixed_precision: str | None, cpu: bool) -> None:
        what = "was asked for, but the state of this process is made already"
        if cpu and self.device.type != "cpu":
            raise ValueError(f"cpu=True {what}, on {self.device}. Give it to the first Accelerator() of the process.")
        if mixed_precision is not None and mixed_precision != self._mixed_precision:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} {what}, with {self._mixed_precision!r}. Give it to the first "
                f"Accelerator() of the process, or call AcceleratorState._reset_state() before."
            )

    def __repr__(self) -> str:
        plugin = self.deepspeed_plugin
        config = "" if plugin is None else f"ds_config: {plugin.deepspeed_config}\n"
        return f"{PartialState.__repr__(self)}\nMixed precision type: {self.mixed_precision}\n{config}"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forgets the set-up, and the processes too where that is asked for."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()


def is_initialized() -> bool:
    """Whether an Accelerator has made the state of this process."""
    return bool(AcceleratorState._shared_state)

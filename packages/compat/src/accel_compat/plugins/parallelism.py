"""`ParallelismConfig`: sizes of the axes of a mesh, and what each axis is configured by."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import accel_core
from accel_compat.plugins.variables import fill, flag, variable

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

    from accel_compat.plugins.fsdp import FullyShardedDataParallelPlugin

_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@dataclass
class TorchTensorParallelPlugin:
    """The size of tensor parallelism, and the mesh if there is one."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchContextParallelConfig:
    """How keys and values travel in context parallelism."""

    cp_comm_strategy: str | None = variable("PARALLELISM_CONFIG_CP_COMM_STRATEGY", str, "allgather")

    def __post_init__(self) -> None:
        fill(self)
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Must be 'allgather' or 'alltoall'.")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism; an asynchronous one is not offered."""

    enable_async_tp: bool = False


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism."""

    sp_seq_length: int | None = variable(
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH", lambda text: None if text == "None" else int(text)
    )
    sp_seq_length_is_variable: bool | None = variable("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", flag, True)
    sp_attn_implementation: str | None = variable("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")

    def __post_init__(self) -> None:
        fill(self)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ValueError("sp_seq_length has to be given where sp_seq_length_is_variable is False.")
        name = self.sp_attn_implementation
        is_kernel = name is not None and "/" in name and "flash-attn" in name  # of a repository, by its name
        if name is not None and name not in ("flash_attention_2", "flash_attention_3", "sdpa") and not is_kernel:
            raise ValueError(
                f"Invalid sp_attn_implementation: {name}. Must be one that computes parts of sequences: 'flash_attention_2', "
                f"'flash_attention_3', 'sdpa', or a flash-attn kernel of a repository."
            )


@dataclass(repr=False)
class ParallelismConfig:
    """The sizes of the axes; 1 is an axis that is not there."""

    dp_replicate_size: int = variable("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", int, 1)
    dp_shard_size: int = variable("PARALLELISM_CONFIG_DP_SHARD_SIZE", int, 1)
    tp_size: int = variable("PARALLELISM_CONFIG_TP_SIZE", int, 1)
    cp_size: int = variable("PARALLELISM_CONFIG_CP_SIZE", int, 1)
    cp_backend: str = variable("PARALLELISM_CONFIG_CP_BACKEND", str, "torch")
    sp_size: int = variable("PARALLELISM_CONFIG_SP_SIZE", int, 1)
    sp_backend: str = variable("PARALLELISM_CONFIG_SP_BACKEND", str, "deepspeed")
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    device_mesh: ClassVar[Any] = None

    def __post_init__(self) -> None:
        fill(self)
        for axis in _ORDER:
            if (size := getattr(self, f"{axis}_size")) < 1:
                raise ValueError(f"{axis}_size must be at least 1, not {size}.")
        for name, only in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) != only:
                raise ValueError(f"{name} must be {only!r}, not {getattr(self, name)!r}.")
        if self.cp_size > 1 and self.sp_size > 1:
            raise ValueError(f"cp_size={self.cp_size} and sp_size={self.sp_size} exclude each other. Give one of them.")
        if (self.tp_size > 1 or self.cp_size > 1) and self.dp_replicate_size > 1 and self.dp_shard_size == 1:
            raise ValueError(
                f"tp_size={self.tp_size}, cp_size={self.cp_size} and dp_replicate_size={self.dp_replicate_size} need shards, too. "
                f"Give dp_shard_size > 1, or leave dp_replicate_size out."
            )
        kinds: dict[str, type[Any]] = {
            "tp": TorchTensorParallelConfig,
            "cp": TorchContextParallelConfig,
            "sp": DeepSpeedSequenceParallelConfig,
        }
        for axis, kind in kinds.items():
            handler = getattr(self, f"{axis}_handler")
            if getattr(self, f"{axis}_size") > 1 and handler is None:
                setattr(self, f"{axis}_handler", kind())
            elif handler is not None and not isinstance(handler, kind):
                raise ValueError(f"{axis}_handler must be a {kind.__name__}, not a {type(handler).__name__}.")

    def __repr__(self) -> str:
        values = {**asdict(self), "total_size": self.total_size}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def to_json(self) -> dict[str, Any]:
        """The options, nested ones as dictionaries, without the mesh."""
        own = {name: value for name, value in vars(self).items() if name != "device_mesh"}
        return {name: asdict(value) if is_dataclass(value) else copy.deepcopy(value) for name, value in own.items()}  # type: ignore[arg-type]

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self, f"{axis}_size") for axis in _ORDER}

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._sizes[axis] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes along which data differ."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes along which all ranks get the same batch."""
        return self._active("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes along which parameters are cut."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes along which losses are averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of FSDP: replicas, and the joint axis of shards."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes that are there."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def total_size(self) -> int:
        """How many ranks the axes have together."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def non_data_parallel_size(self) -> int:
        """How many ranks get the same batch."""
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def data_parallel_size(self) -> int:
        """How many different batches a step has."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are replicas."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether there are shards."""
        return self.dp_shard_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are cut."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are cut, by torch."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are cut, by DeepSpeed."""
        return self.sp_size > 1

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        names = tuple(self._active(*_ORDER))
        return names, tuple(self._sizes[name] for name in names)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """A mesh with the axes that are there, and joint ones. Collective.

        None without axes, and where DeepSpeed makes groups of its own.
        """
        from torch.distributed.device_mesh import init_device_mesh

        names, shape = self._get_mesh()
        if not names or self.sp_enabled:
            return None
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, axes in joint.items():
            if axes:
                mesh[axes]._flatten(name)  # type: ignore[index]  # torch takes lists, too, and has no public name for joint axes
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh, which is built at the first call with a type of device."""
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("There is no mesh yet: give the device_type, such as 'cuda', to build one.")
            self.device_mesh = self.build_device_mesh(device_type)  # type: ignore[misc]  # of this object
        elif device_type not in (None, self.device_mesh.device_type):
            raise ValueError(f"The mesh is one of {self.device_mesh.device_type!r}, and {device_type!r} was asked for.")
        mesh: DeviceMesh | None = self.device_mesh
        return mesh

    def _set_size(self, parallelism: str, size: int) -> None:
        if parallelism not in _ORDER:
            raise ValueError(f"{parallelism!r} is none of {', '.join(_ORDER)}.")
        setattr(self, f"{parallelism}_size", size)

    def ours(
        self, world_size: int, fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    ) -> accel_core.Strategy | None:
        """FSDP with these axes, and the options of `fsdp_plugin`; DDP for replicas alone; None without axes."""
        if self.sp_enabled:
            raise ValueError(
                f"sp_size={self.sp_size} asks for DeepSpeed's sequence parallelism, which is not offered. Write cp_size={self.sp_size}."
            )
        if self.total_size == 1:
            return None if fsdp_plugin is None else fsdp_plugin.ours(world_size)
        if self.total_size != world_size:
            raise ValueError(
                f"{self!r} has {self.total_size} ranks, and there are {world_size}: change a size, or the number of processes."
            )
        if fsdp_plugin is None and self.active_mesh_dims == ["dp_replicate"]:
            return accel_core.DDP()
        if self.tp_enabled:
            raise ValueError(
                f"tp_size={self.tp_size} does not say which layers are cut. Write Accelerator(strategy=FSDP(tensor_parallel="
                f"{self.tp_size}, parallelize_plan={{...}})), with FSDP of accel_fsdp."
            )
        from accel_compat.plugins.fsdp import FullyShardedDataParallelPlugin

        return (fsdp_plugin or FullyShardedDataParallelPlugin(fsdp_version=2)).ours(
            world_size,
            replicate=self.dp_replicate_size,
            context_parallel=self.cp_size,
        )

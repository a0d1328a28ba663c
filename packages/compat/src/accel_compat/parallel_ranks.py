"""Attributes of the Accelerator about its axes of parallelism."""

from __future__ import annotations

from typing import Any


class ParallelRanks:
    """Where this process stands on each axis of the `ParallelismConfig`."""

    state: Any

    @property
    def parallelism_config(self) -> Any:
        """The axes of the run; None where none were given."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of these axes, if any."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, by the options of torch's second FSDP."""
        return bool(self.state.is_fsdp2)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether several axes may be combined."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process takes part in saving a model: all do where there are axes, else one of each machine."""
        return self.parallelism_config is not None or bool(self.state.is_local_main_process)

    @property
    def tensor_parallel_rank(self) -> int:
        """The part of each layer that this process has; `RuntimeError` without axes."""
        return self._rank_on("tp")

    @property
    def data_parallel_rank(self) -> int:
        """The replica that this process belongs to; `RuntimeError` without axes."""
        return self._rank_on("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The shard that this process has; `RuntimeError` without axes."""
        return self._rank_on("dp_shard")

    @property
    def context_parallel_rank(self) -> int:
        """The part of each sequence that this process has; `RuntimeError` without axes."""
        return self._rank_on("cp")

    def _rank_on(self, axis: str) -> int:
        config = self.parallelism_config
        if config is None:
            raise RuntimeError(f"The rank on the axis {axis!r} was asked for, but no parallelism_config was given.")
        return int(self.torch_device_mesh.get_local_rank(axis)) if getattr(config, f"{axis}_enabled") else 0

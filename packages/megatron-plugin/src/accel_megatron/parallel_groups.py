"""The process groups of Megatron-core, which it keeps in a module: one arrangement per process."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_core import Layout, Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core import World

_arranged: list[Arrangement] = []


@dataclass(frozen=True)
class Sizes:
    """The numbers of processes that share something; `virtual` is stages per process, or None."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1

    def check(self, processes: int) -> None:
        """Raises `ValueError` unless the sizes multiply to a divisor of the number of processes."""
        model = self.tensor * self.pipeline * self.context
        context = f" * context_parallel={self.context}" if self.context > 1 else ""
        formula = f"tensor_parallel={self.tensor} * pipeline_parallel={self.pipeline}{context} = {model}"
        if processes % model:
            raise ValueError(
                f"Megatron: {formula} processes hold one model, but there are {processes}, which is no multiple of that. Start "
                f"{model * max(1, round(processes / model))} processes, or choose other sizes."
            )
        data = processes // (self.tensor * self.pipeline)
        if data % self.expert:
            raise ValueError(
                f"Megatron: expert_parallel={self.expert} shares experts among the {data} processes that have the same part of the other "
                f"layers, and does not divide them. Choose a divisor of {data}."
            )

    def settings(self) -> dict[str, Any]:
        """The sizes as arguments of Megatron's `TransformerConfig`.

        Between two processes, interleaved stages mix up activations and gradients unless sends overlap.
        """
        interleaved = {} if self.virtual is None else {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        return {
            **interleaved,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
        }

    def describe(self) -> str:
        """The sizes that are not 1, in words."""
        named = {name: size for name, size in asdict(self).items() if size not in (1, None)}
        return " × ".join(f"{name} {size}" for name, size in named.items()) or "data parallelism alone"


class Arrangement:
    """Megatron's groups of a world. `close` ends them, before the process group of the world."""

    def __init__(self, world: World, sizes: Sizes, group: ProcessGroup) -> None:
        self.sizes = sizes
        self._group = weakref.ref(group)
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        world.close_before_end(self)

    def is_for(self, group: ProcessGroup, sizes: Sizes) -> bool:
        """Whether these are groups of such sizes beside the same default group."""
        return self._group() is group and self.sizes == sizes

    @property
    def in_use(self) -> bool:
        """Whether a strategy that uses them lives."""
        return self._group() is not None and len(self._users) > 0

    def layout(self, world: World) -> Layout:
        """The data of this rank: all that hold parts of one model read the same. A collective."""
        from megatron.core import parallel_state

        place = Shard(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
        if place.count == world.size:
            return Layout(place)
        sizes, own = self.sizes, None
        ranks = torch.arange(world.size).view(sizes.pipeline, place.count, -1)  # in Megatron's order, "tp-cp-ep-dp-pp"
        for members in ranks.movedim(1, -1).reshape(-1, place.count).tolist():
            group = world.subgroup(members)
            own = group if world.rank in members else own
        return Layout(place, own)

    def used_by(self, user: object) -> None:
        """Keeps note of a strategy, weakly."""
        self._users.add(user)

    def close(self) -> None:
        """Has Megatron forget its groups."""
        if self in _arranged:
            from megatron.core import parallel_state

            _arranged.remove(self)
            parallel_state.destroy_model_parallel()


def arrange(world: World, sizes: Sizes, user: object) -> Arrangement:
    """Has Megatron make its groups, or finds those that it has. A collective.

    Raises:
        RuntimeError: if a strategy that lives uses groups of other sizes.
    """
    group = world.subgroup(range(world.size))  # a world of one has no group before
    if _arranged and not _arranged[0].is_for(group, sizes):
        if _arranged[0].in_use:
            gc.collect()  # an Accelerator that nobody holds may be in a circle of references
        if _arranged and _arranged[0].in_use:
            raise RuntimeError(
                f"Megatron was asked for {sizes.describe()}, but this process has an Accelerator with {_arranged[0].sizes.describe()}, and "
                f"Megatron-core keeps one arrangement of processes at a time. Drop that Accelerator first, with all that it prepared."
            )
        for former in _arranged.copy():
            former.close()
    if not _arranged:
        _initialize(sizes)
        _arranged.append(Arrangement(world, sizes, group))
    _arranged[0].used_by(user)
    return _arranged[0]


def _initialize(sizes: Sizes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of engines that are not installed, at every import
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
        )

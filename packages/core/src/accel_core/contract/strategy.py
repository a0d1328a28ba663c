"""The base of strategies: where parameters live, how gradients meet, who reads which data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from accel_core.contract.loader_progress import PlaceBatch
    from accel_core.loop.preparation import PrepareRequest
    from accel_core.options.handlers import KwargsHandler
    from accel_core.processes.world import World


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` equal parts of the data: this process's data-parallel place."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(
                f"Shard(index={self.index}, count={self.count}) names no part of the data: expected 0 <= index < count. "
                f"Type Shard(world.rank, world.size) for one part per process, or Shard(0, 1) for all of the data."
            )


@dataclass(frozen=True)
class Layout:
    """The position of a process in the data-parallel arrangement.

    Args:
        shard: the part of the data that this process reads.
        data_group: the ranks over which a global batch is spread, in shard order. None: all.
        mesh: the device mesh of the strategy, if it has one.
        gradient_group: the ranks over which a gradient is the mean. None: `data_group`.
        device: where this process computes, if the strategy knows better than torch.
        place_batch: puts batches of prepared loaders there. None: they are moved as they are.
    """

    shard: Shard
    data_group: ProcessGroup | None = None
    mesh: Any = None
    gradient_group: ProcessGroup | None = None
    device: torch.device | None = None
    place_batch: PlaceBatch | None = None

    @classmethod
    def data_parallel(cls, world: World) -> Layout:
        """Every rank reads its own part."""
        return cls(Shard(world.rank, world.size))


class Strategy(ABC):
    """A way to distribute training: see `accel_core.contract.hook_specs`, and `accel_testing`.

    Its constructor arguments are its options, all optional. Subclass this directly; to vary one,
    wrap it. What keeps the process group busy (a DDP wrapper) goes to `World.close_before_end`.

    Attributes:
        handler: the class of option objects for `kwargs_handlers` that stand for its arguments.
        places_models: it puts models on devices; `device_placement=[...]` per object is refused.
        forward_is_collective: forwards of trained models communicate: ranks run equally many.
        replicates_parameters: every data-parallel rank holds all parameters whole.
        distributed_type: `accelerator.distributed_type`, or a word per device type; None: its name.
        older_names: further names for `Accelerator(<name>_plugin=...)` and
            `accelerator.state.<name>_plugin`, beside its entry point's and that of its class.
    """

    handler: ClassVar[type[KwargsHandler] | None] = None
    places_models: ClassVar[bool] = False
    forward_is_collective: ClassVar[bool] = False
    replicates_parameters: ClassVar[bool] = False
    distributed_type: ClassVar[str | Mapping[str, str] | None] = None
    older_names: ClassVar[tuple[str, ...]] = ()

    def details(self) -> Mapping[str, str]:
        """Details for `accelerator.explain()`, as text: its mesh, and how models were divided."""
        return MappingProxyType({})

    def random_state(self) -> Any:
        """The random streams of its engine beside torch's, on this rank; None: there are none."""
        return None

    def load_random_state(self, state: Any, step: int) -> None:  # noqa: ARG002
        """Takes over what `random_state` gave, after torch's streams. May be a collective.

        `state` is None from a checkpoint without, and may be of another arrangement of ranks: then
        streams begin anew, alike for equal backwards so far (`step`).
        """
        return

    @abstractmethod
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """See `accel_core.contract.hook_specs.HookSpecs.prepare_model`. Mark with `hookimpl`."""

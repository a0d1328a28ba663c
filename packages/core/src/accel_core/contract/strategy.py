"""The base class of strategies.

A strategy distributes: it decides where a model's parameters live, how gradients meet, and which
part of the data a process reads. It is a plain object whose constructor arguments are its options,
all optional, and whose methods marked with `hookimpl` take over hooks of
`accel_core.contract.hook_specs`. Only `prepare_model` is mandatory.

What a strategy makes and the user holds on to, and what would keep the process group busy, such as
torch's DDP wrapper, is told to `World.close_before_end`: it is closed before the group ends.

The base class is abstract and has no behaviour: subclass it directly, and not its subclasses; to
vary a strategy, wrap it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.loop.preparation import PrepareRequest
    from accel_core.options.handlers import KwargsHandler


class Strategy(ABC):
    """A way to distribute training. See `accel_core.contract.hook_specs` for the hooks, and `accel_testing` for the suite.

    Class attributes that a strategy may declare:

    - `handler`: the class of option objects for `kwargs_handlers` that stand for its constructor's
      arguments.
    - `places_models`: it puts models on their devices by itself, so `device_placement=[...]` per
      object is refused.
    - `forward_is_collective`: a forward of a trained model communicates, so all ranks have to run
      equally many.
    - `replicates_parameters`: every data-parallel rank holds all parameters whole, so they can be
      averaged (`LocalSGD`).
    - `distributed_type`: the word that `accelerator.distributed_type` says; or one for each type of
      device that the processes compute on. Where it declares none, the word is its name.
    - `older_names`: further names for `Accelerator(<name>_plugin=...)` and
      `accelerator.state.<name>_plugin`, beside its entry point's and that of its class in small
      letters.
    """

    handler: ClassVar[type[KwargsHandler] | None] = None
    places_models: ClassVar[bool] = False
    forward_is_collective: ClassVar[bool] = False
    replicates_parameters: ClassVar[bool] = False
    distributed_type: ClassVar[str | Mapping[str, str] | None] = None
    older_names: ClassVar[tuple[str, ...]] = ()

    def details(self) -> Mapping[str, str]:
        """Details for `accelerator.explain()`, as text: its mesh, say, and how models were divided."""
        return MappingProxyType({})

    @abstractmethod
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """See `accel_core.contract.hook_specs.HookSpecs.prepare_model`. Mark the implementation with `hookimpl`."""

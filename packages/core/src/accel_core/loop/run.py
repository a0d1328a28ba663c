"""The run of one Accelerator, for checkpoints: what has a state, what the user registered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_core.base.errors import CheckpointError
from accel_core.contract.hook_specs import LAYOUT_HOOKS
from accel_core.loading.index_source import has_state

if TYPE_CHECKING:
    from accel_core.contract.default_components import Recorder
    from accel_core.contract.strategy import Layout, Strategy
    from accel_core.contract.tensor_layouts import OptimizerState, State
    from accel_core.loop.accumulation import Accumulation
    from accel_core.loop.preparation import Prepared, PreparedModel
    from accel_core.options.handlers import ProjectConfiguration
    from accel_core.plugins.explain import Explanation
    from accel_core.plugins.manager import Relay
    from accel_core.processes.world import World

SaveHook = Callable[["list[nn.Module]", "list[Mapping[str, Any]]", str], None]
"""`hook(models, weights, output_dir)`, as for `register_save_state_pre_hook`."""
LoadHook = Callable[["list[nn.Module]", str], None]
"""`hook(models, input_dir)`, as for `register_load_state_pre_hook`."""
Asynchronous = bool | Literal["eager", "lazy"]
"""How a save is written behind: False, it is not; True as "eager"."""


@dataclass(frozen=True, eq=False)
class Run:
    """The parts of an Accelerator whose state is saved.

    `components` are the precision, the strategy and the plugins, by the names under which state
    is saved. `declares_layout`: whether the strategy has all of `LAYOUT_HOOKS`.
    `registered` and the hooks are the user's, in order.
    """

    world: World
    relay: Relay
    prepared: Prepared
    accumulation: Accumulation
    strategy: Strategy
    layout: Layout
    components: Mapping[str, object]
    project: ProjectConfiguration
    recorder: Recorder | None
    declares_layout: bool
    explain: Callable[[], Explanation]
    registered: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)

    def models(self) -> list[PreparedModel]:
        """The prepared models, in order."""
        return self.prepared.models

    def names(self) -> dict[int, str]:
        """The parameters of all models by `id`: the index of the model, a dot, and the name."""
        return names_of({number: record.original for number, record in enumerate(self.models())})

    def model_state(self, number: int) -> State:
        """The live entries of one model, under the names that they have in it."""
        record = self.models()[number]
        self._check_layout()
        return self.relay.model_state(record.original, record.prepared)

    def optimizer_states(self) -> list[OptimizerState]:
        """The live state of each prepared optimizer, in order."""
        self._check_layout()
        names = self.names()
        return [self.relay.optimizer_state(optimizer, names) for optimizer in self.prepared.optimizers]

    def register(self, objects: Sequence[Any]) -> None:
        """See `Accelerator.register_for_checkpointing`."""
        bad = [f"{index}: a {type(each).__name__}" for index, each in enumerate(objects) if not has_state(each)]
        if bad:
            what = "register_for_checkpointing() takes objects with state_dict() and load_state_dict(),"
            raise ValueError(f"{what} which these have not: {', '.join(bad)}. Give them these.")
        for each in objects:
            if any(each is other for other in self.registered):
                what = f"register_for_checkpointing() was given a {type(each).__name__} that is registered already"
                raise ValueError(f"{what}, and would be saved twice.")
        self.registered.extend(objects)

    def on_save(self, hook: SaveHook) -> RemovableHandle:
        """See `Accelerator.register_save_state_pre_hook`."""
        return _registered(self.save_hooks, hook)

    def on_load(self, hook: LoadHook) -> RemovableHandle:
        """See `Accelerator.register_load_state_pre_hook`."""
        return _registered(self.load_hooks, hook)

    def _check_layout(self) -> None:
        if not (self.declares_layout or self.strategy.replicates_parameters):
            raise CheckpointError(
                f"The strategy {type(self.strategy).__name__} does not say how it lays out its state, so it cannot be "
                f"saved or loaded. It has to implement the hooks {', '.join(LAYOUT_HOOKS)}, or declare "
                f"replicates_parameters = True."
            )


def names_of(models: Mapping[int, nn.Module]) -> dict[int, str]:
    """By `id`, a name for every parameter: its model's number, a dot, its `state_dict()` name."""
    found: dict[int, str] = {}
    for number, model in models.items():
        for name, value in (*model.state_dict(keep_vars=True).items(), *model.named_parameters()):
            if isinstance(value, nn.Parameter):
                found.setdefault(id(value), f"{number}.{name}")
    return found


def _registered(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

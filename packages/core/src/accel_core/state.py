"""The set-up of a run as an object: of its processes alone, or of an Accelerator."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.base.vocabulary import KNOWN_PROVIDERS, ONE_PROCESS, SEVERAL_PROCESSES, DistributedType
from accel_core.facade.older_arguments import names_of, offered_name
from accel_core.facade.process_methods import ProcessControl, shown
from accel_core.options.handlers import InitProcessGroupKwargs
from accel_core.options.resolution import flag
from accel_core.plugins.offers import list_offers
from accel_core.processes.world import World

if TYPE_CHECKING:
    from accel_core.contract.strategy import Strategy

_PLUGIN_NAMES = re.compile(r"(?P<verb>get_|select_)?(?P<name>\w+?)_plugin|(?P<all>\w+?)_plugins")


class _State(ProcessControl):
    """The common base of both states: the processes, and the set-up of torch under them."""

    initialized = True  # whoever holds this object knows the world
    debug: bool = shown(
        "_world.checks", "Whether collectives are checked before they run: ACCELERATE_DEBUG_MODE at the start."
    )

    @property
    def distributed_type(self) -> DistributedType:
        """`NO` in a world of one, else the word for several processes on this type of device."""
        return self._word(ONE_PROCESS if self.num_processes == 1 else SEVERAL_PROCESSES)

    @property
    def default_device(self) -> torch.device:
        """This machine's accelerator type, the CPU if it has none; `cpu=True` has no effect."""
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @property
    def backend(self) -> str | None:
        """The backend on `device`, such as "gloo"; None for one process; `WorldError` if ended."""
        group = self._world.group
        if group is None:
            return None
        by_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        return by_device.get(self.device.type)

    def set_device(self) -> None:
        """Makes `device` this thread's current one, as it is in the thread that made the world."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def destroy_process_group(self) -> None:
        """Ends the process group, once. Collective. Raises `WorldError` for a foreign one."""
        if self._world.source == "running group":
            what = "destroy_process_group() was called, but the process group was not started by accel_core."
            raise WorldError(f"{what} Call torch.distributed.destroy_process_group() where it was started, at the end.")
        self._world.end()

    def __repr__(self) -> str:
        """The set-up, one fact a line."""
        return "\n".join(f"{name}: {fact}" for name, fact in self._facts().items())

    def _facts(self) -> dict[str, object]:
        return {
            "Distributed type": self.distributed_type,
            "Processes": self.num_processes,
            "Process index": self.process_index,
            "Local process index": self.local_process_index,
            "Device": self.device,
        }

    def _word(self, declared: str | Mapping[str, str]) -> DistributedType:
        """The word that is declared for the type of device in use."""
        kind = self.device.type
        return DistributedType(declared if isinstance(declared, str) else declared.get(kind, f"MULTI_{kind.upper()}"))


class PartialState(_State):
    """Processes of a run, without an Accelerator: who is who, who goes first, and who does what.

        state = PartialState()
        with state.main_process_first():
            prepare_the_files()

    Building the first one is a collective: it starts the process group. `cpu` is as for the
    Accelerator; the others are as in `InitProcessGroupKwargs`. Raises `WorldError`.
    """

    def __init__(
        self,
        cpu: bool | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
    ) -> None:
        chosen = flag("cpu", cpu, "ACCELERATE_USE_CPU", False).value
        options = InitProcessGroupKwargs(backend=backend, init_method=init_method, timeout=timeout)
        self._world = World.current(cpu=chosen or None, **options.to_kwargs())
        self._world.enter(self)

    @classmethod
    def of(cls, world: World) -> PartialState:
        """The state of an existing world, whose process group it does not keep running."""
        state = object.__new__(cls)
        state._world = world
        return state

    def __reduce__(self) -> Any:
        return type(self), ()  # what a pickle gives is a view of the processes where it is loaded

    def __copy__(self, _: object = None) -> PartialState:
        return type(self).of(self._world)  # nothing of a world is copied

    __deepcopy__ = __copy__


@dataclass(frozen=True, eq=False, repr=False)
class AcceleratorState(_State):
    """A read-only view of an Accelerator's set-up, `accelerator.state`; prints one fact a line.

    Besides what `PartialState` has: the precision, and the strategies by key, of which the first is
    in use. Of one named `x`, `x_plugin` is the object if in use, `x_plugins` all by key,
    `get_x_plugin(key)` one; `select_x_plugin(key)` raises for any but the one in use.
    """

    _world: World
    _mixed_precision: str
    strategies: Mapping[str, Strategy]
    _name: str

    mixed_precision = shown("_mixed_precision", 'The name of the precision: "no" for full precision.')

    @property
    def strategy(self) -> Strategy:
        """The strategy in use."""
        return self.strategies[self._active]

    @property
    def distributed_type(self) -> DistributedType:
        """The word that the strategy in use declares for this device, else its name."""
        return self._word(self.strategy.distributed_type or self._own_name)

    @functools.cached_property
    def _own_name(self) -> str:
        return offered_name(type(self.strategy)) or self._name

    @property
    def _active(self) -> str:
        return next(iter(self.strategies))

    def __getattr__(self, name: str) -> Any:
        """The plugin names, which follow from the strategies."""
        found = None if name.startswith("_") else _PLUGIN_NAMES.fullmatch(name)  # copying asks before anything is here
        wanted = "" if found is None else found["name"] or found["all"]
        if found is None or not self._is_strategy(wanted):
            raise AttributeError(f"'AcceleratorState' object has no attribute {name!r}", name=name, obj=self)
        named = {key: each for key, each in self.strategies.items() if wanted in self._names[key]}
        if found["all"]:
            return MappingProxyType(named) if named else None
        if not found["verb"]:
            return named.get(self._active)
        return functools.partial(self._get if found["verb"] == "get_" else self._select, name, named)

    def _get(self, call: str, named: Mapping[str, Strategy], key: str | None = None) -> Strategy:
        wanted = self._active if key is None else key
        if wanted not in named:
            what = f"{call}({'' if key is None else repr(key)}) was asked for, but of that name there is"
            raise ValueError(f"{what} {', '.join(map(repr, named)) or 'none'}, and in use is {self._active!r}.")
        return named[wanted]

    def _select(self, call: str, named: Mapping[str, Strategy], key: str) -> None:
        if self._get(call, named, key) is not self.strategy:
            raise ValueError(
                f"{call}({key!r}) was asked for, but {self._active!r} is in use, and one Accelerator has one strategy. Make a second "
                f"one: Accelerator(strategy=accelerator.state.{call.replace('select_', 'get_', 1)}({key!r}))."
            )

    @functools.cached_property
    def _names(self) -> Mapping[str, set[str]]:
        names = {key: names_of(type(each)) for key, each in self.strategies.items()}
        names[self._active].add(self._name.lower())
        return names

    def _is_strategy(self, name: str) -> bool:
        known = {*KNOWN_PROVIDERS["accel.strategies"]}.union(*self._names.values())  # loops read these: no look further
        return name in known or any(offer.name == name for offer in list_offers("accel.strategies"))

    def _facts(self) -> dict[str, object]:
        facts = {**super()._facts(), "Mixed precision": self.mixed_precision, "Strategy": self._name}
        return facts if len(self.strategies) == 1 else {**facts, "Strategies": ", ".join(self.strategies)}

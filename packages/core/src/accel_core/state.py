"""The set-up of a run as an object: of its processes alone, or of an Accelerator."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.base.suggestions import nearest
from accel_core.base.vocabulary import KNOWN_PROVIDERS, ONE_PROCESS, SEVERAL_PROCESSES, DistributedType
from accel_core.facade.older_arguments import names_of, offered_name
from accel_core.facade.process_methods import ProcessControl
from accel_core.options.handlers import InitProcessGroupKwargs
from accel_core.options.resolution import flag
from accel_core.plugins.offers import list_offers
from accel_core.processes.world import World

if TYPE_CHECKING:
    from accel_core.contract.strategy import Strategy

_PLUGIN_NAMES = re.compile(r"(?P<verb>get_|select_)?(?P<name>\w+?)_plugin|(?P<all>\w+?)_plugins")


class _State(ProcessControl):
    """The common base of both states: the processes, and the set-up of torch under them."""

    _debug: bool

    @property
    def default_device(self) -> torch.device:
        """The type of device that this machine offers, the CPU if it has no accelerator; `cpu=True` has no part in it."""
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @property
    def backend(self) -> str | None:
        """The backend of `torch.distributed` for tensors on `device`, such as "gloo"; None in a world of one.

        Raises `WorldError` once the process group has ended.
        """
        group = self._world.group
        if group is None:
            return None
        by_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        return by_device.get(self.device.type)

    @property
    def initialized(self) -> bool:
        """True: whoever holds this object knows the world."""
        return True

    @property
    def debug(self) -> bool:
        """Whether collectives are to be checked before they run: ACCELERATE_DEBUG_MODE, as it was when this was made."""
        return self._debug

    def set_device(self) -> None:
        """Makes `device` the current one of this thread. In the thread that made the world it is already."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def destroy_process_group(self) -> None:
        """Ends the process group, after everything of ours that uses it has let go. A collective; twice is once.

        `end_training` does this by itself when it is the last user. In a world of one nothing
        happens. Raises `WorldError` if somebody else started the group.
        """
        if self._world.source == "running group":
            raise WorldError(
                f"destroy_process_group() was called, but the process group of these {self.num_processes} ranks was not started "
                f"by accel_core. Call torch.distributed.destroy_process_group() where it was started, at the end."
            )
        self._world.end()


class PartialState(_State):
    """The processes of a run, without an Accelerator: who is who, who goes first, and who does what.

        state = PartialState()
        with state.main_process_first():
            prepare_the_files()

    Building one is a collective when it starts the process group. Two of them share that and
    nothing else. `cpu` is as for the Accelerator; `backend`, `timeout` and `init_method` are as in
    `InitProcessGroupKwargs`. Raises `WorldError` as `World.current` does.
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
        self._take(World.current(cpu=chosen, **options.to_kwargs()))
        self._world.enter(self)

    @classmethod
    def of(cls, world: World) -> PartialState:
        """That of a world which exists already. It does not keep the world's process group running."""
        state = object.__new__(cls)
        state._take(world)
        return state

    def _take(self, world: World) -> None:
        self._world = world
        self._debug = flag("debug", None, "ACCELERATE_DEBUG_MODE", False).value

    @property
    def distributed_type(self) -> DistributedType:
        """`NO` in a world of one, else the word for several processes on this type of device."""
        words = ONE_PROCESS if self.num_processes == 1 else SEVERAL_PROCESSES
        return DistributedType(_word(words, self._world))

    def __copy__(self) -> PartialState:
        return type(self).of(self._world)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialState:
        return type(self).of(self._world)  # nothing of a world is copied

    def __reduce__(self) -> Any:
        return type(self), ()  # what a pickle gives is a view of the processes where it is loaded

    def __repr__(self) -> str:
        """The set-up, one fact a line."""
        return _lines(_facts(self))


class AcceleratorState(_State):
    """A read-only view of an Accelerator's set-up, as `accelerator.state`; printing it shows one fact a line.

    Besides what `PartialState` has: the precision and the strategies. For a strategy named `x`,
    `x_plugin` is the object (None where another strategy is in use), `x_plugins` all that were
    given by key, `get_x_plugin(key)` one of them, and `select_x_plugin(key)` an error for any but
    the one in use: one Accelerator has one strategy.
    """

    _mixed_precision: str
    _strategies: Mapping[str, Strategy]
    _active: str
    _name: str

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "AcceleratorState() was called, but a state belongs to one Accelerator, and nothing is shared behind it. Take "
            "accelerator.state, or PartialState() where no Accelerator is at hand."
        )

    @classmethod
    def of(
        cls,
        processes: PartialState,
        mixed_precision: str,
        strategies: Mapping[str, Strategy],
        active: str,
        name: str,
    ) -> AcceleratorState:
        """That of an Accelerator, whose strategy in use has the key `active` and the name `name`."""
        state = object.__new__(cls)
        vars(state).update(
            _world=processes._world,
            _debug=processes._debug,
            _mixed_precision=mixed_precision,
            _strategies=MappingProxyType(dict(strategies)),
            _active=active,
            _name=name,
        )
        return state

    @property
    def distributed_type(self) -> DistributedType:
        """The word that the strategy in use declares for this device; where it declares none, its name."""
        return DistributedType(_word(self.strategy.distributed_type or self._own_name, self._world))

    @property
    def mixed_precision(self) -> str:
        """The name of the precision: "no" for full precision."""
        return self._mixed_precision

    @property
    def strategy(self) -> Strategy:
        """The strategy in use."""
        return self._strategies[self._active]

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The strategies that were given, by key; the one in use is among them."""
        return self._strategies

    def __getattr__(self, name: str) -> Any:
        """The plugin names, which follow from the strategies."""
        if name.startswith("_"):  # as copying asks for, before there is anything here
            raise AttributeError(name)
        found = _PLUGIN_NAMES.fullmatch(name)
        wanted = "" if found is None else found["name"] or found["all"]
        if found is None or not self._is_strategy(wanted):
            raise AttributeError(self._unknown(name))
        named = {key: each for key, each in self._strategies.items() if wanted in self._names[key]}
        if found["all"]:
            return MappingProxyType(named) if named else None
        if not found["verb"]:
            return named.get(self._active)
        return functools.partial(self._get if found["verb"] == "get_" else self._select, name, named)

    def _get(self, call: str, named: Mapping[str, Strategy], key: str | None = None) -> Strategy:
        wanted = self._active if key is None else key
        if wanted not in named:
            raise ValueError(
                f"{call}({'' if key is None else repr(key)}) was asked for, but of that name there is "
                f"{', '.join(map(repr, named)) or 'none'}, and in use is {self._active!r}. Give the Accelerator all that are "
                f"needed, as one dict of objects by key."
            )
        return named[wanted]

    def _select(self, call: str, named: Mapping[str, Strategy], key: str) -> None:
        wanted = self._get(call, named, key)
        if wanted is not self.strategy:
            getter = call.replace("select_", "get_", 1)
            raise ValueError(
                f"{call}({key!r}) was asked for, but {self._active!r} is in use, and one Accelerator has one strategy for its "
                f"whole life. Make a second one for the other models: Accelerator(strategy=accelerator.state.{getter}({key!r}))."
            )

    @functools.cached_property
    def _own_name(self) -> str:
        return offered_name(type(self.strategy)) or self._name

    @functools.cached_property
    def _names(self) -> Mapping[str, set[str]]:
        names = {key: names_of(type(each)) for key, each in self._strategies.items()}
        names[self._active].add(self._name.lower())
        return names

    def _is_strategy(self, name: str) -> bool:
        if name in KNOWN_PROVIDERS["accel.strategies"] or any(name in names for names in self._names.values()):
            return True
        return any(offer.group == "accel.strategies" and offer.name == name for offer in list_offers())

    def _unknown(self, name: str) -> str:
        plugins = [f"{each}_plugin" for each in sorted(set().union(*self._names.values()))]
        known = [*(each for each in dir(type(self)) if not each.startswith("_")), *plugins]
        near = nearest(name, known)
        hint = f"It has {', '.join(known)}." if near is None else f"Type {near} if that was meant."
        return f"accelerator.state.{name} was asked for, but AcceleratorState has no such attribute. {hint}"

    def __setattr__(self, name: str, *value: object) -> NoReturn:
        raise AttributeError(
            f"accelerator.state.{name} was to be changed, but the state is a read-only view of what the Accelerator was built "
            f"with. Give it to the constructor: Accelerator(...)."
        )

    __delattr__ = __setattr__

    def __repr__(self) -> str:
        """The set-up, one fact a line."""
        facts = {**_facts(self), "Mixed precision": self.mixed_precision, "Strategy": self._name}
        return _lines(facts if len(self._strategies) == 1 else {**facts, "Strategies": ", ".join(self._strategies)})


def _word(declared: str | Mapping[str, str], world: World) -> str:
    """The word that a strategy declares for the type of device in use."""
    kind = world.device.type
    return declared if isinstance(declared, str) else declared.get(kind, f"MULTI_{kind.upper()}")


def _facts(processes: ProcessControl) -> dict[str, object]:
    return {
        "Distributed type": processes.distributed_type,
        "Processes": processes.num_processes,
        "Process index": processes.process_index,
        "Local process index": processes.local_process_index,
        "Device": processes.device,
    }


def _lines(facts: Mapping[str, object]) -> str:
    return "\n".join(f"{name}: {fact}" for name, fact in facts.items())

"""`PartialState`: all its objects are one, the processes of this run."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import accel_core


class Shared:
    """An attribute that all objects of a class share, and that may be assigned."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, obj: Any, _: type) -> Any:  # no `__set__`: what is in the dictionary is found before this
        if obj is None:
            return self
        raise AttributeError(self._name)  # and `__getattr__` says more


class PartialState(accel_core.PartialState):
    """The processes of this run, the same for every object: who is who, who goes first, and who does what.

    The first object starts the process group, a collective; `kwargs` are those of `InitProcessGroupKwargs`. Later ones are
    given nothing. Attributes may be assigned. A pickle gives the state of the process that loads it.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: tuple[str, ...] = (
        "_cpu", "backend", "debug", "device", "distributed_type", "fork_launched", "local_process_index",
        "num_processes", "process_index",
    )  # fmt: skip

    _cpu: Any = Shared()
    backend: Any = Shared()
    debug: Any = Shared()
    device: Any = Shared()
    distributed_type: Any = Shared()
    fork_launched: Any = Shared()
    local_process_index: Any = Shared()
    num_processes: Any = Shared()
    process_index: Any = Shared()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self._shared_state:
            return
        super().__init__(cpu or None, **kwargs)
        self._cpu = cpu
        self.fork_launched = os.environ.get("FORK_LAUNCHED", "0") not in ("", "0", "false", "False")
        for name in ("device", "num_processes", "process_index", "local_process_index", "backend", "distributed_type"):
            setattr(self, name, getattr(super(), name))

    @property
    def initialized(self) -> bool:  # type: ignore[override]
        """Whether there is a state."""
        return bool(PartialState._shared_state)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return bool(self.num_processes > 1)

    @property
    def is_main_process(self) -> bool:  # type: ignore[override]
        """Whether this is rank 0."""
        return bool(self.process_index == 0)

    @property
    def is_local_main_process(self) -> bool:  # type: ignore[override]
        """Whether this is the first process on its machine."""
        return bool(self.local_process_index == 0)

    @property
    def is_last_process(self) -> bool:  # type: ignore[override]
        """Whether this is the last rank."""
        return bool(self.process_index == self.num_processes - 1)

    @staticmethod
    def _reset_state() -> None:
        """Forgets the state; process groups go on."""
        PartialState._shared_state.clear()

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: DistributedType.{self.distributed_type.name}{backend}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    def destroy_process_group(self, group: Any = None) -> None:
        """Ends one process group of torch, or that of this run. Collective."""
        if group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(group)
        elif not self.fork_launched:
            super().destroy_process_group()

    def __copy__(self, _: object = None) -> PartialState:
        return type(self)()

    __deepcopy__ = __copy__

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in self._known_attrs:
            raise AttributeError(
                f"`{kind}` object has no attribute `{name}`. This happens if `{kind}._reset_state()` ran since the object was made: "
                f"call {'Accelerator' if kind == 'AcceleratorState' else kind}() again."
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

"""Control of processes by place in the run: ranks, order, and who runs a function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from accel_core.base.deprecation import Deprecation
from accel_core.collectives.splitting import is_process, leader_first, only_where, split_between_processes

if TYPE_CHECKING:
    import torch

    from accel_core.processes.world import World

_LOCAL_PROCESS_IDX = Deprecation("local_process_idx=", "local_process_index=", removed_in="1.0")


def shown(path: str, text: str) -> Any:
    """A read-only property: its value at `path` from the object, its docstring `text`."""
    return property(attrgetter(path), doc=text)


class ProcessControl:
    """Base of the Accelerator, its state and `PartialState`: methods that need only the world."""

    _world: World

    device: torch.device = shown("_world.device", "The device of this process.")
    process_index: int = shown("_world.rank", "The rank of this process, from 0.")
    local_process_index: int = shown("_world.local_rank", "The rank of this process on its machine, from 0.")
    num_processes: int = shown("_world.size", "The number of processes that the launcher started.")
    is_main_process: bool = shown("_world.is_main", "Whether this is rank 0.")
    is_local_main_process: bool = shown("_world.is_local_main", "Whether this is the first process on its machine.")
    is_last_process: bool = shown("_world.is_last", "Whether this is the last rank.")

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._world.size > 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  (what was asked for)

    def wait_for_everyone(self) -> None:
        """Returns once every process has come here. Collective."""
        self._world.barrier()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Gives this process its part of `inputs`: `with ... as part:`. No collective.

        Takes a sequence, a tensor or array (split along dim 0), a dataset with a length, or a dict
        of such values of one length, the same on all ranks. Parts are consecutive, and the first
        ones one element longer, unless `apply_padding` repeats the last element.
        """
        return split_between_processes(inputs, self._world, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """A block that the main process runs first: `with accelerator.main_process_first():`.

        Collective, and no place for other collectives. The others wait beyond the timeout of the
        process group, and raise `RuntimeError` if the main process fails in its block.
        """
        return leader_first(self._world, local=False)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A block that each machine's first process runs first: see `main_process_first`."""
        return leader_first(self._world, local=True)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A decorator: the function runs on the main process, else gives None. No collective.

        Works on methods and coroutine functions, with or without parentheses.
        """
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A decorator: the function runs on each machine's first process. See `on_main_process`."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A decorator: the function runs on the last process. See `on_main_process`."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Runs the decorated function on one process: `@accelerator.on_process(process_index=2)`.

        Negative indices count from the end. In a world of one it runs whatever the index. Raises
        `ValueError` where it is written if there is no such process.
        """
        mine = is_process("on_process", "process_index", process_index, self.process_index, self._world, local=False)
        return self._only(function, lambda: mine)

    def on_local_process(
        self,
        function: Callable[..., Any] | None = None,
        local_process_index: int | None = None,
        *,
        local_process_idx: int | None = None,
    ) -> Callable[..., Any]:
        """A decorator: the function runs on one process of each machine. See `on_process`."""
        if local_process_idx is not None:
            _LOCAL_PROCESS_IDX.warn()
            local_process_index = local_process_idx
        asked = ("on_local_process", "local_process_index", local_process_index)
        mine = is_process(*asked, self.local_process_index, self._world, local=True)
        return self._only(function, lambda: mine)

    @staticmethod
    def _only(function: Callable[..., Any] | None, applies: Callable[[], bool]) -> Callable[..., Any]:
        return (lambda function: only_where(applies, function)) if function is None else only_where(applies, function)

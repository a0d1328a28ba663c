"""DeepSpeed's process-wide state: its backend, its groups, and what an engine's making changes."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from accel_deepspeed.operators import chosen_accelerator, without_shared_memory

if TYPE_CHECKING:
    from accel_core import World

_RANK = "LOCAL_RANK"
_started_for: list[weakref.ref[dist.ProcessGroup]] = []


def start(world: World) -> None:
    """Has DeepSpeed use torch's default process group. A collective in a world's first call.

    DeepSpeed keeps its backend and its groups in modules. Those of a group that has ended since are
    dropped, or the engines of the next Accelerator would talk to the dead.

    Raises:
        RuntimeError: if DeepSpeed computes on another kind of device than the world.
    """
    group = world.subgroup(range(world.size))  # a world of one has no group before
    if _started_for and _started_for[0]() is group:
        return
    with environment_of(world), chosen_accelerator():
        import deepspeed
        from deepspeed.accelerator import get_accelerator

    kind = get_accelerator().device_name()
    if kind != world.device.type:
        raise RuntimeError(
            f"strategy 'deepspeed' computes on {kind!r} in this process, but the Accelerator on {world.device.type!r}. Set the environment "
            f"variable DS_ACCELERATOR={world.device.type} before the script starts, or leave cpu= out."
        )
    forget()
    with environment_of(world), without_shared_memory():
        deepspeed.init_distributed(dist_backend=dist.get_backend(group), auto_mpi_discovery=False, verbose=False)
    _started_for[:] = [weakref.ref(group)]


def forget() -> None:
    """Drops the backend and the groups that DeepSpeed keeps."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups._release_process_group_references()
    _started_for.clear()


def shown_rank(world: World) -> AbstractContextManager[None]:
    """A context that sets LOCAL_RANK: DeepSpeed needs it in some forwards; launchers may not."""
    return contextlib.nullcontext() if _RANK in os.environ else _ShownRank(world.local_rank)


class _ShownRank:
    """Sets LOCAL_RANK inside."""

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)

    def __enter__(self) -> None:
        os.environ[_RANK] = self._rank

    def __exit__(self, *_: object) -> None:
        os.environ.pop(_RANK, None)


@contextmanager
def environment_of(world: World) -> Iterator[None]:
    """Shows DeepSpeed the variables that it asks for; restores all variables afterwards.

    What it imports in there is deprecated in torch here and there, which nobody else can mend.
    """
    before = dict(os.environ)
    os.environ[_RANK] = str(world.local_rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

"""Whether a run goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from accel_core import broadcast_object_list, gather_object
from accel_launch.checking.steps import CheckError, Doubt
from accel_launch.checking.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_core import Accelerator, Layout, Shard, World

_AFTER = 3
_SHARE = "To check a folder that all machines see: accel test --folder FOLDER"


class Where(Protocol):
    """The facts about this rank: its world, its layout, and whether all ranks have all parameters."""

    world: World
    layout: Layout
    replicated: bool


def check_checkpoint(make: Callable[[bool], Accelerator], where: Where, folder: Path | None) -> str | tuple[str, Doubt]:
    """That weights and optimizer come back as they were saved. Collective.

    Args:
        make: gives an Accelerator as configured, which saves on each machine by itself if that is
            asked for.
        where: this rank.
        folder: in which a new folder is made, and removed again; None: that for temporary files of
            each machine.
    """
    apart = where.world.local_size != where.world.size and folder is None
    if apart and not where.replicated:
        return "", Doubt(f"not looked at: parts of a checkpoint would lie on different machines. {_SHARE}")
    root = _make_folder(where.world, folder, apart)
    try:
        problem = _round_trip(make(apart), where.layout.shard, root)
        where.world.barrier()
    finally:
        if where.world.is_local_main if apart else where.world.is_main:
            _remove(root, apart)
    if problem:
        raise CheckError(problem)
    text = f"saved and loaded, and {_AFTER} steps went on as before"
    return (text, Doubt(f"each machine saved by itself. {_SHARE}")) if apart else text


def _round_trip(accelerator: Accelerator, shard: Shard, root: Path) -> str:
    """The problem with a checkpoint, in words, or empty; only the main process may find one."""
    training = Training(accelerator, shard)
    first, *later = training.take(1 + _AFTER)
    training.step(first)
    accelerator.save_state(root / "checkpoint")
    saved = training.weights()
    expected = [training.step(batch) for batch in later]
    accelerator.load_state(root / "checkpoint")
    loaded = training.weights()
    found = [training.step(batch) for batch in later]
    changed = [name for name, value in saved.items() if not torch.equal(value, loaded[name])]
    if changed:
        return (
            f"load_state() should bring back what save_state() saved, and other values came for {', '.join(changed)}. The "
            f"strategy is at fault: `accel plugins` says who brings it."
        )
    if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4):
        return (
            f"After load_state(), training should go on as it did after save_state(), with the losses {expected}. Found {found}: "
            f"the state of the optimizer did not come back. The strategy is at fault: `accel plugins` says who brings it."
        )
    return ""


def _make_folder(world: World, folder: Path | None, apart: bool) -> Path:
    """A new folder: one for all, or one for each machine. Collective."""
    told = [tempfile.mkdtemp(prefix="accel-test-", dir=folder) if world.is_main else ""]
    path = Path(broadcast_object_list(told)[0])
    if apart:
        path /= f"machine-of-rank-{world.rank - world.local_rank}"
        if world.is_local_main:
            path.mkdir(parents=True)
        world.barrier()
    # Where it is not there, it would be made anew, and nobody would miss the other parts.
    unseen = [rank for rank, sees in enumerate(gather_object([path.is_dir()])) if not sees]
    if unseen:
        if world.is_main:
            path.rmdir()
        raise CheckError(
            f"--folder {folder} was to be one that all machines see, and what rank 0 makes there is not seen by the ranks "
            f"{', '.join(map(str, unseen))}. Give the folder of a network file system, or leave --folder out."
        )
    return path


def _remove(path: Path, apart: bool) -> None:
    shutil.rmtree(path, ignore_errors=True)  # what is left of temporary files is nothing to fail for
    if apart:
        with suppress(OSError):  # another machine may have a part in it: the last one removes it
            path.parent.rmdir()

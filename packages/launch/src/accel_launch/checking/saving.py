"""Whether a run goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel_core import broadcast_object_list, gather_object
from accel_launch.checking.steps import CheckError, Passed
from accel_launch.checking.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_core import Accelerator, Shard, World

_AFTER = 3
_SHARE = "To check a folder that all machines see: accel test --folder FOLDER"
_FAULT = "The strategy is at fault: `accel plugins` says who brings it."


def check_checkpoint(
    make: Callable[[bool], Accelerator], world: World, shard: Shard, replicated: bool, folder: Path | None
) -> Passed:
    """Checks that weights and optimizer come back as they were saved. Collective.

    `make` gives a configured Accelerator; given True, one that saves on each machine by itself.
    A new folder is made in `folder`, and removed again; None: in each machine's temporary folder.
    """
    apart = world.local_size != world.size and folder is None
    if apart and not replicated:
        return Passed("", f"not looked at: parts of a checkpoint would lie on different machines. {_SHARE}")
    root = _make_folder(world, folder, apart)
    try:
        problem = _round_trip(make(apart), shard, root)
        world.barrier()
    finally:
        if world.is_local_main if apart else world.is_main:
            shutil.rmtree(root, ignore_errors=True)  # what is left of temporary files is nothing to fail for
        if apart and world.is_local_main:
            with suppress(OSError):  # another machine may have a part in it: the last one removes it
                root.parent.rmdir()
    if problem:
        raise CheckError(problem)
    doubt = f"each machine saved by itself. {_SHARE}" if apart else ""
    return Passed(f"saved and loaded, and {_AFTER} steps went on as before", doubt)


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
    if changed := [name for name, value in saved.items() if not torch.equal(value, loaded[name])]:
        return f"load_state() should bring back what save_state() saved, and other values came for {', '.join(changed)}. {_FAULT}"
    if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4):
        return (
            f"After load_state(), training should go on as it did after save_state(), with the losses {expected}. Found "
            f"{found}: the state of the optimizer did not come back. {_FAULT}"
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
    if unseen := [str(rank) for rank, sees in enumerate(gather_object([path.is_dir()])) if not sees]:
        if world.is_main:
            path.rmdir()
        raise CheckError(
            f"--folder {folder} was to be one that all machines see, and what rank 0 makes there is not seen by the "
            f"ranks {', '.join(unseen)}. Give the folder of a network file system, or leave --folder out."
        )
    return path

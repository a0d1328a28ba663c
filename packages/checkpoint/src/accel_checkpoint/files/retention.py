"""Checkpoints with automatic names, `checkpoint_<number>` in one folder: next, newest, surplus."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from accel_checkpoint.files.folder import is_leftover, remove_checkpoint, warn_of_rest
from accel_checkpoint.files.manifest import Manifest, examine, is_complete, unseal
from accel_core import CheckpointError

_STEM = "checkpoint_"
_MANAGED = re.compile(rf"{_STEM}(0|[1-9][0-9]*)")


def name(number: int) -> str:
    """The name of a checkpoint."""
    return f"{_STEM}{number}"


def numbers(root: Path) -> list[int]:
    """The numbers of all folders in `root` named like checkpoints, complete or not, ascending."""
    if not root.is_dir():
        return []
    matches = [(_MANAGED.fullmatch(path.name), path) for path in root.iterdir()]
    return sorted(int(match[1]) for match, path in matches if match and path.is_dir())


def newest(root: Path) -> Path:
    """The complete checkpoint of the highest number; passes over unfinished, raises for damaged."""
    unfinished = []
    for number in reversed(numbers(root)):
        path = root / name(number)
        found = examine(path)
        if isinstance(found, Manifest):
            return path
        if found.kind != "unfinished":
            below = [root / name(each) for each in reversed(numbers(root)) if each < number]
            good = next((each for each in below if isinstance(examine(each), Manifest)), None)
            advice = f'Type load_state("{good}")' if good else "No other is complete: start without load_state()"
            raise CheckpointError(
                f"The newest checkpoint in {root} was to be read, but {path.name} {found.found}. {advice}, or remove that one."
            )
        unfinished.append(path.name)
    none = f"none of {', '.join(unfinished)} has a manifest: no save of ours was finished there"
    said = none if unfinished else "it has none"
    raise CheckpointError(
        f"The newest checkpoint in {root} was to be read, but {said}. Pass a folder to load_state(...), or start without it."
    )


def next_path(root: Path, iteration: int, seen: Collection[int] = ()) -> Path:
    """The path for the checkpoint number `iteration`.

    CheckpointError is raised if it would replace or precede one of another run: one that is not `seen`.
    """
    path = root / name(iteration)
    above = [number for number in numbers(root) if number >= iteration and number not in seen]
    taken = [number for number in above if _is_taken(root / name(number))]
    if not taken:
        return path
    raise CheckpointError(
        f"A checkpoint was to be saved as {path}, but {name(taken[0])} exists already, and this run has neither saved nor loaded "
        f"it: call load_state() first to go on from the newest, or start at ProjectConfiguration(iteration={taken[-1] + 1}). If another "
        f"run saves here too, give each a project_dir of its own."
    )


def enforce(root: Path, limit: int, keep: Path) -> list[Path]:
    """Removes the lowest complete checkpoints until `limit` remain, and leftovers below `keep`.

    Complete is what has a manifest with a valid seal; data are not checked. Other contents of the
    folder stay. Returns what was removed; warns of what cannot be removed.
    """
    kept = _MANAGED.fullmatch(keep.name)
    assert kept is not None, keep
    others = [number for number in numbers(root) if number != int(kept[1]) and is_complete(root / name(number))]
    surplus = others[: max(0, len(others) + 1 - limit)]
    removed = []
    for number in numbers(root):
        path = root / name(number)
        try:
            if number in surplus or (number < int(kept[1]) and is_leftover(path)):
                remove_checkpoint(path)
                removed.append(path)
        except OSError as error:
            warn_of_rest(f"{path}, which the limit of {limit} leaves out,", error)
    return removed


def _is_taken(path: Path) -> bool:
    found = unseal(path)
    # Where anything else stands in the way, the save itself says what it is.
    return isinstance(found, Manifest) or found.kind in {"damaged", "newer"}

"""The transaction of a save: a new data folder, published by replacing one file; then a sweep.

A kill at any moment leaves the previous checkpoint or the new one, and rubbish that the next save
sweeps. Beside `manifest.json` and `data-<id>` the folder may hold whatever the user put there: only
what is named like ours is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from accel_checkpoint.files.disk import failing_with, sync_folder
from accel_checkpoint.files.lock import Lock, holder
from accel_checkpoint.files.manifest import (
    DATA,
    NAME,
    REMOVED,
    TEMPORARY,
    Flaw,
    Manifest,
    unseal,
    write_manifest,
    wrong_files,
)
from accel_core import CheckpointError

# What other libraries leave where they saved a run: a file of each pattern of a row. Weights alone are no checkpoint.
_WEIGHTS = r".+\.safetensors|pytorch_model.*"
_FOREIGN = (
    (_WEIGHTS, r"optimizer(_\d+)?\.bin"),
    (_WEIGHTS, r"scheduler(_\d+)?\.bin"),
    (_WEIGHTS, r"random_states_\d+\.pkl"),
    (r"optimizer(_\d+)?\.bin", r"random_states_\d+\.pkl"),
    (r"\.metadata", r".+\.distcp"),
    (r"latest", r"global_step.+"),
    (r"latest_checkpointed_iteration\.txt",),
)


@dataclass(frozen=True)
class Draft:
    """A checkpoint that the main process writes: `begin`, `publish`, `sweep`, or `discard`."""

    folder: Path
    id: str
    lock: Lock | None = field(default=None, compare=False, repr=False)
    parents: tuple[Path, ...] = field(default=(), compare=False, repr=False)  # folders in which others were made for it

    @property
    def data(self) -> Path:
        """The folder that the files of the checkpoint go into."""
        return self.folder / f"data-{self.id}"

    @classmethod
    def begin(cls, folder: Path, id: str | None = None) -> Draft:
        """Makes the folder and its data folder; sweeps what killed saves left. Not a collective.

        CheckpointError is raised before any write if the place is taken: by a file, by the
        checkpoint of another library or of a newer version, by a run that is saving there.
        """
        draft = cls(folder, secrets.token_hex(8) if id is None else id)
        assert DATA.fullmatch(draft.data.name), id
        text = "a checkpoint cannot be saved here: {}. What was saved here is untouched. Make room, make it writable, or save elsewhere"
        with failing_with(text, folder):
            kept = _check_place(folder)
            parents = _make_folders(folder)
            _check_alone(folder)
            _sweep(folder, kept)
            os.mkdir(draft.data)
            return replace(draft, lock=Lock(draft.data), parents=tuple(parents))

    def publish(self, manifest: Manifest) -> None:
        """Makes the synced files in `data` the checkpoint; if it raises, the previous one stays."""
        assert manifest.id == self.id
        if wrong := wrong_files(self.folder, manifest):
            raise CheckpointError(
                f"A checkpoint was to be published in {self.folder}, but what was written is not what is found in "
                f"{self.data.name}: {', '.join(wrong)}. Save into a folder that all processes share."
            )
        with failing_with(
            "the checkpoint cannot be put on the disk: {}. What was saved here is untouched", self.folder
        ):
            for each in (self.data, self.folder, *self.parents):
                sync_folder(each)  # the data, and the way to them, before the manifest that names them
        write_manifest(self.folder, manifest)
        if self.lock is not None:
            self.lock.release()

    def sweep(self) -> None:
        """Removes the data of the previous checkpoint, after `publish`; warns if it cannot."""
        try:
            _sweep(self.folder, {self.data.name})
        except OSError as error:
            warn_of_rest(f"the data before it, in {self.folder},", error)

    def discard(self) -> None:
        """Removes an unpublished data folder as far as possible; the next save removes the rest."""
        with contextlib.suppress(OSError):  # called because of a failure, which is the one to tell
            found = unseal(self.folder)
            if not isinstance(found, Manifest) or found.id != self.id:
                with _opened(self.folder) as descriptor:
                    _remove(self.data.name, descriptor)
        if self.lock is not None:
            self.lock.release()


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint's folder with all in it; of a link, the link only. Not a collective.

    The manifest is renamed first and removed last: an interrupted removal leaves no checkpoint.
    """
    with failing_with("the checkpoint cannot be removed: {}. Remove the folder by hand", folder):
        if folder.is_symlink():
            os.unlink(folder)
            return
        with _opened(folder, follow=False) as descriptor:
            names = set(os.listdir(descriptor))
            if NAME in names:
                os.replace(NAME, REMOVED, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                os.fsync(descriptor)
                names = names - {NAME} | {REMOVED}
            for name in sorted(names, key=lambda name: (name == REMOVED, name)):
                _remove(name, descriptor)
        os.rmdir(folder)


def is_leftover(folder: Path) -> bool:
    """Whether a folder holds nothing but what a killed save or an interrupted removal left."""
    with os.scandir(folder) as entries:
        found = list(entries)
    names = {entry.name for entry in found}
    if NAME in names or any(holder(folder / name) for name in names if DATA.fullmatch(name)):
        return False
    return REMOVED in names or all(map(_is_rubbish, found))


def warn_of_rest(what: str, error: OSError) -> None:
    """Warns that something cannot be removed after a save that is complete."""
    text = f"The checkpoint was saved, but {what} cannot be removed: {error}. The next save tries again."
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _check_place(folder: Path) -> set[str] | None:
    """The data folders to keep, of the published checkpoint; None: all, as it is not known."""
    found = unseal(folder)
    if isinstance(found, Manifest):
        return {found.data}
    if found.kind == "absent":
        return set()
    if found.kind == "damaged":
        return None
    if found.kind == "unfinished":
        foreign = foreign_files(os.listdir(folder))
        if foreign is None:
            return set()
        found = Flaw("foreign", f"holds a checkpoint of another library: {foreign}")
    raise CheckpointError(f"A checkpoint was to be saved in {folder}, but it {found.found}. Save into another folder.")


def foreign_files(names: Iterable[str]) -> str | None:
    """The files by which the checkpoint of another library is known."""
    for patterns in _FOREIGN:
        found = [next((name for name in sorted(names) if re.fullmatch(pattern, name)), None) for pattern in patterns]
        if all(found):
            return ", ".join(map(str, found))
    return None


def _make_folders(folder: Path) -> list[Path]:
    """Makes a folder and its parents; returns the folders that have new names in them, the innermost first."""
    new = [each for each in (folder, *folder.parents) if not each.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    return [each.parent for each in new]


def _check_alone(folder: Path) -> None:
    """Raises while another run saves there: each would sweep what the other has not published."""
    for name in os.listdir(folder):
        if DATA.fullmatch(name) and (found := holder(folder / name)):
            raise CheckpointError(
                f"A checkpoint was to be saved in {folder}, but another run is saving there: {found}. Save into another folder, or "
                f"end that run."
            )


def _sweep(folder: Path, kept: set[str] | None) -> None:
    """Removes our files but the `kept`; data folders only if `kept` is given, none in use."""
    with _opened(folder) as descriptor:
        with os.scandir(descriptor) as entries:
            rubbish = [entry.name for entry in entries if _is_rubbish(entry)]
        for name in rubbish:
            if not DATA.fullmatch(name) or (
                kept is not None and name not in kept and not _is_named(folder, name) and not holder(folder / name)
            ):
                _remove(name, descriptor)


def _is_named(folder: Path, data: str) -> bool:
    """Whether the manifest names this data folder now: another run may have published it."""
    found = unseal(folder)
    return isinstance(found, Manifest) and found.data == data


def _is_rubbish(entry: os.DirEntry[str]) -> bool:
    """Whether no user made it, unless the manifest names it."""
    if entry.is_dir(follow_symlinks=False):
        return DATA.fullmatch(entry.name) is not None
    return entry.name == REMOVED or TEMPORARY.fullmatch(entry.name) is not None


@contextlib.contextmanager
def _opened(folder: str | Path, inside: int | None = None, *, follow: bool = True) -> Iterator[int]:
    """The descriptor of a folder; it stays that of the folder if another takes its name."""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(folder, flags, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(name: str, inside: int) -> None:
    """Removes a file, a link, or a whole folder, by descriptors: never the target of a link."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=inside)
        return
    with _opened(name, inside, follow=False) as descriptor:
        for each in os.listdir(descriptor):
            _remove(each, descriptor)
    os.rmdir(name, dir_fd=inside)

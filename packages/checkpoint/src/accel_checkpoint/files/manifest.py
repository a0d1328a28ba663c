"""The manifest: the file that makes a folder a checkpoint, written last, replaced in one step.

Its members are in docs/reference/checkpoint-format.md. The last is the seal, the hash of every byte
before the first digit of it. After its digits the file ends with `"`, a line feed, `}` and a line
feed. So a reader takes the last 36 bytes off, hashes what remains, and compares those 36 with the
hash in hexadecimal digits and that ending: one flipped byte is found wherever it is.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_128_hexdigest

from accel_checkpoint.files.disk import failing_with, new_file, read_file, removed_on_failure, sync_folder
from accel_checkpoint.files.stored import is_hash, is_size
from accel_checkpoint.weights.tensor_files import temporary_for
from accel_core import CheckpointError
from accel_core.api.component import how_to_install, listed

NAME = "manifest.json"
FORMAT = "accel-checkpoint"
VERSION = 1
HASH = "xxh3_128"
INDEX = "index.json"

LARGEST = 64 << 20  # bytes of a manifest: none is read, or written, that has more
REMOVED = f"{NAME}.removed"  # what the manifest is called while the folder is taken away
DATA = re.compile(r"data-[0-9a-f]{16}")
TEMPORARY = re.compile(rf"{re.escape(NAME)}\.[0-9a-f]{{8}}\.tmp")

_OPENING = f'{{\n  "format": "{FORMAT}",\n'.encode()
_ENDING = '"\n}\n'
_TAIL = 32 + len(_ENDING)
_SEAL = b'"seal": "'
_SEALED = re.compile(_SEAL + rb"[0-9a-f]{32}" + _ENDING.encode())
_SHOWN = 5  # files in a message


@dataclass(frozen=True)
class FileRecord:
    """The size of a whole file in bytes, and its hash, or "" where that is known by parts."""

    nbytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest."""

    id: str  # 16 hexadecimal digits, new for every save
    created: str  # ISO 8601 in UTC, to the second
    index: FileRecord
    files: Mapping[str, int]  # bytes of every other file in the data folder
    record: Mapping[str, Any]  # what was running, as JSON

    @property
    def data(self) -> str:
        """The name of the folder with the data."""
        return f"data-{self.id}"


class Flaw(NamedTuple):
    """The reason why a folder is no readable checkpoint: `found` follows the name of the folder."""

    kind: Literal["absent", "file", "unfinished", "foreign", "newer", "damaged"]
    found: str


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publishes a checkpoint: readers see the old manifest or the new one. Not a collective."""
    content = _sealed(folder, manifest)
    temporary = temporary_for(folder / NAME)
    untouched = "the checkpoint cannot be published: {}. What was saved here is untouched. Make room, or save elsewhere"
    with failing_with(untouched, folder), removed_on_failure(temporary):
        with new_file(temporary, "{}") as output:
            output.write(memoryview(content))
        os.replace(temporary, folder / NAME)
    undone = "the checkpoint is complete, but a power cut may undo it: {}. Save again, or elsewhere"
    with failing_with(undone, folder):
        sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint, whose files have their sizes. Not a collective.

    FileNotFoundError is raised if there is no folder, CheckpointError for no complete checkpoint.
    """
    found = examine(folder)
    if isinstance(found, Manifest):
        return found
    advice = "Pass one that save_state() wrote"
    if found.kind == "absent":
        text = f"a checkpoint was to be read here, but there is no such folder. {advice}"
        raise FileNotFoundError(errno.ENOENT, text, str(folder))
    raise CheckpointError(f"A checkpoint was to be read from {folder}, but it {found.found}. {advice}.")


def examine(folder: Path) -> Manifest | Flaw:
    """The manifest of a folder, or why it cannot be read; looks for its files. Reads little."""
    manifest = unseal(folder)
    if isinstance(manifest, Flaw):
        return manifest
    wrong = wrong_files(folder, manifest)
    if not wrong:
        return manifest
    found = f"of the files that its manifest names, in {manifest.data}, {listed(wrong, most=_SHOWN)}"
    return Flaw("damaged", f"is damaged: {found}")


def unseal(folder: Path) -> Manifest | Flaw:
    """The manifest of a folder, or why it cannot be read; does not look for its files."""
    try:
        content = read_file(folder / NAME, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return _without_manifest(folder)
    except CheckpointError:
        found = "is a folder" if (folder / NAME).is_dir() else f"is no regular file of at most {LARGEST} bytes"
        return Flaw("foreign", f"holds a manifest of another kind: {NAME} {found}")
    members = _members(content)
    if isinstance(members, Flaw):
        # What ends in a seal of ours is ours, however little of the rest can be read.
        sealed = members.kind != "newer" and _SEALED.search(content[-_TAIL - len(_SEAL) :])
        return (_broken_seal(content) if sealed else None) or members
    return _broken_seal(content) or _manifest(members)


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a manifest that can be read and whose seal holds. Never raises."""
    try:
        return isinstance(unseal(folder), Manifest)
    except OSError:
        return False


def wrong_files(folder: Path, manifest: Manifest) -> list[str]:
    """The errors in files of a manifest, a text each: missing, no file, or of another size."""
    wrong = []
    for name, nbytes in {INDEX: manifest.index.nbytes, **manifest.files}.items():
        try:
            found = os.stat(folder / manifest.data / name)
        except (FileNotFoundError, NotADirectoryError):
            wrong.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(found.st_mode):
            wrong.append(f"{name} is no file")
        elif found.st_size != nbytes:
            wrong.append(f"{name} has {found.st_size} bytes instead of {nbytes}")
    return wrong


def _sealed(folder: Path, manifest: Manifest) -> bytes:
    members = {"format": FORMAT, "version": VERSION, "hash": HASH, **vars(manifest), "seal": ""}
    members |= {"index": asdict(manifest.index), "files": dict(manifest.files), "record": dict(manifest.record)}
    try:
        text = json.dumps(members, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"A checkpoint was to be published in {folder}, but its record of the run is not JSON: {error}."
        ) from error
    body = text[: -len('"\n}')].encode()
    if len(body) + _TAIL > LARGEST:
        raise CheckpointError(
            f"A checkpoint was to be published in {folder}, but its manifest has {len(body) + _TAIL} bytes, and no reader takes more than "
            f"{LARGEST}. Make the record of the run smaller: the configuration of trackers, say."
        )
    return body + f"{xxh3_128_hexdigest(body)}{_ENDING}".encode()


def _without_manifest(folder: Path) -> Flaw:
    if not os.path.lexists(folder):
        return Flaw("absent", "does not exist")
    if not folder.is_dir():
        return Flaw("file", "is a file" if folder.exists() else "is a link that leads nowhere")
    names = os.listdir(folder)
    reason = ""
    if REMOVED in names:
        reason = ": its removal was begun"
    elif any(map(DATA.fullmatch, names)):
        reason = ": a save into it was not finished"
    return Flaw("unfinished", f"has no {NAME}, and so holds no checkpoint{reason}")


def _members(content: bytes) -> dict[str, Any] | Flaw:
    """The members of a manifest of this format, and of a version that is known."""
    try:
        members = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        if content.startswith(_OPENING):
            return Flaw("damaged", f"is damaged: its {NAME} is no longer JSON ({error})")
        return Flaw("foreign", f"holds a manifest of another kind: {NAME} is not JSON ({error})")
    if not isinstance(members, dict) or members.get("format") != FORMAT:
        said = members.get("format") if isinstance(members, dict) else None
        return Flaw("foreign", f'holds a manifest of another kind: its "format" is {said!r:.80}, not {FORMAT!r}')
    version = members.get("version")
    if type(version) is int and version > VERSION:
        known = f"its format has version {version}, and this one reads up to {VERSION}"
        return Flaw(
            "newer", f"was written by a newer accel-core: {known}. {how_to_install('accel-core', upgrade=True)}"
        )
    return members


def _broken_seal(content: bytes) -> Flaw | None:
    found = xxh3_128_hexdigest(content[:-_TAIL])
    tail = content[-_TAIL:].decode("ascii", "backslashreplace")
    if tail == found + _ENDING:
        return None
    expected = tail.removesuffix(_ENDING)
    return Flaw("damaged", f"is damaged: the seal of its {NAME} expects the hash {expected!r}, but {found!r} is found")


def _manifest(members: dict[str, Any]) -> Manifest | Flaw:
    if lies := _lies(members):
        return Flaw("damaged", f"lies: its seal holds, but no accel-core writes what it says: {lies}")
    index = FileRecord(**members["index"])
    return Manifest(members["id"], members["created"], index, members["files"], members["record"])


def _lies(members: dict[str, Any]) -> str:
    """The members that are missing, unknown, or of another kind than they have to be."""
    lies = [
        f"{name} is {members[name]!r:.80}" if name in members else f"{name} is missing"
        for name, holds in _MEMBERS.items()
        if name not in members or not holds(members[name])
    ]
    lies += [f"{name} is unknown" for name in members.keys() - _MEMBERS.keys()]
    return ", ".join(sorted(lies))


def _is_text(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


_is_file_name = _is_text(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # and nothing that leads out of the folder


def _is_index(value: Any) -> bool:
    known = isinstance(value, dict) and value.keys() == {"nbytes", "hash"}
    return known and is_size(value["nbytes"]) and is_hash(value["hash"])


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_file_name(name) and name != INDEX and is_size(nbytes) for name, nbytes in value.items()
    )


_MEMBERS: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: value == FORMAT,
    "version": lambda value: type(value) is int and value == VERSION,
    "hash": lambda value: value == HASH,
    "id": _is_text(r"[0-9a-f]{16}"),
    "created": _is_text(r"[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}(Z|\+00:00)"),
    "index": _is_index,
    "files": _are_files,
    "record": lambda value: isinstance(value, dict),
    "seal": is_hash,
}

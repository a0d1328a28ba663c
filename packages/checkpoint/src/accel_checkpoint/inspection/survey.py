"""Contents of a checkpoint according to its index: no tensor is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accel_checkpoint.files.index import Index
from accel_checkpoint.files.manifest import Manifest, read_manifest, unreplaced
from accel_checkpoint.files.part_file import PartReader

_ORDER = ("model", "optimizer", "scheduler", "loader", "object")


class Unit(NamedTuple):
    """A model, an optimizer, or whatever else was saved under a name of its own.

    Args:
        name: such as "model.0".
        tensors: how many it has.
        nbytes: of all its tensors and of those of its objects, as they are stored.
        holds: what its objects hold that is a plain number or text, by name.
    """

    name: str
    tensors: int
    nbytes: int
    holds: dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """A checkpoint: its folder, its manifest, and its index."""

    folder: Path
    manifest: Manifest
    index: Index

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """Reads manifest and index, and no tensor.

        Raises:
            CheckpointError: if the folder holds no checkpoint, or one of these files is damaged.
            FileNotFoundError: if there is no such folder.
        """

        def read() -> Contents:
            manifest = read_manifest(folder)
            return cls(folder, manifest, Index.read(folder, manifest))

        return unreplaced(folder, read)

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest."""
        return size_of(self.manifest)

    def units(self) -> list[Unit]:
        """Everything that was saved, models first."""
        names = {_unit_of(name) for name in (*self.index.tensors, *self.index.objects)}
        return [self._unit(name) for name in sorted(names, key=place_of)]

    def _unit(self, name: str) -> Unit:
        tensors = [record for full, record in self.index.tensors.items() if _unit_of(full) == name]
        objects = [entry for full, entries in self.index.objects.items() if _unit_of(full) == name for entry in entries]
        parts = [*(part for record in tensors for part in record["parts"]), *objects]
        places = {
            (place["file"], place["key"])
            for part in parts
            for place in ([part] if "key" in part else part["tensors"].values())
        }
        nbytes = sum(self.index.files[file].tensors[key].nbytes for file, key in places)
        return Unit(name, len(tensors), nbytes, _plain(objects[0]["skeleton"]) if objects else {})

    @contextlib.contextmanager
    def readers(self) -> Iterator[Mapping[str, PartReader]]:
        """All files that hold tensors, open."""
        with contextlib.ExitStack() as stack:
            yield {
                name: stack.enter_context(PartReader(self.folder / self.manifest.data / name, stored))
                for name, stored in self.index.files.items()
            }


def size_of(manifest: Manifest) -> int:
    """Bytes of all files but the manifest."""
    return manifest.index.nbytes + sum(manifest.files.values())


def _unit_of(name: str) -> str:
    """The unit to which the name of a tensor or an object belongs: "optimizer.0" for "optimizer.0.values"."""
    return ".".join(name.split("/", 1)[0].split(".")[:2])


def place_of(name: str) -> tuple[int, str, int]:
    """Sorts units: the known kinds first, and each by number."""
    kind, number = (*name.split("."), "")[:2]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind, int(number) if number.isdigit() else 0


def _plain(skeleton: Any) -> dict[str, Any]:
    """The members of a dict that stand for themselves in JSON, and are no containers."""
    members = skeleton if isinstance(skeleton, dict) else {}
    return {
        name: value for name, value in members.items() if value is None or isinstance(value, bool | int | float | str)
    }

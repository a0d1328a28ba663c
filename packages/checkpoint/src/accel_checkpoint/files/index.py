"""`index.json`: contents of a checkpoint and their places (docs/reference/checkpoint-format.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from accel_checkpoint.files.disk import hash_of, opened, read_file, write_new
from accel_checkpoint.files.manifest import INDEX, FileRecord
from accel_checkpoint.files.stored import DTYPES, StoredFile, is_shape
from accel_checkpoint.plan import StoredBox
from accel_core import CheckpointError
from accel_core.api.layouts import Box

if TYPE_CHECKING:
    from accel_checkpoint.files.manifest import Manifest

_KINDS = ("elementwise", "replicated", "partial", "opaque")


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint's files. The members are JSON as the module describes it."""

    files: Mapping[str, StoredFile]
    tensors: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str]
    objects: Mapping[str, Sequence[Mapping[str, Any]]]

    def write(self, data: Path) -> FileRecord:
        """Writes the file into the data folder, all of it on the disk."""
        content = {
            "files": {name: stored.to_json() for name, stored in self.files.items()},
            "tensors": self.tensors,
            "aliases": self.aliases,
            "objects": self.objects,
        }
        text = json.dumps(content, allow_nan=False).encode()
        write_new(data / INDEX, text)
        return FileRecord(len(text), xxhash.xxh3_128_hexdigest(text))

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Index:
        """Reads the file; CheckpointError if it is not what the manifest says, or no index."""
        path = folder / manifest.data / INDEX
        with opened(path) as descriptor:  # before memory is taken for it
            found = hash_of(descriptor, manifest.index.nbytes, path)
        text = read_file(path, manifest.index.nbytes) if found == manifest.index.hash else b""
        if xxhash.xxh3_128_hexdigest(text) != manifest.index.hash:
            raise CheckpointError(
                f"{path}: the file has the hash {found}, and the manifest says {manifest.index.hash}: it is damaged. Load "
                f"another checkpoint."
            )
        try:
            content = json.loads(text)
            files = {name: StoredFile.from_json(name, value) for name, value in content["files"].items()}
            index = cls(files, content["tensors"], content["aliases"], content["objects"])
            index._check(manifest)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is no index of a checkpoint of version 1: {type(error).__name__}: {error}. Load another checkpoint."
            ) from error
        return index

    def _check(self, manifest: Manifest) -> None:
        sizes = {name: stored.nbytes for name, stored in self.files.items()}
        if sizes != dict(manifest.files):
            raise ValueError("it names other files, or other sizes, than the manifest")
        for name, record in self.tensors.items():
            _check_form(name, record)
            for part in record["parts"]:
                self._check_part(name, record, part)
        for unit, entries in self.objects.items():
            if not entries:
                raise ValueError(f"{unit!r} is of no rank")
            for entry in entries:
                _check_ranks(unit, entry)
                self._check_references(unit, entry)
        missing = [alias for alias, name in self.aliases.items() if name not in self.tensors]
        if missing:
            raise ValueError(f"the alias {missing[0]!r} stands for no tensor")

    def _check_part(self, name: str, record: Mapping[str, Any], part: Mapping[str, Any]) -> None:
        if record["kind"] == "opaque":
            self._check_references(name, part)
            return
        stored = self.files[part["file"]].tensors[part["key"]]
        shape = tuple(part["sizes"] if record["kind"] == "elementwise" else record["shape"])
        if stored.shape != shape or stored.dtype != record["dtype"]:
            there = f"{stored.dtype} {stored.shape}"
            raise ValueError(f"{name!r} is {record['dtype']} {shape} here, and {there} in its file")

    def _check_references(self, name: str, entry: Mapping[str, Any]) -> None:
        for path, place in entry["tensors"].items():
            if place["key"] not in self.files[place["file"]].tensors:
                raise ValueError(f"{name!r} needs {place['key']!r} for {path!r}, which is in no file")

    def boxes(self, name: str) -> list[StoredBox]:
        """The stored boxes of an elementwise tensor, or the one box of a replicated tensor."""
        record = self.tensors[name]
        if record["kind"] == "replicated":
            whole = Box.whole(tuple(record["shape"]))
            return [StoredBox(whole, part["file"], part["key"]) for part in record["parts"]]
        boxes = [Box(tuple(part["offsets"]), tuple(part["sizes"])) for part in record["parts"]]
        return [StoredBox(box, part["file"], part["key"]) for box, part in zip(boxes, record["parts"], strict=True)]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor that is not opaque."""
        found: torch.dtype = getattr(torch, self.tensors[name]["dtype"])
        return found


def _check_form(name: str, record: Mapping[str, Any]) -> None:
    kind, parts = record["kind"], record["parts"]
    if kind not in _KINDS:
        raise ValueError(f"{name!r} is of the unknown kind {kind!r}")
    if kind == "opaque":
        if not all(isinstance(part[member], str) for part in parts for member in ("part", "signature")):
            raise ValueError(f"a part of {name!r} has no name, or no signature")
        return
    if kind == "replicated" and len(parts) != 1:
        raise ValueError(f"{name!r} has {len(parts)} parts, and one is enough")
    if kind == "partial" and sorted(part["rank"] for part in parts) != list(range(max(len(parts), 1))):
        raise ValueError(f"{name!r} has not one part of each rank")
    if not is_shape(record["shape"]) or record["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} has the shape {record['shape']!r:.80} and the dtype {record['dtype']!r:.80}")
    if kind == "elementwise":
        for part in parts:
            if not all(_are_sizes(part[member], len(record["shape"])) for member in ("offsets", "sizes")):
                raise ValueError(f"a part of {name!r} is at {part['offsets']!r}, of the sizes {part['sizes']!r}")


def _check_ranks(unit: str, entry: Mapping[str, Any]) -> None:
    ranks = entry["ranks"]
    if ranks != "all" and not (ranks and _are_sizes(ranks, len(ranks))):
        raise ValueError(f"{unit!r} is of the ranks {ranks!r}")
    if "skeleton" not in entry:
        raise ValueError(f"{unit!r} has no skeleton")


def _are_sizes(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(type(each) is int and each >= 0 for each in values)

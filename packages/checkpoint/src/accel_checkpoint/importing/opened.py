"""A checkpoint of another library that is loaded from its own folder, without a neutral one of it.

Its index is made in memory, and loaded like any other: what does not fit is said before anything
is changed.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from accel_checkpoint.files.folder import foreign_files
from accel_checkpoint.files.manifest import NAME, FileRecord, Manifest, unseal
from accel_checkpoint.importing.foreign import record_of, work_of
from accel_checkpoint.reading import Checkpoint
from accel_checkpoint.writing import index_of
from accel_core.api.launcher import Group, find, list_offers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_checkpoint.importing.foreign import ForeignCheckpoint, Importer
    from accel_core.api.layouts import Box

GROUP: Group = "accel.importers"


def open_to_load(folder: Path, device: torch.device) -> Checkpoint:
    """The checkpoint in a folder: ours, or one that an importer knows."""
    if folder.is_dir() and not (folder / NAME).exists():
        foreign = find_foreign(folder)
        if foreign is not None:
            return OpenedForeign(folder, foreign, device)
    return Checkpoint(folder, device)


def holds_none(folder: Path) -> bool:
    """Whether no save was finished in a folder, by us or another library. It need not exist."""
    found = unseal(folder)
    if isinstance(found, Manifest) or found.kind not in {"absent", "unfinished"}:
        return False
    return found.kind == "absent" or (foreign_files(os.listdir(folder)) is None and find_foreign(folder) is None)


def find_foreign(folder: Path, optimizer: str | None = None) -> ForeignCheckpoint | None:
    """The checkpoint in a folder, by the first importer that knows it; else None."""
    offers = list_offers(GROUP)
    for offer in offers:
        importer: Importer = find(GROUP, f"{offer.distribution}:{offer.name}", offers).load()
        found = importer(folder, optimizer)
        if found is not None:
            return found
    return None


class OpenedForeign(Checkpoint):
    """A checkpoint of another library, open for reading. Its parts are mapped, or in memory."""

    def __init__(self, folder: Path, foreign: ForeignCheckpoint, device: torch.device) -> None:
        self.folder = folder
        self._device = device
        self._open = ExitStack()
        self._readers = {}
        inventories, written = [], []
        for number, part in enumerate(foreign.parts):
            inventory, work = work_of(foreign, number, part())
            inventories.append(inventory)
            written.append(work.written)
            self._readers[work.name] = _TensorReader(work.tensors)
        self.index = index_of(inventories, written)
        described = json.dumps([self.index.tensors, self.index.aliases, self.index.objects], sort_keys=True)
        digest = xxhash.xxh3_64_hexdigest(described.encode())
        self.manifest = Manifest(digest, "", FileRecord(0, ""), {}, record_of(foreign))
        self._check()


class _TensorReader:
    """Tensors in memory, read as from a file (`files.part_file.PartReader`)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, key: str) -> torch.Tensor:
        """A copy."""
        return self._tensors[key].clone()

    @torch.no_grad()
    def read_box(self, key: str, source: Box, out: torch.Tensor, cast: bool = False) -> None:
        """A region of a tensor; `cast`: into one of any dtype."""
        data = self._tensors[key]
        assert cast or data.dtype == out.dtype, "compared before"
        out.copy_(data[source.slices] if source.sizes else data)

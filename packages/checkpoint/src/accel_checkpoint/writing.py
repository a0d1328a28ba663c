"""Work of one rank in a save: its tasks of the plan, and the objects that it has first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from accel_checkpoint.codec import Encoded, encode
from accel_checkpoint.deferred import is_deferred, refuse_deferred
from accel_checkpoint.files.index import Index
from accel_checkpoint.files.manifest import Manifest
from accel_checkpoint.files.part_file import write_part
from accel_checkpoint.files.stored import StoredFile
from accel_checkpoint.host_copies import contents
from accel_checkpoint.plan import Claim, Description, Task
from accel_core.api.layouts import Alias, Elementwise, Opaque, Partial, Piece, Replicated

if TYPE_CHECKING:
    from accel_checkpoint.files.folder import Draft
    from accel_checkpoint.run_state import Content


class Inventory(NamedTuple):
    """A rank's state for other ranks; by digests, what is the same on several is written once."""

    claims: Description
    aliases: Mapping[str, str]
    digests: Mapping[str, str]


@dataclass
class Written:
    """The file (None: nothing), tensors and objects of a rank, as JSON, as the index has them."""

    file: StoredFile | None = None
    tensors: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    objects: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        file = None if self.file is None else {"name": self.file.name, "content": self.file.to_json()}
        return {"file": file, "tensors": self.tensors, "objects": self.objects}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Written:
        """Makes the object from the result of `to_json`."""
        file = value["file"]
        stored = None if file is None else StoredFile.from_json(file["name"], file["content"])
        return cls(stored, value["tensors"], value["objects"])


@dataclass
class Work:
    """The data that a rank is going to write: tensors by key in its file, and index entries."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # What only a step of an optimizer changes, with the versions until then: it may be copied a little later.
    lasting: dict[str, int] = field(default_factory=dict)
    written: Written = field(default_factory=Written)

    def add_task(self, task: Task, content: Content) -> None:
        """Something of the plan."""
        entry = content.state[task.name]
        parts = self.written.tensors.setdefault(task.name, [])
        if isinstance(entry, Elementwise):
            assert task.box is not None, "the plan names boxes"
            key = task.name if task.box.sizes == entry.shape else f"{task.name}@{','.join(map(str, task.box.offsets))}"
            number = next(number for number, piece in enumerate(entry.pieces) if piece.box == task.box)
            data = self.tensors[key] = _detached(entry.pieces[number].data)
            if entry.versioned and not data.is_inference():
                kept = content.versions.get(task.name)
                self.lasting[key] = data._version if kept is None else kept[number]
            box = {"offsets": list(task.box.offsets), "sizes": list(task.box.sizes)}
            parts.append({**box, "file": self.name, "key": key})
        elif isinstance(entry, Opaque):
            encoded = entry.value if isinstance(entry.value, Encoded) else encode(entry.value, task.name)
            skeleton = self._encoded(f"{task.name}#{task.part}", encoded)
            parts.append({"part": task.part, "signature": entry.signature, **skeleton})
        else:
            assert isinstance(entry, (Replicated, Partial)), "an alias has no task"
            self.tensors[task.name] = _detached(entry.data)
            rank = {"rank": int(task.part.removeprefix("rank "))} if isinstance(entry, Partial) else {}
            parts.append({**rank, "file": self.name, "key": task.name})

    def add_object(self, unit: str, ranks: list[int] | str, encoded: Encoded, prefix: str = "") -> None:
        """An object that is the same on `ranks`; `prefix` of keys, if the file has those of other ranks too."""
        content = {"ranks": ranks, **self._encoded(prefix or unit, encoded)}
        self.written.objects.setdefault(unit, []).append(content)

    def _encoded(self, prefix: str, encoded: Encoded) -> dict[str, Any]:
        places = {}
        for path, tensor in encoded.tensors.items():
            key = f"{prefix}/{path}"
            self.tensors[key] = tensor
            places[path] = {"file": self.name, "key": key}
        return {"skeleton": encoded.skeleton, "tensors": places}

    def write(self, data: Path) -> Written:
        """Writes the file, all of it on the disk."""
        if self.tensors:
            self.written.file = write_part(data / self.name, self.tensors)
        return self.written


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def encode_objects(content: Content) -> dict[str, Encoded]:
    """The objects of this rank, encoded."""
    return {unit: encode(value, f"the state of {unit}") for unit, value in content.objects.items()}


def keep(content: Content, encoded: dict[str, Encoded]) -> None:
    """Copies all that may change before an optimizer steps, and notes the versions of the rest."""
    for name, entry in content.state.items():
        if isinstance(entry, (Replicated, Partial)):
            content.state[name] = replace(entry, data=_copied(entry.data))
        elif isinstance(entry, Opaque):
            content.state[name] = replace(entry, value=_cloned(encode(entry.value, name)))
        elif isinstance(entry, Elementwise):
            if entry.versioned and not any(piece.data.is_inference() for piece in entry.pieces):
                content.versions[name] = tuple(piece.data._version for piece in entry.pieces)
            else:
                copies = tuple(Piece(piece.box, _copied(piece.data)) for piece in entry.pieces)
                content.state[name] = replace(entry, pieces=copies)
    for unit, value in encoded.items():
        encoded[unit] = _cloned(value)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_deferred(tensor) else tensor.detach()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    refuse_deferred([tensor])
    return tensor.detach().to("cpu", copy=True)  # the device may have no room for it


def _cloned(encoded: Encoded) -> Encoded:
    return Encoded(encoded.skeleton, {path: _copied(tensor) for path, tensor in encoded.tensors.items()})


def take_inventory(content: Content, encoded: Mapping[str, Encoded]) -> Inventory:
    """The description of this rank's state for the other ranks."""
    claims, aliases = {}, {}
    for name, entry in content.state.items():
        if isinstance(entry, Alias):
            aliases[name] = entry.of
        else:
            claims[name] = Claim.of(entry)
    return Inventory(claims, aliases, {unit: _digest(value) for unit, value in encoded.items()})


def firsts(inventories: Sequence[Inventory], members: Sequence[int]) -> dict[str, dict[int, list[int] | str]]:
    """The rank that writes each unit, for which ranks: the lowest of those with equal units."""
    found: dict[str, dict[int, list[int] | str]] = {}
    units = dict.fromkeys(unit for rank in members for unit in inventories[rank].digests)
    for unit in units:
        groups: dict[str, list[int]] = {}
        for rank in members:
            digest = inventories[rank].digests.get(unit)
            if digest is not None:
                groups.setdefault(digest, []).append(rank)
        found[unit] = {ranks[0]: "all" if len(groups) == 1 else ranks for ranks in groups.values()}
    return found


def index_of(inventories: Sequence[Inventory], written: Sequence[Written]) -> Index:
    """The index of what all ranks have written."""
    tensors: dict[str, dict[str, Any]] = {}
    for inventory in inventories:
        for name, claim in inventory.claims.items():
            if name not in tensors:
                form = {"shape": list(claim.shape), "dtype": claim.dtype.removeprefix("torch.")}
                tensors[name] = {"kind": claim.kind, **({} if claim.kind == "opaque" else form), "parts": []}
    objects: dict[str, list[dict[str, Any]]] = {}
    for each in written:
        for name, parts in each.tensors.items():
            tensors[name]["parts"] += parts
        for unit, entries in each.objects.items():
            objects.setdefault(unit, []).extend(entries)
    files = {each.file.name: each.file for each in written if each.file is not None}
    aliases = {alias: name for inventory in inventories for alias, name in inventory.aliases.items()}
    return Index(files, tensors, aliases, objects)


@dataclass(frozen=True)
class Publication:
    """A draft that becomes a checkpoint."""

    draft: Draft
    record: Mapping[str, Any]
    inventories: Sequence[Inventory]
    published: Callable[[], None] = lambda: None  # is called afterwards

    def publish(self, written: Sequence[Written]) -> None:
        """Makes it its folder's checkpoint, from what the members have written, by rank."""
        index = index_of(self.inventories, written)
        record = index.write(self.draft.data)
        sizes = {name: stored.nbytes for name, stored in index.files.items()}
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.draft.publish(Manifest(self.draft.id, created, record, sizes, self.record))

    def finish(self) -> None:
        """Removes what it replaces, once nobody may need that any more."""
        self.draft.sweep()
        self.published()


def _digest(encoded: Encoded) -> str:
    digest = xxhash.xxh3_128(json.dumps(encoded.skeleton, sort_keys=True).encode())
    found = sorted(encoded.tensors.items())
    for (path, tensor), parts in zip(found, contents([tensor.detach() for _, tensor in found]), strict=True):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for data in parts:
            digest.update(data)
    return digest.hexdigest()

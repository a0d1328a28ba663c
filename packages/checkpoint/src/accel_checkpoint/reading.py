"""A checkpoint open for reading: fills entries in place, decodes objects, verifies everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from accel_checkpoint.codec import decode
from accel_checkpoint.files.index import Index
from accel_checkpoint.files.manifest import Manifest, read_manifest
from accel_checkpoint.files.part_file import PartReader
from accel_checkpoint.plan import StoredBoxes
from accel_checkpoint.record import absent_of
from accel_checkpoint.run_state import (
    ACCUMULATION,
    COMPONENTS,
    LOADER,
    OBJECT,
    OPTIMIZER,
    RANDOM,
    SCHEDULER,
    VALUES,
    check_value,
)
from accel_core import CheckpointError
from accel_core.api.checkpoint import SavedEntry
from accel_core.api.layouts import Alias, Box, Elementwise, Entry, Opaque, Partial, Replicated

Job = Callable[[], None]


class Reader(Protocol):
    """The tensors of one file, by key: `PartReader`, or tensors of another library."""

    def tensor(self, key: str) -> torch.Tensor:
        """A new CPU tensor."""

    def read_box(self, key: str, source: Box, out: torch.Tensor, cast: bool = False) -> None:
        """Fills a tensor with a region of one."""


_WRAPPER = "module."  # before the names of a model in torch's wrapper for data parallelism
_ALWAYS = {ACCUMULATION, RANDOM}
_MAY_LACK = {SCHEDULER, LOADER, OBJECT, RANDOM, *COMPONENTS}  # of an imported checkpoint


class Checkpoint:
    """A complete checkpoint, a context manager with open files; `device` has the random stream."""

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        self.folder = folder
        self._device = device
        self.manifest: Manifest = read_manifest(folder)
        self.index = Index.read(folder, self.manifest)
        self._check()
        self._readers: dict[str, Reader] = {}
        self._open = ExitStack()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._readers.clear()

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint."""
        size: int = self.manifest.record["world"]["size"]
        return size

    @property
    def absent(self) -> frozenset[str]:
        """The kinds of units that an imported checkpoint lacks: a load leaves them as they are."""
        return absent_of(self.manifest.record) & _MAY_LACK

    def _check(self) -> None:
        """Raises `CheckpointError` if something is missing that saves leave and loads ignore."""
        needed = set(_ALWAYS - self.absent)
        for kind in (OPTIMIZER, SCHEDULER, LOADER, OBJECT):
            needed |= {f"{kind}.{number}" for number in range(len(self.units(kind)))}
        needed |= {f"{unit}.{VALUES}" for unit in needed if unit.startswith(f"{OPTIMIZER}.")}
        if missing := sorted(needed - self.index.objects.keys()):
            raise CheckpointError(
                f"{self.folder} lies: its hashes hold, but no save_state() leaves such an index. Missing: {missing}. Load another checkpoint."
            )

    def reader(self, file: str) -> Reader:
        """The reader of a file, which is opened, and its header verified, once."""
        if file not in self._readers:
            path = self.folder / self.manifest.data / file
            self._readers[file] = self._open.enter_context(PartReader(path, self.index.files[file]))
        return self._readers[file]

    def names(self, unit: str) -> list[str]:
        """The names of the tensors of a unit, without it; aliases too."""
        prefix = f"{unit}/"
        names = (*self.index.tensors, *self.index.aliases)
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def fit(self, unit: str, state: Mapping[str, Entry]) -> None:
        """Gives tied names here that are not there the one of them that is; takes a wrapper's prefix off.

        Other libraries leave tied names out of their files, or save wrapped models.
        """
        names = self.names(unit)
        if names and all(name.startswith(_WRAPPER) for name in names) and state.keys().isdisjoint(names):
            whole, prefix = f"{unit}/{_WRAPPER}", f"{unit}/"
            tensors = {name.replace(whole, prefix, 1): record for name, record in self.index.tensors.items()}
            ties = {
                name.replace(whole, prefix, 1): of.replace(whole, prefix, 1) for name, of in self.index.aliases.items()
            }
            self.index = replace(self.index, tensors=tensors, aliases=ties)
        there, tied = set(self.names(unit)), dict[str, list[str]]()
        for name, entry in state.items():
            tied.setdefault(entry.of if isinstance(entry, Alias) else name, []).append(name)
        aliases = dict(self.index.aliases)
        for names in tied.values():
            kept = next((name for name in names if name in there), None)
            if kept is not None:
                full = aliases.get(f"{unit}/{kept}", f"{unit}/{kept}")
                aliases.update({f"{unit}/{name}": full for name in names if name not in there})
        self.index = replace(self.index, aliases=aliases)

    def units(self, kind: str) -> list[str]:
        """The units of a kind with tensors or objects, without others' parts: "model.0", ..."""
        every = {name.partition("/")[0] for name in self.index.tensors} | self.index.objects.keys()
        own = {unit for unit in every if unit.partition(".")[0] == kind and unit.rpartition(".")[2] != VALUES}
        return sorted(own, key=lambda unit: (len(unit), unit))

    def components(self) -> set[str]:
        """The units that are the states of components, such as "precision" and "plugin.0"."""
        return {unit for unit in self.index.objects if unit.partition(".")[0] in COMPONENTS}

    def jobs(self, name: str, entry: Entry, rank: int, ranks: int) -> Iterator[Job]:
        """Jobs that fill an entry. A term is the rank's own if equally many saved, else a mean."""
        if isinstance(entry, Elementwise):
            yield from self._boxes(name, entry)
        elif isinstance(entry, Partial):
            yield partial(self._read_terms, name, entry.data, rank, ranks)
        elif isinstance(entry, Replicated):
            yield from self._boxes(name, Elementwise.whole(entry.data))  # a buffer here may be a parameter there

    def opaque(self, name: str, part: str) -> Any:
        """The value of a part of an opaque entry. Raises `CheckpointError` if there is none."""
        parts: list[Mapping[str, Any]] = self.index.tensors[name]["parts"]
        for each in parts:
            if each["part"] == part:
                return self._decoded(each, name)
        raise CheckpointError(
            f"{self.folder}: {part!r} of {name!r} was to be loaded, but the checkpoint has {[each['part'] for each in parts]}: it "
            f"cannot be cut in another way. Load it on as many ranks, under the same strategy, as saved it."
        )

    def object(self, unit: str, rank: int, ranks: int) -> Any:
        """The object of a unit as on a rank, in a world of `ranks`; raises if that is unknown."""
        entries = self.index.objects[unit]
        if entries[0]["ranks"] == "all":
            return self._decoded(entries[0], unit)
        if ranks != self.world_size:
            raise CheckpointError(
                f"{unit} was not the same on all of the {self.world_size} ranks that saved it, so {ranks} cannot be given "
                f"theirs. Load it on {self.world_size} ranks, or let its state_dict() be the same on every rank."
            )
        return self.object_of(unit, rank)

    def object_of(self, unit: str, rank: int) -> Any:
        """The object of a unit as a rank of the world that saved it had it."""
        for entry in self.index.objects[unit]:
            if entry["ranks"] == "all" or rank in entry["ranks"]:
                return self._decoded(entry, unit)
        raise CheckpointError(f"{self.folder}: the checkpoint has no {unit} of rank {rank}. Load another checkpoint.")

    def objects(self, unit: str) -> list[Any]:
        """The different objects of a unit."""
        return [self._decoded(entry, unit) for entry in self.index.objects[unit]]

    def described(self, unit: str) -> dict[str, SavedEntry]:
        """Every entry of a unit, without its data; aliases left out."""
        found = {}
        prefix = f"{unit}/"
        for name, record in self.index.tensors.items():
            if name.startswith(prefix):
                opaque = record["kind"] == "opaque"
                signatures = {part["part"]: part["signature"] for part in record["parts"]} if opaque else {}
                shape, dtype = ((), None) if opaque else (tuple(record["shape"]), self.index.dtype(name))
                found[name.removeprefix(prefix)] = SavedEntry(record["kind"], shape, dtype, signatures)
        return found

    def verify_objects(self, share: int, shares: int) -> None:
        """Reads the objects whose first saving rank is in a share: a load may not use them."""
        for entries in self.index.objects.values():
            for entry in entries:
                first = 0 if entry["ranks"] == "all" else entry["ranks"][0]
                if first % shares == share:
                    self._tensors(entry)

    def _boxes(self, name: str, entry: Elementwise) -> Iterator[Job]:
        stored = StoredBoxes(name, self.index.boxes(name))
        for piece in entry.pieces:
            for copy in stored.copies(piece.box):
                out = piece.data[copy.target.slices] if piece.box.sizes else piece.data
                yield partial(self.reader(copy.stored.file).read_box, copy.stored.key, copy.source, out)

    def _read_terms(self, name: str, out: torch.Tensor, rank: int, ranks: int) -> None:
        parts: Sequence[Mapping[str, Any]] = self.index.tensors[name]["parts"]
        if len(parts) == ranks:
            (own,) = (part for part in parts if part["rank"] == rank)
            whole = Box.whole(tuple(out.shape))
            self.reader(own["file"]).read_box(
                own["key"], whole, out, cast=True
            )  # who keeps gradients says in which dtype
            return
        total = torch.zeros_like(out)
        for part in parts:
            total += self.reader(part["file"]).tensor(part["key"]).to(out.device)
        out.copy_(total / len(parts))

    def _decoded(self, entry: Mapping[str, Any], name: str) -> Any:
        value = decode(entry["skeleton"], self._tensors(entry), name)
        check_value(name, value, self._device)
        return value

    def _tensors(self, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {path: self.reader(place["file"]).tensor(place["key"]) for path, place in entry["tensors"].items()}


class SavedState:
    """An optimizer of an open checkpoint, a `SavedOptimizer`; `pending` fills tensors of `read`."""

    def __init__(self, checkpoint: Checkpoint, unit: str, rank: int, ranks: int) -> None:
        self._checkpoint = checkpoint
        self._unit = unit
        self._place = rank, ranks
        state = _joined(checkpoint.objects(unit)) or checkpoint.object(unit, rank, ranks)
        self.kind: str = state["kind"]
        self.groups: list[dict[str, Any]] = state["groups"]
        self.whole: Any = state["whole"]
        self.values: dict[str, dict[str, Any]] = {}
        for values in checkpoint.objects(f"{unit}.{VALUES}"):  # a rank has those of the parameters that it owns
            self.values.update(values)
        self.pending: list[Job] = []
        self._saved_names: Mapping[str, str] = {}

    def rename(self, names: Mapping[str, str]) -> None:
        """Shows parameters by other names, by those in the checkpoint."""
        names = {saved: names.get(saved, saved) for group in self.groups for saved in group["names"]}
        self._saved_names = {name: saved for saved, name in names.items()}
        for group in self.groups:
            group["names"] = [names.get(name, name) for name in group["names"]]
        self.values = {names.get(name, name): values for name, values in self.values.items()}

    def described(self) -> Mapping[str, SavedEntry]:
        """Every entry."""
        names = {saved: name for name, saved in self._saved_names.items()}
        return {_renamed(name, names): entry for name, entry in self._checkpoint.described(self._unit).items()}

    def read(self, name: str, entry: Entry) -> Any:
        """Fills the tensors of an entry; for an `Opaque`, returns the value of its part."""
        full = f"{self._unit}/{_renamed(name, self._saved_names)}"
        if isinstance(entry, Opaque):
            return self._checkpoint.opaque(full, entry.part)
        jobs = self._checkpoint.jobs(full, entry, *self._place)
        if isinstance(entry, Elementwise):
            self.pending.extend(jobs)  # moments are large: several threads read them
            return None
        for job in jobs:
            job()
        return None


def _joined(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """One state of those of ranks that step other parameters in equal groups, as stages do; else None."""

    def without_names(state: Mapping[str, Any]) -> Any:
        options = [{key: value for key, value in group.items() if key != "names"} for group in state["groups"]]
        return {**state, "groups": options}

    first = states[0]
    if first["whole"] is not None or any(without_names(state) != without_names(first) for state in states):
        return None
    rows = zip(*(state["groups"] for state in states), strict=True)
    names = [list(dict.fromkeys(name for group in row for name in group["names"])) for row in rows]
    groups = [{**group, "names": own} for group, own in zip(first["groups"], names, strict=True)]
    return {**first, "groups": groups}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """The name of an entry, which is of a parameter or of a key of its state."""
    parameter, slash, key = name.rpartition("/")
    return names.get(name) or f"{names.get(parameter, parameter)}{slash}{key}"

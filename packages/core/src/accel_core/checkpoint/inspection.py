"""Looking into checkpoints without a run: what they hold, whether they are whole, and in what two of them differ.

`python -m accel_core checkpoint FOLDER` calls `run`. Nothing is written, and no class that a checkpoint names is needed:
objects are compared as they are encoded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_core.checkpoint import manifest as manifests
from accel_core.checkpoint import retention
from accel_core.checkpoint.index import Index
from accel_core.checkpoint.manifest import Manifest, read_manifest
from accel_core.checkpoint.part_file import PartReader
from accel_core.checkpoint.stored import DTYPES
from accel_core.errors import CheckpointError
from accel_core.plugins.explain import table

FINE, AMISS, NO_ANSWER = 0, 1, 2
"""Exit statuses: all is well; something is damaged, or differs; what was asked cannot be answered."""

_ORDER = ("model", "optimizer", "scheduler", "loader", "object")
_HOLDS = 72  # characters of what a unit holds, in a table
_STRIDE = 1 << 20  # elements that are compared at a time, as float64

Report = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what `run` takes."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint, or a folder of checkpoint_<n>")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--verify", action="store_true", help="read everything, and check every hash")
    ways.add_argument("--compare", type=Path, metavar="OTHER", help="list what differs from another checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for, and returns the exit status: 1 for damage and differences, 2 where there is no answer."""
    try:
        if arguments.compare is not None:
            answer, text, status = _compared(arguments.folder, arguments.compare)
        elif arguments.verify:
            answer, text, status = _verified(arguments.folder)
        else:
            answer, text, status = _described(arguments.folder)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return NO_ANSWER
    print(json.dumps(answer, indent=2, allow_nan=False) if arguments.json else text)  # noqa: T201
    return status


class _Answer(NamedTuple):
    """What is printed as JSON, what is printed as text, and the exit status."""

    content: Mapping[str, Any]
    text: str
    status: int


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
        manifest = read_manifest(folder)
        return cls(folder, manifest, Index.read(folder, manifest))

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest."""
        return _size(self.manifest)

    def units(self) -> list[Unit]:
        """Everything that was saved, models first."""
        names = {_unit_of(name) for name in (*self.index.tensors, *self.index.objects)}
        return [self._unit(name) for name in sorted(names, key=_place)]

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


def describe(folder: Path) -> dict[str, Any]:
    """What a checkpoint is and holds, as JSON has it. Reads no tensor; raises as `Contents.of`."""
    contents = Contents.of(folder)
    return {
        "folder": str(folder),
        "id": contents.manifest.id,
        "created": contents.manifest.created,
        "bytes": contents.nbytes,
        "files": dict(contents.manifest.files),
        "units": [unit._asdict() for unit in contents.units()],
        "record": dict(contents.manifest.record),
    }


def list_checkpoints(root: Path) -> list[dict[str, Any]]:
    """All `checkpoint_<n>` in a folder, by number, each with its "state".

    The state is "complete", if every file is there with its size (what is in them, `verify` checks); "unfinished", if it was
    never published; "damaged"; "newer", if another version wrote it; or "foreign". All but the first have a "reason".
    """
    return [_listed(root / retention.name(number), number) for number in retention.numbers(root)]


def _listed(folder: Path, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {"number": number, "folder": str(folder)}
    found = manifests.examine(folder)
    if isinstance(found, Manifest):
        return {**row, "state": "complete", "created": found.created, "bytes": _size(found)}
    return {**row, "state": found.kind, "reason": f"{folder} {found.found}"}


def _described(folder: Path) -> _Answer:
    if not _is_root(folder):
        content = describe(folder)
        return _Answer(content, _description(content), FINE)
    rows = list_checkpoints(folder)
    cells = [
        (str(row["number"]), row.get("created", "-"), _bytes(row["bytes"]) if "bytes" in row else "-", row["state"])
        for row in rows
    ]
    reasons = [f"\n{row['reason']}." for row in rows if row["state"] not in {"complete", "unfinished"}]
    text = "".join([table(("number", "created", "size", "state"), cells), *reasons])
    return _Answer({"checkpoints": rows}, text, FINE)


def _description(content: Mapping[str, Any]) -> str:
    world = content["record"].get("world", "not recorded")
    facts = [
        f"checkpoint  {content['folder']}",
        f"id          {content['id']}",
        f"created     {content['created']}",
        f"world       {world['size'] if isinstance(world, dict) and 'size' in world else world}",
        f"size        {_bytes(content['bytes'])}, {len(content['files'])} files with tensors",
    ]
    rows = [
        (
            unit["name"],
            str(unit["tensors"] or "-"),
            _bytes(unit["nbytes"]) if unit["nbytes"] else "-",
            _short(unit["holds"]),
        )
        for unit in content["units"]
    ]
    record = json.dumps(content["record"], indent=2, ensure_ascii=False)
    return "\n".join([*facts, "", table(("unit", "tensors", "size", "holds"), rows), "", f"record {record}"])


def _is_root(folder: Path) -> bool:
    return folder.is_dir() and not (folder / manifests.NAME).exists() and bool(retention.numbers(folder))


def _size(manifest: Manifest) -> int:
    return manifest.index.nbytes + sum(manifest.files.values())


def _unit_of(name: str) -> str:
    """The unit to which the name of a tensor or an object belongs: "optimizer.0" for "optimizer.0.values"."""
    return ".".join(name.split("/", 1)[0].split(".")[:2])


def _place(name: str) -> tuple[int, str, int]:
    """Sorts units: the known kinds first, and each by number."""
    kind, number = (*name.split("."), "")[:2]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind, int(number) if number.isdigit() else 0


def _plain(skeleton: Any) -> dict[str, Any]:
    """The members of a dict that stand for themselves in JSON, and are no containers."""
    members = skeleton if isinstance(skeleton, dict) else {}
    return {
        name: value for name, value in members.items() if value is None or isinstance(value, bool | int | float | str)
    }


def _short(holds: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in holds.items())
    return text if len(text) <= _HOLDS else f"{text[: _HOLDS - 1]}…"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


class Damage(NamedTuple):
    """A file that is not what was saved, and how that shows."""

    file: str
    reason: str


def verify(folder: Path, report: Report | None = None) -> list[Damage]:
    """Reads everything in a checkpoint and checks it. Returns one entry for each damaged file; none if all is as saved.

    Args:
        folder: of the checkpoint.
        report: is told how far it is, a line at a time.

    Raises:
        CheckpointError: if it is no checkpoint, or of a newer version: then nothing is known about its files.
        FileNotFoundError: if there is no such folder.
    """
    manifest = manifests.unseal(folder)
    if not isinstance(manifest, Manifest):
        if manifest.kind == "damaged":
            return [Damage(str(folder / manifests.NAME), manifest.found)]
        manifest = read_manifest(folder)  # which says why it cannot be read
    data = folder / manifest.data
    try:
        index = Index.read(folder, manifest)
    except (CheckpointError, OSError) as error:
        others = [text for text in manifests.wrong_files(folder, manifest) if text.split()[0] != manifests.INDEX]
        return [
            Damage(str(data / manifests.INDEX), str(error)),
            *(Damage(str(data / text.split()[0]), text) for text in others),
        ]
    damaged = []
    for number, (name, stored) in enumerate(index.files.items(), start=1):
        if report is not None:
            report(f"{folder}: {name}, {_bytes(stored.nbytes)}, file {number} of {len(index.files)}")
        try:
            with PartReader(data / name, stored) as reader:
                for key in stored.tensors:
                    _read(reader, key)
        except (CheckpointError, OSError) as error:
            damaged.append(Damage(str(data / name), str(error)))
    return damaged


def _verified(folder: Path) -> _Answer:
    folders = [folder]
    if _is_root(folder):
        folders = [Path(row["folder"]) for row in list_checkpoints(folder) if row["state"] != "unfinished"]
    if not folders:
        raise CheckpointError(
            f"The checkpoints in {folder} were to be verified, but none of them was ever finished. Pass another folder."
        )
    found = {each: verify(each, _progress) for each in folders}
    damaged = [damage for each in found.values() for damage in each]
    content = {"verified": [str(each) for each in folders], "damaged": [damage._asdict() for damage in damaged]}
    lines = [f"damaged: {damage.file}\n  {damage.reason}" for damage in damaged]
    lines += [f"intact: {each}" for each, wrong in found.items() if not wrong]
    return _Answer(content, "\n".join(lines), AMISS if damaged else FINE)


def _progress(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201


class Difference(NamedTuple):
    """Something that two checkpoints do not have in common.

    Args:
        name: of the tensor, or of the unit and the path inside it.
        what: how they differ, in words.
        largest: the largest absolute difference of two numbers; None where it is about something else, or one is not finite.
    """

    name: str
    what: str
    largest: float | None = None


def compare(first: Path, second: Path) -> list[Difference]:
    """Everything in which the contents of two checkpoints differ: values bit by bit, however they are spread over files.

    Needs memory for the largest tensor twice. What describes the run rather than its state (id, time, record) is not looked at.

    Raises:
        CheckpointError: if one of them is no checkpoint, or damaged where it was read.
        FileNotFoundError: if one of the folders does not exist.
    """
    pair = Contents.of(first), Contents.of(second)
    with pair[0].readers() as ours, pair[1].readers() as theirs:
        sides = _Side(pair[0].index, ours), _Side(pair[1].index, theirs)
        return [*_tensors(*sides), *_objects(*sides)]


@dataclass(frozen=True)
class _Side:
    """One of the two."""

    index: Index
    readers: Mapping[str, PartReader]

    def tensor(self, place: Mapping[str, Any]) -> _Values:
        return _read(self.readers[place["file"]], place["key"])

    def whole(self, record: Mapping[str, Any], name: str) -> _Values:
        """A tensor, put together from its boxes."""
        if record["kind"] != "elementwise":
            return self.tensor(record["parts"][0])
        shape, dtype = tuple(record["shape"]), self.index.dtype(name)
        out = torch.empty((*shape, dtype.itemsize), dtype=torch.uint8)
        for stored in self.index.boxes(name):
            out[stored.box.slices] = _read(self.readers[stored.file], stored.key).bits
        return _Values(dtype, shape, out)


class _Values(NamedTuple):
    """A tensor as its bytes, in a last dim of their own: torch can do little with some dtypes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: torch.Tensor

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def _read(reader: PartReader, key: str) -> _Values:
    stored = reader.stored.tensors[key]
    dtype = DTYPES[stored.dtype]
    bits = torch.empty((*stored.shape, stored.itemsize), dtype=torch.uint8)
    reader.read(key, bits.view(dtype).view(stored.shape))
    return _Values(dtype, stored.shape, bits)


def _tensors(ours: _Side, theirs: _Side) -> Iterator[Difference]:
    sides = ours.index, theirs.index
    names = [{name: name for name in index.tensors} | dict(index.aliases) for index in sides]
    yield from _only(names[0], names[1])
    seen = set()
    for name in sorted({*names[0]} & {*names[1]}):
        pair = names[0][name], names[1][name]
        if pair not in seen:  # two names of one tensor, here and there, are compared once
            seen.add(pair)
            yield from _tensor(name, ours, theirs, pair)


def _only(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str = "") -> Iterator[Difference]:
    for name in sorted({*ours} ^ {*theirs}, key=str):
        yield Difference(f"{where}{name}", "only in the first" if name in ours else "only in the second")


def _tensor(name: str, ours: _Side, theirs: _Side, pair: tuple[str, str]) -> Iterator[Difference]:
    mine, other = ours.index.tensors[pair[0]], theirs.index.tensors[pair[1]]
    cut = {"elementwise", "replicated"}  # how a tensor lies on the ranks is no difference
    if mine["kind"] != other["kind"] and not {mine["kind"], other["kind"]} <= cut:
        yield Difference(name, f"{mine['kind']} in the first, {other['kind']} in the second")
    elif mine["kind"] in {"opaque", "partial"}:
        word = "part" if mine["kind"] == "opaque" else "rank"
        parts = [{part[word]: part for part in record["parts"]} for record in (mine, other)]
        yield from _only(parts[0], parts[1], f"{name}, {word} ")
        for label in sorted({*parts[0]} & {*parts[1]}, key=str):
            where = f"{name}, {word} {label}"
            if mine["kind"] == "opaque":
                yield from _encoded(where, ours, theirs, (parts[0][label], parts[1][label]))
            else:
                yield from _values(where, ours.tensor(parts[0][label]), theirs.tensor(parts[1][label]))
    else:
        described = [f"{record['dtype']} {list(record['shape'])}" for record in (mine, other)]
        if described[0] != described[1]:
            yield Difference(name, f"{described[0]} in the first, {described[1]} in the second")
        else:
            yield from _values(name, ours.whole(mine, pair[0]), theirs.whole(other, pair[1]))


def _objects(ours: _Side, theirs: _Side) -> Iterator[Difference]:
    yield from _only(ours.index.objects, theirs.index.objects)
    for name in sorted({*ours.index.objects} & {*theirs.index.objects}, key=_place):
        entries = ours.index.objects[name], theirs.index.objects[name]
        ranks = sorted(
            {rank for each in entries for entry in each if entry["ranks"] != "all" for rank in entry["ranks"]}
        )
        for rank in ranks or ["all"]:
            where = name if rank == "all" else f"{name}, rank {rank}"
            found = [_of_rank(each, rank) for each in entries]
            if found[0] is None or found[1] is None:
                yield Difference(where, "only in the second" if found[0] is None else "only in the first")
            else:
                yield from _encoded(where, ours, theirs, (found[0], found[1]))


def _of_rank(entries: Sequence[Mapping[str, Any]], rank: int | str) -> Mapping[str, Any] | None:
    """What a rank has of an object, be it for all or for some ranks."""
    return next((entry for entry in entries if entry["ranks"] == "all" or rank in entry["ranks"]), None)


def _encoded(
    where: str, ours: _Side, theirs: _Side, pair: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Iterator[Difference]:
    mine, other = pair
    if mine.get("signature") != other.get("signature"):
        yield Difference(where, f"{mine.get('signature')} in the first, {other.get('signature')} in the second")
        return
    yield from _skeletons(where, mine["skeleton"], other["skeleton"])
    yield from _only(mine["tensors"], other["tensors"], f"{where}: ")
    for path in sorted({*mine["tensors"]} & {*other["tensors"]}):
        yield from _values(
            f"{where}: {path}", ours.tensor(mine["tensors"][path]), theirs.tensor(other["tensors"][path])
        )


def _skeletons(where: str, mine: Any, other: Any) -> Iterator[Difference]:
    if isinstance(mine, dict) and isinstance(other, dict):
        yield from _only(mine, other, f"{where}: ")
        for name in mine:
            if name in other:
                yield from _skeletons(f"{where}: {name}", mine[name], other[name])
    elif isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        for place, (one, two) in enumerate(zip(mine, other, strict=True)):
            yield from _skeletons(f"{where}: {place}", one, two)
    elif type(mine) is not type(other) or repr(mine) != repr(
        other
    ):  # 1, 1.0 and True are not the same, 0.0 and -0.0 neither
        numbers = type(mine) is type(other) and isinstance(mine, (int, float)) and not isinstance(mine, bool)
        largest = float(abs(mine - other)) if numbers else None
        yield Difference(where, f"{mine!r:.80} in the first, {other!r:.80} in the second", largest)


def _values(name: str, mine: _Values, other: _Values) -> Iterator[Difference]:
    """Whether two tensors have the same bits, and how far they are apart if not."""
    if mine[:2] != other[:2]:
        yield Difference(name, f"{mine} in the first, {other} in the second")
        return
    flat = [values.bits.view(-1, values.dtype.itemsize) for values in (mine, other)]
    count, largest = 0, 0.0
    for one, two in zip(*(bits.split(_STRIDE) for bits in flat), strict=True):
        differing = (one != two).any(dim=1)
        if differing.any():
            count += int(differing.sum())
            largest = max(largest, _distance(one[differing], two[differing], mine.dtype))
    if count:
        known = math.isfinite(largest)
        words = f"{count} of {len(flat[0])} values differ, {f'by at most {largest:.6g}' if known else 'not all by a number'}"
        yield Difference(name, words, largest if known else None)


def _distance(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest absolute difference; infinite where one value is not finite, or where torch cannot compute with the dtype."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    try:
        apart = (one.view(dtype).to(wide) - two.view(dtype).to(wide)).abs()
    except NotImplementedError:
        return math.inf
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _compared(first: Path, second: Path) -> _Answer:
    differences = compare(first, second)
    content = {
        "first": str(first),
        "second": str(second),
        "differences": [difference._asdict() for difference in differences],
    }
    lines = [f"{difference.name}: {difference.what}" for difference in differences]
    count = f"{len(lines)} differences" if lines else "no difference"
    summary = f"{count} between {first} (the first) and {second} (the second)"
    return _Answer(content, "\n".join([*lines, summary]), AMISS if differences else FINE)

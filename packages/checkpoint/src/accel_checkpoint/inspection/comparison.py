"""In what two checkpoints differ. Objects are compared as they are encoded: no class that they name is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_checkpoint.files.manifest import unreplaced
from accel_checkpoint.files.stored import DTYPES
from accel_checkpoint.inspection.survey import Contents, place_of

if TYPE_CHECKING:
    from accel_checkpoint.files.index import Index
    from accel_checkpoint.files.part_file import PartReader

_STRIDE = 1 << 20  # elements that are compared at a time, as float64


class Difference(NamedTuple):
    """Something that two checkpoints do not have in common.

    Args:
        name: of the tensor, or of the unit and the path inside it.
        what: how they differ, in words.
        largest: the largest absolute difference of two numbers; None where it is about something
            else, or one is not finite.
    """

    name: str
    what: str
    largest: float | None = None


def compare(first: Path, second: Path) -> list[Difference]:
    """Everything in which the contents of two checkpoints differ: values bit by bit, however they are spread over files.

    Needs memory for the largest tensor twice. What describes the run rather than its state (id,
    time, record) is not looked at.

    Raises:
        CheckpointError: if one of them is no checkpoint, or damaged where it was read.
        FileNotFoundError: if one of the folders does not exist.
    """
    return unreplaced(first, lambda: unreplaced(second, lambda: _compared(first, second)))


def _compared(first: Path, second: Path) -> list[Difference]:
    pair = Contents.of(first), Contents.of(second)
    with pair[0].readers() as ours, pair[1].readers() as theirs:
        sides = _Side(pair[0].index, ours), _Side(pair[1].index, theirs)
        return [*_tensors(*sides), *_objects(*sides)]


@dataclass(frozen=True)
class _Side:
    """One of the two."""

    index: Index
    readers: Mapping[str, PartReader]

    def tensor(self, place: Mapping[str, Any]) -> Values:
        return read_values(self.readers[place["file"]], place["key"])

    def whole(self, record: Mapping[str, Any], name: str) -> Values:
        """A tensor, put together from its boxes."""
        if record["kind"] != "elementwise":
            return self.tensor(record["parts"][0])
        shape, dtype = tuple(record["shape"]), self.index.dtype(name)
        out = torch.empty((*shape, dtype.itemsize), dtype=torch.uint8)
        for stored in self.index.boxes(name):
            out[stored.box.slices] = read_values(self.readers[stored.file], stored.key).bits
        return Values(dtype, shape, out)


class Values(NamedTuple):
    """A tensor as its bytes, in a last dim of their own: torch can do little with some dtypes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: torch.Tensor

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def read_values(reader: PartReader, key: str) -> Values:
    """A tensor of a file, verified."""
    stored = reader.stored.tensors[key]
    dtype = DTYPES[stored.dtype]
    bits = torch.empty((*stored.shape, stored.itemsize), dtype=torch.uint8)
    reader.read(key, bits.view(dtype).view(stored.shape))
    return Values(dtype, stored.shape, bits)


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
    for name in sorted({*ours.index.objects} & {*theirs.index.objects}, key=place_of):
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
    """The entry of an object for a rank, or for all ranks; None if the rank has none."""
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


def _values(name: str, mine: Values, other: Values) -> Iterator[Difference]:
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

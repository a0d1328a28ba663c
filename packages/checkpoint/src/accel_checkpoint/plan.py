"""Plans for checkpoints: which rank writes what, and which stored parts a rank reads.

Both are arithmetic on boxes, and read no data. Every rank describes what it has; from all
descriptions each rank computes the same plan by itself.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from accel_checkpoint.boxes import uncovered, uncovered_part
from accel_checkpoint.words import LINES
from accel_core import CheckpointError
from accel_core.api.checkpoint import WHOLE
from accel_core.api.component import listed
from accel_core.api.layouts import Box, Elementwise, Opaque, Partial, Replicated

T = TypeVar("T")
Kind = Literal["elementwise", "replicated", "partial", "opaque"]


@dataclass(frozen=True)
class Claim:
    """One rank's part of a name, without data. Opaque parts have no shape, dtype or bytes."""

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: str = ""
    boxes: tuple[Box, ...] = ()
    signature: str = ""
    part: str = WHOLE
    nbytes: int = 0

    @classmethod
    def of(cls, entry: Elementwise | Replicated | Partial | Opaque) -> Claim:
        """The claim that an entry makes; an alias makes none."""
        if isinstance(entry, Opaque):
            return cls("opaque", signature=entry.signature, part=entry.part)
        if isinstance(entry, Elementwise):
            boxes = tuple(piece.box for piece in entry.pieces)
            nbytes = sum(box.numel for box in boxes) * entry.dtype.itemsize
            return cls("elementwise", tuple(entry.shape), str(entry.dtype), boxes, nbytes=nbytes)
        data = entry.data
        nbytes = data.numel() * data.dtype.itemsize
        kind: Kind = "replicated" if isinstance(entry, Replicated) else "partial"
        return cls(kind, tuple(data.shape), str(data.dtype), nbytes=nbytes)


Description = Mapping[str, Claim]  # the names and claims that one rank presents


@dataclass(frozen=True)
class Task:
    """A write of one rank: a box of an elementwise tensor, or (None) all that it presents."""

    name: str
    box: Box | None
    part: str  # that of an opaque value, "rank <r>" for a term, else "whole"


class _Item(NamedTuple):
    """A task, the ranks that could do it, and its size in bytes."""

    task: Task
    ranks: Sequence[int]
    nbytes: int


_Claims = Mapping[int, Claim]  # the claims of the ranks for one name


def plan(descriptions: Sequence[Description], members: Sequence[int] | None = None) -> list[list[Task]]:
    """Assigns tasks to ranks: everything is written once, with about equal bytes for each rank.

    Takes one description per rank, and the writing ranks (None: all), which together present
    everything. CheckpointError is raised if ranks differ about a name, or if the members present
    something not at all, or twice.
    """
    ranks = range(len(descriptions)) if members is None else sorted(set(members))
    presented: dict[str, dict[int, Claim]] = {}
    for rank, description in enumerate(descriptions):
        for name, claim in description.items():
            presented.setdefault(name, {})[rank] = claim
    _check_all(presented, len(descriptions), None if members is None else ranks)
    items = [item for name, claims in presented.items() for item in _items(name, _among(claims, ranks))]
    tasks: list[list[Task]] = [[] for _ in descriptions]
    for item, owner in zip(items, _owners(items, len(descriptions)), strict=True):
        tasks[owner].append(item.task)
    return tasks


def _among(claims: _Claims, ranks: Sequence[int]) -> _Claims:
    return {rank: claims[rank] for rank in ranks if rank in claims}


def _items(name: str, claims: _Claims) -> list[_Item]:
    if not claims:
        return []
    kind = next(iter(claims.values())).kind
    if kind == "replicated":
        lowest = min(claims)
        return [_Item(Task(name, None, WHOLE), [lowest], claims[lowest].nbytes)]
    if kind == "partial":
        return [_Item(Task(name, None, f"rank {rank}"), [rank], claim.nbytes) for rank, claim in claims.items()]
    if kind == "opaque":
        return [_Item(Task(name, None, part), on, 0) for part, on in _parts(claims).items()]
    return [_Item(Task(name, box, WHOLE), on, _nbytes(box, claims[on[0]])) for box, on in _boxes(claims).items()]


def _boxes(claims: _Claims) -> dict[Box, list[int]]:
    unique = {rank: [box for box in dict.fromkeys(claim.boxes) if not box.is_empty] for rank, claim in claims.items()}
    return _holders(unique)


def _parts(claims: _Claims) -> dict[str, list[int]]:
    return _holders({rank: [claim.part] for rank, claim in claims.items()})


def _holders(by_rank: Mapping[int, Sequence[T]]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = {}
    for rank, items in by_rank.items():
        for item in items:
            found.setdefault(item, []).append(rank)
    return found


def _nbytes(box: Box, claim: Claim) -> int:
    return claim.nbytes * box.numel // sum(each.numel for each in claim.boxes)


def _owners(items: Sequence[_Item], world_size: int) -> list[int]:
    """The rank for each item: if several can, the largest first, to the least loaded rank."""
    loads = [(0, 0)] * world_size  # bytes and tasks, for there are values of which nobody knows the size
    owners = [0] * len(items)
    for number in sorted(range(len(items)), key=lambda number: (len(items[number].ranks) > 1, -items[number].nbytes)):
        owner = min(items[number].ranks, key=lambda rank: (loads[rank], rank))
        nbytes, tasks = loads[owner]
        loads[owner] = nbytes + items[number].nbytes, tasks + 1
        owners[number] = owner
    return owners


def _check_all(presented: Mapping[str, _Claims], world_size: int, members: Sequence[int] | None) -> None:
    """Raises CheckpointError if something is not presented correctly by all ranks or members."""
    _check(
        presented,
        range(world_size),
        "The state of all ranks was to be saved, but together they do not present each element exactly once",
        "Give all ranks the same models and optimizers, or correct the model_state or the optimizer_state of the strategy.",
    )
    if members is not None:
        asked = f"Every node was to save all of the state, but this one ({_ranks(members)}) does not hold it"
        advice = "Use ProjectConfiguration(save_on_each_node=False), with a folder that all nodes share."
        _check(presented, members, asked, advice)


def _check(presented: Mapping[str, _Claims], ranks: Sequence[int], asked: str, advice: str) -> None:
    flaws = [f"{name}: {flaw}" for name, claims in presented.items() if (flaw := _flaw(claims, ranks))]
    if flaws:
        lines = f"{LINES}{listed(flaws, LINES)}"
        raise CheckpointError(f"{asked}: {len(flaws)} of {len(presented)} names.{lines}\n{advice}")


def _flaw(claims: _Claims, members: Sequence[int]) -> str | None:
    """The flaw in what the ranks present of a name, as text; None if there is none."""
    first = next(iter(claims.values()))
    summaries = {rank: _summary(claim) for rank, claim in claims.items()}
    if len(set(summaries.values())) > 1:
        return f"the ranks differ: {_by_rank(summaries)}"
    if first.kind == "elementwise":
        return _gap(first.shape, _among(claims, members), members)
    if first.kind == "replicated":
        return None if _among(claims, members) else f"it is only on {_ranks([*claims])}"
    if first.kind == "partial":
        missing = [rank for rank in sorted({*members, *claims}) if rank not in claims or rank not in members]
        return f"the terms of {_ranks(missing)} are missing" if missing else None
    return _clash(claims, members)


def _gap(shape: tuple[int, ...], claims: _Claims, members: Sequence[int]) -> str | None:
    """The reason why boxes do not cover an elementwise tensor exactly once; None if they do."""
    if claims and all(claim.boxes == (Box.whole(shape),) for claim in claims.values()):
        return None  # the usual case, and quick
    why = uncovered(shape, _boxes(claims))
    if why is None:
        return None
    boxes = {rank: claims[rank].boxes if rank in claims else () for rank in members}
    return f"{why} (shape {shape}): {_by_rank({rank: listed([*map(str, each)]) for rank, each in boxes.items()})}"


def _clash(claims: _Claims, members: Sequence[int]) -> str | None:
    """The flaw in the parts of an opaque value, as text; None if there is none."""
    for part, ranks in _parts(claims).items():
        if len({claims[rank].signature for rank in ranks}) > 1:
            return f"the ranks differ about the part {part!r}: {_by_rank({r: claims[r].signature for r in ranks})}"
        if not set(ranks) & set(members):
            return f"the part {part!r} is only on {_ranks(ranks)}"
    return None


def _summary(claim: Claim) -> str:
    return " ".join([claim.kind, *([] if claim.kind == "opaque" else [str(claim.shape), claim.dtype])])


def _by_rank(words: Mapping[int, str]) -> str:
    """The words of all ranks as text; ranks with the same words are grouped."""
    groups: dict[str, list[int]] = {}
    for rank, word in words.items():
        groups.setdefault(word or "nothing", []).append(rank)
    return listed([f"{word} on {_ranks(ranks)}" for word, ranks in groups.items()], "; ")


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {listed([str(number) for number in numbers])}"


@dataclass(frozen=True)
class StoredBox:
    """The place of a tensor's box: a file, and the key in it of a tensor of shape `box.sizes`."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class Copy:
    """A region to read: `source` in the data of `stored.box` goes to `target` in the wanted box."""

    stored: StoredBox
    source: Box
    target: Box


class StoredBoxes:
    """The places of a tensor in the files of a checkpoint: boxes that cover it exactly once."""

    def __init__(self, name: str, stored: Sequence[StoredBox]) -> None:
        self._name = name
        self._dims = {len(numbers) for each in stored for numbers in (each.box.offsets, each.box.sizes)}
        # What is bisected is the dim that tells most boxes apart: rows by their row, columns by their column.
        dims = range(min(self._dims, default=0))
        self._dim = max(dims, key=lambda dim: len({each.box.offsets[dim] for each in stored}), default=None)
        self._stored = sorted(stored, key=lambda each: (self._extent(each.box), each.box.offsets))
        self._starts = [self._extent(each.box)[0] for each in self._stored]
        self._longest = max((self._extent(each.box)[1] for each in stored), default=0)

    def copies(self, wanted: Box) -> list[Copy]:
        """The copies for a box of the tensor; CheckpointError unless each element is there once."""
        if wanted.is_empty:
            return []
        if self._dims - {len(wanted.sizes)}:
            raise self._refusal(wanted, f"some of another number of dims ({listed([*map(str, sorted(self._dims))])})")
        start, size = self._extent(wanted)
        first, last = (bisect.bisect_left(self._starts, at) for at in (start - self._longest + 1, start + size))
        shared = [(each, box) for each in self._stored[first:last] if (box := each.box.intersection(wanted))]
        why = uncovered_part(wanted, [box for _, box in shared])
        if why is not None:
            raise self._refusal(wanted, f"and {why}")
        return [Copy(each, box.relative_to(each.box), box.relative_to(wanted)) for each, box in shared]

    def _extent(self, box: Box) -> tuple[int, int]:
        return (0, 1) if self._dim is None else (box.offsets[self._dim], box.sizes[self._dim])

    def _refusal(self, wanted: Box, why: str) -> CheckpointError:
        has = f"the checkpoint has {len(self._stored)} boxes of it, {why}"
        return CheckpointError(f"{wanted} of {self._name!r} is to be loaded, but {has}. Load another checkpoint.")

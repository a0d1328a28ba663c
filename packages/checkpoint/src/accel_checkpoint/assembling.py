"""Puts whole tensors together from parts on the ranks: one after another, and in portions."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accel_checkpoint.boxes import uncovered
from accel_checkpoint.collective_steps import everywhere, exchange, located, portable
from accel_checkpoint.deferred import data_of, is_deferred
from accel_checkpoint.host_copies import parts_of
from accel_core import CheckpointError
from accel_core.api.checkpoint import memory_of
from accel_core.api.layouts import Alias, Box, Elementwise, Entry, Opaque, Replicated, State

if TYPE_CHECKING:
    from accel_core import World

T = TypeVar("T")

BUFFER = 4 << 20
"""Bytes sent at once: without a copy, if the group can send them from the memory of the tensor, or receive into it."""

_NEXT = "for what the main process reads next"


class Weights(Mapping[str, Any]):
    """The state of a model, whose values are put together on every rank, each when it is read.

    Unless all is `replicated`, reading is a collective: ranks read the same names in one order.
    """

    def __init__(self, state: State, world: World, *, replicated: bool) -> None:
        self._state = state
        self._world = world
        self._replicated = replicated

    def __getitem__(self, name: str) -> Any:
        entry = _resolved(self._state, name)
        return _own(entry) if self._replicated and _is_here(entry) else gather_entry(name, entry, self._world)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


class WeightGather:
    """The state of a model, which the main process reads value by value; others send their parts.

    Making one, of names with `prefix`, is a collective; CheckpointError is raised on every rank if
    ranks present different names, shapes or dtypes. Then all call `together`.
    """

    def __init__(self, state: State, world: World, prefix: str = "") -> None:
        names = [name for name in state if name.startswith(prefix)]
        self._entries = {name.removeprefix(prefix): _resolved(state, name) for name in names}
        self._world = world
        self._call = ""
        self._broken_off = False
        _check_alike(self._entries, world)

    @property
    def awaited(self) -> set[str]:
        """The names whose data are not in memory here: they come from other ranks, or from files."""
        return {name for name, entry in self._entries.items() if _is_awaited(entry)}

    def sketch(self) -> dict[str, Any]:
        """All values by name; awaited ones as meta tensors. Ties are one object."""
        found = {id(entry): _sketch(entry) for entry in self._entries.values()}
        return {name: found[id(entry)] for name, entry in self._entries.items()}

    def together(self, call: str, work: Callable[[], T]) -> T | None:
        """Calls `work` on the main process to read `gathering[name]`; its result there. Collective.

        `call` is what the user called, in messages. What `work` raised, or a rank that brings its
        part, is raised on every rank.
        """
        if self._world.size == 1:
            return work()
        self._call = call
        if self._world.is_main:
            return self._lead(work)
        self._follow()
        return None

    def __getitem__(self, name: str) -> Any:
        """A value on the main process, in `together`: live if whole here, else new CPU memory."""
        entry = self._entries[name]
        if _is_here(entry):
            return _own(entry)
        try:
            self._next(name, None)
            return self._bring(name)
        except BaseException:
            self._broken_off = True  # the others have raised too, or cannot be reached
            raise

    def all(self) -> dict[str, Any]:
        """Everything in CPU memory, as `__getitem__` gives it. Ties stay ties."""
        found: dict[int, Any] = {}
        for name, entry in self._entries.items():
            if id(entry) not in found:
                value = self[name]
                found[id(entry)] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        return {name: found[id(entry)] for name, entry in self._entries.items()}

    def _lead(self, work: Callable[[], T]) -> T:
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            if self._broken_off:
                raise
            failure = error
        reason = portable(failure)
        self._next(None, reason)
        if reason is not None:
            raise located(reason, 0) from failure
        return result

    def _follow(self) -> None:
        name, reason = self._next(None, None)
        while name is not None:
            self._bring(name)
            name, reason = self._next(None, None)
        if reason is not None:
            raise located(reason, 0)

    def _next(self, name: str | None, reason: Exception | None) -> tuple[str | None, Exception | None]:
        """The next name that the main process reads; None at the end, with an error. Collective."""
        # Between these blocks the main process is in no collective: what is amiss elsewhere lets it write to the end.
        with self._world.collective(self._call):
            return exchange(self._world, _NEXT, (name, reason))[0]

    def _bring(self, name: str) -> torch.Tensor | None:
        """Puts a tensor together on the main process. A collective; only ranks with parts wait."""
        entry = self._entries[name]
        assert isinstance(entry, Elementwise), "everything else is where it is read"
        kept: list[torch.Tensor] = []

        def start() -> list[Box]:
            if self._world.is_main:
                kept.append(torch.empty(entry.shape, dtype=entry.dtype))
            return [piece.box for piece in entry.pieces]

        with self._world.collective(self._call):
            sources = _sources(entry, everywhere(self._world, f"to read {name!r}", start))
            if self._world.is_main:
                _receive(entry, sources, kept[0], self._world)
                return kept[0]
            _send(entry, sources, self._world)
            return None


def gather_entry(name: str, entry: Entry, world: World) -> Any:
    """The value of an entry: live memory if every rank has all of it, else put together on each.

    A collective for an `Elementwise` entry; CollectiveMismatchError on each rank if names differ.
    """
    assert not isinstance(entry, Alias), "the entry that it stands for is asked for"
    if not isinstance(entry, Elementwise):
        return _own(entry)
    device = entry.pieces[0].data.device if entry.pieces else world.device
    kept: list[torch.Tensor] = []

    def start() -> list[Box]:
        if not _is_here(entry):
            kept.append(torch.empty(entry.shape, dtype=entry.dtype, device=device))
        return [piece.box for piece in entry.pieces]

    everyone = everywhere(world, f"to read {name!r}", start)
    if all(Box.whole(entry.shape) in boxes for boxes in everyone):
        return _own(entry)
    result = kept[0] if kept else torch.empty(entry.shape, dtype=entry.dtype, device=device)
    _broadcast(entry, _sources(entry, everyone), result, world)
    return result


def _resolved(state: State, name: str) -> Entry:
    entry = state[name]
    return state[entry.of] if isinstance(entry, Alias) else entry


def _is_here(entry: Entry) -> bool:
    if not isinstance(entry, Elementwise):
        return True
    return any(piece.box == Box.whole(entry.shape) for piece in entry.pieces)


def _is_awaited(entry: Entry) -> bool:
    """Whether the data of an entry are not in the memory of this rank."""
    return not _is_here(entry) or (not isinstance(entry, (Alias, Opaque)) and any(map(is_deferred, memory_of(entry))))


def _own(entry: Entry) -> Any:
    """The value of an entry that this rank has all of; what is offloaded is read."""
    assert not isinstance(entry, Alias), "the entry that it stands for is asked for"
    if not isinstance(entry, Elementwise):
        return entry.value if isinstance(entry, Opaque) else data_of(entry.data)
    return data_of(next(piece.data for piece in entry.pieces if piece.box == Box.whole(entry.shape)))


def _sketch(entry: Entry) -> Any:
    if isinstance(entry, Elementwise) and _is_awaited(entry):
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    if isinstance(entry, Replicated) and _is_awaited(entry):
        return entry.data.detach()
    return _own(entry)


def _check_alike(entries: Mapping[str, Entry], world: World) -> None:
    """Raises CheckpointError on every rank if names, shapes or dtypes differ. A collective."""
    lines = [f"{name}: {_words(entry)}" for name, entry in entries.items()]
    digest = hashlib.blake2b("\n".join(lines).encode()).hexdigest()
    if len({*exchange(world, "for weights to be put together", digest)}) == 1:
        return
    everyone = exchange(world, "to compare weights", lines)
    rank, other = next((rank, lines) for rank, lines in enumerate(everyone) if lines != everyone[0])
    pairs = itertools.zip_longest(everyone[0], other, fillvalue="nothing more")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    raise CheckpointError(
        f"The weights of a model were to be put together on rank 0, but the ranks present different ones. The first that differ: "
        f"rank 0 has {first}; rank {rank} has {second}. Prepare the same model on every rank, and read the same part of it."
    )


def _words(entry: Entry) -> str:
    if isinstance(entry, Elementwise):
        return f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"
    return type(entry).__name__.lower()


def _sources(entry: Elementwise, everyone: Sequence[Sequence[Box]]) -> dict[Box, int]:
    """The boxes that a tensor is put together of, each with the lowest rank that has it."""
    sources: dict[Box, int] = {}
    for rank, boxes in enumerate(everyone):
        for box in boxes:
            if not box.is_empty:
                sources.setdefault(box, rank)
    gap = uncovered(entry.shape, sources)
    if gap is not None:
        raise CheckpointError(
            f"A tensor of the shape {list(entry.shape)} was to be put together, but of what the ranks have of it {gap}. Correct "
            f"the model_state of the strategy."
        )
    return sources


def _receive(entry: Elementwise, sources: Mapping[Box, int], target: torch.Tensor, world: World) -> None:
    """Fills a tensor on the main process with what it has itself, and what the others send."""
    own = {piece.box: piece.data for piece in entry.pieces}
    for box, rank in sources.items():
        if rank == world.rank:
            target[box.slices].copy_(own[box].detach())
            continue
        for portion in parts_of(target[box.slices], BUFFER):
            place = _travelling(portion, world)
            _passed(dist.irecv, place, rank, world)
            _settle(portion, place)


def _send(entry: Elementwise, sources: Mapping[Box, int], world: World) -> None:
    """Sends the main process what it expects from this rank."""
    own = {piece.box: piece.data for piece in entry.pieces}
    for box, rank in sources.items():
        if rank == world.rank:
            for portion in parts_of(own[box].detach(), BUFFER):
                _passed(dist.isend, _travelling(portion, world, filled=True), 0, world)


def _broadcast(entry: Elementwise, sources: Mapping[Box, int], target: torch.Tensor, world: World) -> None:
    """Fills a tensor on every rank. A collective."""
    own = {piece.box: piece.data for piece in entry.pieces}
    with world.collective("weights[name]"):
        for box, rank in sources.items():
            if rank == world.rank:
                target[box.slices].copy_(own[box].detach())
            for portion in parts_of(target[box.slices], BUFFER) if world.size > 1 else ():
                place = _travelling(portion, world, filled=rank == world.rank)
                dist.broadcast(place, group=world.channel().group, group_src=rank)
                if rank != world.rank:
                    _settle(portion, place)


def _passed(way: Callable[..., Any], content: torch.Tensor, peer: int, world: World) -> None:
    """Sends or receives bytes, and returns when that is done."""
    # In a batch NCCL takes the communicator that the group has; alone, it would make one for each pair of ranks.
    for work in dist.batch_isend_irecv([dist.P2POp(way, content, group=world.channel().group, group_peer=peer)]):
        work.wait()


def _travelling(portion: torch.Tensor, world: World, *, filled: bool = False) -> torch.Tensor:
    """The bytes of a portion, for any dtype: its own memory if the group can send it; or a copy."""
    device = world.channel().device
    if portion.is_conj() or portion.is_neg() or not portion.is_contiguous() or portion.device != device:
        empty = torch.empty(portion.shape, dtype=portion.dtype, device=device)
        portion = empty.copy_(portion) if filled else empty
    return portion.reshape(-1).view(torch.uint8)


def _settle(portion: torch.Tensor, place: torch.Tensor) -> None:
    """Puts received bytes where they belong, unless they have been received there."""
    if place.data_ptr() != portion.data_ptr():
        portion.copy_(place.view(portion.dtype).view(portion.shape))

"""Exchange of bytes in a group: one collective per message, and an error instead of a hang.

An exchange is an all_gather of one flat buffer: per rank a header of 64-bit words (turn of the
buffer, digest, bytes needed, bytes beside, rows of each tensor), then the tensors, aligned. The
digest covers the call, the structure, the dtypes and all dimensions but the first, so that ranks
that called different things are seen. Capacities follow from earlier headers alone, the same on
every rank; if any rank needs more, a second, larger collective follows. Messages have a process
group of their own: gloo takes one for that of another collective.

They lie on the host if the group carries that, so that reading them waits for no device; tensors of
a device go beside them, in a collective that is queued there once headers agree.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from accel_core.base.torch_versions import all_gather_single
from accel_core.processes.mismatch_report import Description, describe, mismatch
from accel_core.processes.watch.collective_scope import REFUSED
from accel_core.processes.watch.stack_location import calling_line

if TYPE_CHECKING:
    from accel_core.processes.watch.monitor import Watch

FRAME_STEP = 4096
"""Capacities are multiples of so many bytes; below, gloo takes the same time for any size."""
MEMORY = 4  # earlier needs, after an exchange of the same kind, of which the largest decides about a capacity
KEPT_FRAMES, KEPT_BYTES = 4, 64 << 20  # buffers for reuse, and the largest: a huge gather is not to stay in memory
KEPT_LAYOUTS = 64  # per cache
_ALIGNMENT = 16
_WORD = 8
_HEADER = 4  # words before the rows
_UNWATCHED: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

K = TypeVar("K")
V = TypeVar("V")

Spec = tuple[torch.dtype, tuple[int, ...]]  # of a tensor up to its first dimension: dtype, and the sizes of the others


class Letter:
    """A rank's message without its values; kept per layout. `stacked`: all `rows` are 1, in one."""

    def __init__(
        self,
        description: Description,
        specs: Sequence[Spec],
        rows: Sequence[int],
        device: torch.device,
        stacked: bool = False,
    ) -> None:
        self.description, self.specs, self.rows, self.stacked = description, tuple(specs), tuple(rows), stacked
        call = description["call"]
        self.name = call if call.endswith(")") else f"{call}()"
        self.digest = _digest(json.dumps(description))
        self.kind: Hashable = (call, description["structure"], *[leaf[1] for leaf in description["leaves"]])
        self.size = _places(self.specs, rows)[1]
        words = [self.digest, self.size, 0, *rows]
        self.header = torch.tensor([[1, *words], [2, *words]], dtype=torch.int64, device=device)

    @functools.cached_property
    def announcement(self) -> Letter:
        """The letter of a message whose tensors go beside it."""
        letter = copy.copy(self)
        letter.specs, letter.rows, letter.size = (), (), (_HEADER + len(self.rows)) * _WORD
        letter.header = self.header.clone()
        letter.header[:, 2:_HEADER] = torch.tensor([letter.size, self.size])
        return letter


class Channel:
    """The exchange of messages between a group's ranks. Every method is a collective of the group.

    `connect` gives the process group when needed; `members`: its ranks in the world (None: all).
    `device` is that of its tensors, `message_device` that of its messages: the CPU if it can be.
    """

    def __init__(
        self,
        connect: Callable[[], dist.ProcessGroup],
        rank: int,
        size: int,
        device: torch.device,
        message_device: torch.device,
        watch: Watch | None = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self._connect, self._watch, self._members = connect, watch, members
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size, self.device, self.message_device = rank, size, device, message_device
        self.letters: _Cache[Hashable, Letter] = _Cache()
        self._frames: dict[int, _Frame] = {}
        # Apart: ranks may use unlike streams, and have to keep the same frames of messages.
        self._beside: dict[Hashable, _Frame] = {}
        self._needs: _Cache[Hashable, tuple[int, ...]] = _Cache()
        self._previous: Hashable = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The messages' process group; None for a rank alone. First access: a collective."""
        if self._group is None and self.size > 1:
            self._group = self._connect()
        return self._group

    def exchange(self, letter: Letter, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Sends this rank's tensors, receives all: per tensor, one part per rank, in rank order.

        A part has the shape (its rank's rows, trailing dimensions); that of a stacked letter is a
        single one of (ranks, trailing dimensions). Parts are detached, in a buffer that the next
        exchange overwrites. `CollectiveMismatchError` on every rank if calls differ.
        """
        sent, given = letter, tensors
        if self.message_device != self.device and any(tensor.device.type == self.device.type for tensor in tensors):
            sent, given = letter.announcement, ()
        with self._marked(letter.name, letter.description):
            frame = self._frame(self._capacity())
            headers = self._pass(frame, sent, given)
            largest = max([header[1] for header in headers])
            if largest > frame.capacity:
                frame = self._frame(capacity_for(largest))
                headers = self._pass(frame, sent, given)
            beside = max([header[2] for header in headers])
            if beside:  # on one rank at least; in buffers of this stream, with which nothing orders what others queue
                stream = torch.accelerator.current_stream(self.device)
                frame = self._frame(capacity_for(max(beside, largest)), stream)
                frame.write(letter, tensors, beside=True)
                all_gather_single(frame.received, frame.sent, group=self.group)
        self._needs[self._previous] = (*self._needs.get(self._previous, ())[1 - MEMORY :], largest)
        self._previous = letter.kind
        return frame.parts(letter, headers)

    def letter(
        self,
        key: Hashable,
        description: Callable[[], Description],
        specs: Sequence[Spec] = (),
        rows: Sequence[int] = (),
        stacked: bool = False,
    ) -> Letter:
        """The letter that was made for this key, or a new one."""
        letter = self.letters.get(key)
        if letter is None:
            letter = self.letters[key] = Letter(description(), specs, rows, self.message_device, stacked)
        return letter

    def arrive(self, name: str) -> None:
        """Returns once all ranks are here by one name, else all raise `CollectiveMismatchError`."""
        self.exchange(self.letter(name, lambda: describe(name)), ())

    def refuse(self, error: Exception) -> NoReturn:
        """Raises `error`, about unsendable arguments; other ranks in `exchange` raise too."""
        with self._marked(REFUSED):
            self._refuse(self._frame(self._capacity()), error)

    def _marked(self, name: str, details: Description | None = None) -> contextlib.AbstractContextManager[object]:
        return _UNWATCHED if self._watch is None else self._watch.collective(name, self._members, details)

    def _pass(self, frame: _Frame, letter: Letter, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        """One collective. Returns the headers by rank, all of which agree."""
        try:
            headers = frame.write(letter, tensors)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks are waiting)
            self._refuse(frame, error)
        by_rank = self._gathered(frame, headers)
        for header in by_rank:
            if header[0] != letter.digest:
                raise mismatch(self._descriptions(letter.description))
        return by_rank

    def _refuse(self, frame: _Frame, error: Exception) -> NoReturn:
        refusal = self.letter(REFUSED, lambda: describe(REFUSED))
        if any(header[0] != refusal.digest for header in self._gathered(frame, frame.write(refusal, ()))):
            self._descriptions({"error": f"{type(error).__name__}: {error}"})
        raise error

    def _gathered(self, frame: _Frame, headers: torch.Tensor) -> list[list[int]]:
        """The headers of all ranks without their turns, which are to be that of this frame."""
        all_gather_single(frame.received, frame.sent, group=self.group)
        by_rank: list[list[int]] = headers.tolist()
        turns = [header.pop(0) for header in by_rank]
        if turns.count(frame.turn) != self.size or (self._watch and self._watch.verdict):
            # A backend may return then without having written, and an earlier message still lies there.
            raise dist.DistError(
                "A collective was broken off, and what has arrived may be older than this call. Nothing of it can be used: start "
                "anew from the last checkpoint."
            )
        frame.turn = 3 - frame.turn
        return by_rank

    def _capacity(self) -> int:
        return capacity_for(max(self._needs.get(self._previous, (FRAME_STEP,))))

    def _frame(self, capacity: int, stream: Hashable = None) -> _Frame:
        frames: dict[Any, _Frame] = self._frames if stream is None else self._beside
        device, key = (self.message_device, capacity) if stream is None else (self.device, (capacity, stream))
        frame = frames.pop(key, None) or _Frame(capacity, self.size, device)
        if capacity * (self.size + 1) <= KEPT_BYTES:
            frames[key] = frame  # at the end: the first is the one not used for longest
            if len(frames) > KEPT_FRAMES:
                del frames[next(iter(frames))]
        return frame

    def _descriptions(self, description: Description) -> list[Description]:
        """All descriptions, in rank order. Two collectives, only when something is wrong."""
        text = from_bytes(bytearray(json.dumps({**description, "line": calling_line()}).encode()))
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.message_device)
        all_gather_single(lengths, torch.tensor([len(text)], device=lengths.device), group=self.group)
        longest = int(lengths.max())
        padded = torch.nn.functional.pad(text, (0, longest - len(text)), value=ord(" ")).to(lengths.device)
        received = torch.empty(self.size * longest, dtype=torch.uint8, device=lengths.device)
        all_gather_single(received, padded, group=self.group)
        return [json.loads(to_bytes(part)) for part in received.chunk(self.size)]


class _Frame:
    """The buffers of one capacity, and the views into them."""

    def __init__(self, capacity: int, size: int, device: torch.device) -> None:
        self.capacity = capacity
        self.turn = 1  # by turns 1 and 2, which tells a message from what lay there before
        with torch.inference_mode(False):  # else a buffer born in inference mode could not be written outside of it
            self.sent = torch.zeros(capacity, dtype=torch.uint8, device=device)
            self.received = torch.zeros(size * capacity, dtype=torch.uint8, device=device)
        self._by_rank = self.received.view(size, capacity)
        self._outgoing: _Cache[Letter, tuple[torch.Tensor, Sequence[torch.Tensor], list[torch.Tensor], torch.Tensor]]
        self._outgoing = _Cache()
        self._parts: _Cache[Hashable, list[list[torch.Tensor]]] = _Cache()

    def write(self, letter: Letter, tensors: Iterable[torch.Tensor], beside: bool = False) -> torch.Tensor:
        """Writes a message, or its header's start if it does not fit; returns a view of headers."""
        views = self._outgoing.get(letter)
        if views is None:
            fits = letter.size <= self.capacity
            words = letter.header.shape[1] if fits else _HEADER
            with torch.inference_mode(False):
                bodies = _bodies(self.sent, letter.specs, letter.rows) if fits else []
                place = self.sent[: words * _WORD].view(torch.int64)
                headers = self._by_rank[:, : words * _WORD].view(torch.int64)
                views = self._outgoing[letter] = place, letter.header[:, :words].unbind(), bodies, headers
        place, by_turn, bodies, headers = views
        if not beside:  # the header has been sent
            place.copy_(by_turn[self.turn - 1])
        for body, tensor in zip(bodies, tensors):  # noqa: B905  (no bodies if it does not fit)
            body.copy_(tensor.detach() if tensor.requires_grad else tensor)
        return headers

    def parts(self, letter: Letter, headers: list[list[int]]) -> list[list[torch.Tensor]]:
        """Views of what was received: for each tensor, one part per rank."""
        key = tuple(map(tuple, headers))
        parts = self._parts.get(key)
        if parts is None:
            with torch.inference_mode(False):
                if letter.stacked:
                    placed = zip(_places(letter.specs, letter.rows)[0], letter.specs, strict=True)
                    rows = [(self._by_rank[:, begin:end].view(dtype), sizes) for (begin, end), (dtype, sizes) in placed]
                    parts = [[row.view(len(row), *sizes)] for row, sizes in rows]
                else:
                    ranks = zip(self._by_rank, headers, strict=True)
                    by_rank = [_bodies(buffer, letter.specs, words[_HEADER - 1 :]) for buffer, words in ranks]
                    parts = [list(part) for part in zip(*by_rank, strict=True)]
            self._parts[key] = parts
        return parts


class _Cache(dict[K, V]):
    """A dict that is emptied when full, so that layouts used once do not accumulate."""

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= KEPT_LAYOUTS and key not in self:
            self.clear()
        super().__setitem__(key, value)


def _places(specs: Sequence[Spec], rows: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """The begin and end of each tensor in a message, in bytes, and the size of the message."""
    end = (_HEADER + len(rows)) * _WORD
    places = []
    for (dtype, sizes), count in zip(specs, rows, strict=True):
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + count * math.prod(sizes) * dtype.itemsize
        places.append((begin, end))
    return places, end


def _bodies(buffer: torch.Tensor, specs: Sequence[Spec], rows: Sequence[int]) -> list[torch.Tensor]:
    """Views of a message's tensors, with the dtypes and shapes that they have for its sender."""
    placed = zip(_places(specs, rows)[0], specs, rows, strict=True)
    return [buffer[begin:end].view(dtype).view(count, *sizes) for (begin, end), (dtype, sizes), count in placed]


def capacity_for(need: int) -> int:
    """The capacity for a need: at most an eighth more, so that similar needs share a buffer."""
    shift = max(FRAME_STEP.bit_length() - 1, need.bit_length() - 4)
    return -(-need >> shift) << shift


def _digest(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """The content of a tensor of uint8, on any device, without NumPy."""
    content = bytearray(len(tensor))
    if content:
        torch.frombuffer(content, dtype=torch.uint8).copy_(tensor)
    return content


def from_bytes(content: bytearray) -> torch.Tensor:
    """A tensor of uint8 that shares the memory of `content`."""
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

"""Messages from the rank that reads the data to each of the others: one collective per message.

A message is one scatter of flat buffers of equal size. It begins with words of 64 bits,

    bytes needed | what it is | how many words | serial | sequence number | …

of which the first is the largest need of all receivers. The size of a scatter depends only on what
every rank has seen: it is the largest of the last `MEMORY` needs, rounded up. A message that does
not fit announces its need in one scatter and follows in a second one; so one that is unusually
large costs at most `MEMORY` oversized ones.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core.api.component import Channel, capacity_for, collective
from accel_data.batch_codec import WORD, Body, Decoder, Encoder, Frame, Item, aligned, nbytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_core import World

MEMORY = 8
"""How many earlier needs decide about a capacity: an epoch begins with a few small messages, and its large ones come again."""

_BATCHES, _ERROR = 1, 2
_HEADER = 5
_ANNOUNCED = 1
"""The words of a message that only says how many bytes are needed."""

Message = tuple[list[int], Sequence[Body]]
"""All words but the first, and the bodies."""


class BatchScatter:
    """Carries batches from rank 0 of a group (None: of all) to each other rank, to each its own.

    Rank 0 calls `post` or `post_error` as often as each of the others calls `receive`; each call is
    a collective. In a group of one, posting does nothing. An error on either side leaves the
    scatter in order for the next message.
    """

    def __init__(self, world: World, group: ProcessGroup | None = None) -> None:
        channel = world.channel(group)
        self.rank, self.size = channel.rank, channel.size
        self._group = channel.group
        self._device = message_device(channel)
        self._needs: deque[int] = deque(maxlen=MEMORY)
        self._frames: list[Frame] = []
        self._encoders = [Encoder() for _ in range(self.size - 1)]
        self._decoder = Decoder(pinned=_pins(world.device))

    def post(self, serial: int, sequence: int, words: Sequence[int], parts: Sequence[Sequence[Item]]) -> None:
        """Sends each rank its batches with a few integers, and all `words`. Collective; for rank 0.

        `serial` is that of the iteration, `sequence` that of the message in it. The first part,
        rank 0's own, is not sent. Raises TypeError if a batch cannot be pickled; the others then
        raise a RuntimeError that quotes it.
        """
        assert self.rank == 0, "rank 0 of the group posts, the others receive"
        assert len(parts) == self.size, "one part per rank of the group"
        if self.size == 1:
            return
        with torch.inference_mode(False):
            try:
                messages: list[Message] = []
                for encoder, part in zip(self._encoders, parts[1:], strict=True):
                    encoded, bodies = encoder.encode(part)
                    messages.append(([serial, sequence, len(words), *words, *encoded], bodies))
                frames, need = self._written(_BATCHES, messages)
            except Exception as error:
                self.post_error(error)
                raise
            self._send(frames, need)

    def post_error(self, error: BaseException) -> None:
        """Makes the other ranks raise a RuntimeError quoting `error`. Collective; for rank 0."""
        assert self.rank == 0, "rank 0 of the group posts, the others receive"
        if self.size == 1:
            return
        for encoder in self._encoders:
            encoder.forget()
        trace = "".join(traceback.format_exception(error))
        texts = [text.encode(errors="replace") for text in (f"{type(error).__name__}: {error}", trace)]
        message: Message = ([0, 0, dist.get_rank(), *map(len, texts)], texts)
        with torch.inference_mode(False):
            self._send(*self._written(_ERROR, [message] * (self.size - 1)))

    def receive(self, serial: int, sequence: int) -> tuple[list[int], list[tuple[Any, list[int]]]]:
        """Receives the integers for all ranks, and this rank's batches, from rank 0. A collective.

        Raises RuntimeError if rank 0 posted an error, or is at another message than this one, and
        if an object of a batch cannot be unpickled.
        """
        assert self.rank > 0, "rank 0 of the group posts, the others receive"
        with torch.inference_mode(False):
            frame = self._arrived()
            kind, count = frame.words(1, 3)
            start = aligned(count * WORD)
            if kind == _ERROR:
                self._decoder.forget()
                raise _quoted(frame, frame.words(_HEADER, count), start)
            found = frame.words(3, _HEADER)
            words = iter(frame.words(_HEADER, count))
            common = [next(words) for _ in range(next(words))]
            if found == (serial, sequence):
                return common, self._decoder.decode(frame, words, start)
            with contextlib.suppress(Exception):  # it may bring structures; one from elsewhere need not make sense here
                self._decoder.decode(frame, words, start)
            raise _out_of_step((serial, sequence), found)

    def _written(self, kind: int, messages: Sequence[Message]) -> tuple[list[Frame], int]:
        """Frames that hold the messages, and the need. May fail: nothing is sent yet."""
        lengths = [2 + 1 + len(words) for words, _ in messages]
        starts = [aligned(length * WORD) for length in lengths]
        sizes = [start + sum(map(nbytes, bodies)) for start, (_, bodies) in zip(starts, messages, strict=True)]
        need = max(sizes)
        frames = self._framed(max(capacity_for(need), self._capacity()), len(messages))
        for frame, length, start, (words, bodies) in zip(frames, lengths, starts, messages, strict=True):
            frame.write_words([need, kind, length, *words])
            frame.write(start, bodies)
        return frames, need

    def _send(self, frames: list[Frame], need: int) -> None:
        capacity = self._capacity()
        if need > capacity:
            announcement = Frame(capacity)
            announcement.write_words([need])
            self._scatter([announcement] * len(frames))
        self._scatter(frames)
        self._needs.append(need)

    def _arrived(self) -> Frame:
        frame = self._taken(self._capacity())
        (need,) = frame.words(0, _ANNOUNCED)
        if need > frame.capacity:
            frame = self._taken(capacity_for(need))
        self._needs.append(need)
        return frame

    def _scatter(self, frames: Sequence[Frame]) -> None:
        sent = [frame.bytes.to(self._device) for frame in frames]
        # The sender's own part is anyone's: it has to be there, and is not looked at.
        with collective("the next batch of a dispatched loader"):
            dist.scatter(torch.empty_like(sent[0]), [sent[0], *sent], group=self._group, group_src=0)

    def _taken(self, capacity: int) -> Frame:
        (frame,) = self._framed(capacity, 1)
        on_cpu = self._device.type == "cpu"
        received = frame.bytes if on_cpu else torch.empty(capacity, dtype=torch.uint8, device=self._device)
        with collective("the next batch of a dispatched loader"):
            dist.scatter(received, group=self._group, group_src=0)
        if not on_cpu:
            frame.bytes.copy_(received)
        return frame

    def _framed(self, capacity: int, count: int) -> list[Frame]:
        """Frames of a capacity: those of the last message if they fit."""
        if not self._frames or self._frames[0].capacity != capacity:
            self._frames = [Frame(capacity) for _ in range(count)]
        return self._frames

    def _capacity(self) -> int:
        return capacity_for(max(self._needs, default=1))


def message_device(channel: Channel) -> torch.device:
    """The CPU where the group carries what lies there, else the accelerator."""
    on_cpu = channel.size == 1 or "cpu:" in dist.get_backend_config(channel.group)
    return torch.device("cpu") if on_cpu else channel.device


def _pins(device: torch.device) -> bool:
    """Whether batches are to be copied to a device from page-locked memory, and there is some."""
    if device.type == "cpu":
        return False
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:  # a device without it: batches are copied all the same
        return False
    return True


def _quoted(frame: Frame, words: Sequence[int], start: int) -> RuntimeError:
    sender, summary, trace = words
    text = bytes(frame.content(start, summary)).decode()
    whole = bytes(frame.content(aligned(start + summary), trace)).decode()
    return RuntimeError(
        f"The next batch was asked for from rank {sender}, which reads the data for the others, but it raised {text}. Correct "
        f"what its traceback shows, or let every rank read for itself with dispatch_batches=False.\n\nOn rank {sender}:\n{whole}"
    )


def _out_of_step(expected: tuple[int, int], found: tuple[int, ...]) -> RuntimeError:
    return RuntimeError(
        f"The ranks left the loop at different batches: this rank asked for message {expected[1]} of iteration {expected[0]}, "
        f"and the rank that reads the data sent message {found[1]} of iteration {found[0]}. Have all ranks leave a loop over "
        f"a dispatching loader after the same batch (decide on one rank and broadcast it), or let every rank read for itself "
        f"with dispatch_batches=False."
    )

"""Copies in CPU memory of tensors on any device, waited for together and not one by one.

What an accelerator has is copied into page-locked memory, where torch has some. The thread that
trains enqueues the copies: they stand behind what it has enqueued, whichever its stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter

import torch

from accel_checkpoint.deferred import data_of
from accel_checkpoint.files.disk import is_memory, memory
from accel_checkpoint.files.stored import BLOCK

STAGED = 32 << 20  # bytes on accelerators that are copied at a time while a file is written: more is not faster
SLAB = 512 << 20  # bytes of staging memory in one piece: torch rounds what is page-locked up to a power of two
_ALIGNMENT = 64  # bytes: copies begin at multiples of it, as vector instructions like it

# Bits are moved, and no numbers: every dtype can be, and no NaN changes on the way.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

Pair = tuple[torch.Tensor, torch.Tensor]


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on an accelerator of torch's: others have no streams, and are copied as they are."""
    current = torch.accelerator.current_accelerator()
    return current is not None and tensor.device.type == current.type


class Staging:
    """Memory for copies, kept between saves: its first use costs more time than copying. Some is page-locked."""

    def __init__(self, pinned_most: int) -> None:
        self._pinned_most = pinned_most
        self._slabs: dict[bool, list[torch.Tensor]] = {False: [], True: []}  # by whether they are page-locked
        self.streams: dict[torch.device, torch.Stream] = {}

    def room(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A place in CPU memory for each tensor, of its shape and dtype, until the next call."""
        fits = sum(tensor.nbytes for tensor in tensors.values() if on_accelerator(tensor)) <= self._pinned_most
        ends, places = {False: [0], True: [0]}, {}
        for key, tensor in tensors.items():
            pinned, size = fits and on_accelerator(tensor), _aligned(tensor.nbytes)
            if ends[pinned][-1] and ends[pinned][-1] + size > SLAB:
                ends[pinned].append(0)
            places[key] = pinned, len(ends[pinned]) - 1, ends[pinned][-1]
            ends[pinned][-1] += size
        for pinned, slabs in self._slabs.items():
            slabs += [torch.empty(0)] * (len(ends[pinned]) - len(slabs))
            for number, end in enumerate(ends[pinned]):
                if len(slabs[number]) < end:
                    slabs[number] = torch.empty(0)  # first, so that there are not both
                    slabs[number] = _host_memory(end, pinned)
        return {key: _view(self._slabs[kind][slab], start, tensors[key]) for key, (kind, slab, start) in places.items()}


@torch.no_grad()
def copy(pairs: Iterable[Pair], beside: dict[torch.device, torch.Stream] | None = None) -> list[torch.Event]:
    """Copies the second tensor of each pair into the first, which is in CPU memory.

    From accelerators that is only enqueued, behind what this thread has enqueued there; `beside`:
    in streams of its own, which are noted there. Returns an event for each that is reached then.
    """
    coming: dict[torch.device, list[Pair]] = {}
    for place, tensor in pairs:
        if on_accelerator(tensor):
            coming.setdefault(tensor.device, []).append((place, tensor))
        else:
            place.copy_(tensor)
    events = []
    for device, found in coming.items():
        stream = current = torch.accelerator.current_stream(device)
        if beside is not None:
            stream = beside[device] = beside.get(device) or torch.Stream(device)
            stream.wait_stream(current)
        with stream:
            for place, tensor in found:
                place.copy_(tensor, non_blocking=True)
            event = torch.Event(device, blocking=True)
            event.record(stream)
            events.append(event)
    return events


def contents(tensors: Sequence[torch.Tensor]) -> Iterator[Iterator[memoryview]]:
    """The bytes of each tensor in row-major order, part by part; a part holds until the next one.

    In contiguous CPU memory they are the tensor's own, else copies: of `STAGED` bytes from an
    accelerator, twice, for the next ones come while these are used.
    """
    for _, parts in groupby(_numbered_parts(tensors), itemgetter(0)):
        yield (data for _, data in parts)


def _numbered_parts(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
    """Parts, each with the number of its tensor, of which every one has at least one."""
    here: list[tuple[int, torch.Tensor]] = []
    events: list[torch.Event] = []
    upcoming: list[torch.Event] = []
    try:
        for load in chain(_loads(tensors), [[]]):
            coming, upcoming = _begun(load)
            while events:
                events.pop().synchronize()
            for index, part in here:
                for data in _in_memory(data_of(part)):
                    yield index, data
            here, events = coming, upcoming
    finally:
        for event in (*events, *upcoming):
            event.synchronize()  # nothing is written any more into memory that is given back now


def _loads(tensors: Sequence[torch.Tensor]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Parts that are copied together; what is not on an accelerator needs none, and goes along."""
    load: list[tuple[int, torch.Tensor]] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        for part in parts_of(bits(tensor), STAGED) if on_accelerator(tensor) else (tensor,):
            size = _aligned(part.nbytes) if on_accelerator(tensor) else 0
            if load and filled + size > STAGED:
                yield load
                load, filled = [], 0
            load.append((index, part))
            filled += size
    yield load


def _begun(load: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[tuple[int, torch.Tensor]], list[torch.Event]]:
    """The load, with places in CPU memory for what comes there, and the events of that."""
    memory = _host_memory(sum(_aligned(part.nbytes) for _, part in load if on_accelerator(part)), True)
    start, placed, pairs = 0, [], []
    for index, part in load:
        place = part
        if on_accelerator(part):
            place, start = _view(memory, start, part), start + _aligned(part.nbytes)
            pairs.append((place, part))
        placed.append((index, place))
    return placed, copy(pairs)


def _in_memory(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in CPU memory: its own, or copies of at most a `BLOCK`."""
    if is_memory(tensor) or not tensor.numel():
        yield memory(tensor) if tensor.numel() else memoryview(b"")
        return
    staging = torch.empty(min(BLOCK, tensor.nbytes), dtype=torch.uint8)
    for part in parts_of(bits(tensor), BLOCK):
        yield memory(_view(staging, 0, part).copy_(part))


def parts_of(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views of at most `limit` bytes that follow each other in row-major order."""
    if tensor.nbytes <= limit:
        yield tensor
        return
    rows = limit * len(tensor) // tensor.nbytes
    for begin in range(0, len(tensor), max(rows, 1)):
        if rows:
            yield tensor[begin : begin + rows]
        else:
            yield from parts_of(tensor[begin], limit)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view in a dtype of equal size; the tensor itself if its conj or neg bit is set."""
    return tensor if tensor.is_conj() or tensor.is_neg() else tensor.view(_CARRIERS[tensor.element_size()])


def _host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    if pinned and nbytes:
        with contextlib.suppress(RuntimeError):  # there is none, for this device or at all: copying is slower without
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


def _view(memory: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """A place of the shape and dtype of a tensor."""
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

"""What `torch.toy` is: the functions by which torch, and code that asks torch, finds its way about a device.

Those that `torch.cuda` has, too, mean the same here. `hold`, `release`, `_sleep`, `waits` and `communicators` are for tests.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from accel_toydevice import native

Place = int | str | torch.device | None
"""A device: its index, its name, or None for the current one."""

Stream = torch.Stream
Event = torch.Event


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether it has been made ready: there is nothing to do."""
    return True


def device_count() -> int:
    """How many devices this process sees: two, or as many as `TOY_VISIBLE_DEVICES` names."""
    return len(native.visible)


def current_device() -> int:
    """The index of the device on which this thread works."""
    return native.current_device()


def set_device(device: Place) -> None:
    """Makes a device the current one of this thread. Raises `RuntimeError` if there is no such index."""
    native.set_device(_index(device))


class device:
    """A block in which another device is the current one."""

    def __init__(self, device: Place) -> None:
        self._index = _index(device)
        self._before = self._index

    def __enter__(self) -> None:
        self._before = current_device()
        native.set_device(self._index)

    def __exit__(self, *exception: object) -> None:
        native.set_device(self._before)


@dataclass(frozen=True)
class Properties:
    """What there is to know about a device. `uuid` is missing if `TOY_UUID=0` was set at the import."""

    name: str
    total_memory: int


@dataclass(frozen=True)
class IdentifiedProperties(Properties):
    """The same of a device that can be told from all others."""

    uuid: uuid.UUID


def get_device_properties(device: Place = None) -> Properties:
    """The name of a device, its memory in bytes, and its uuid."""
    index = _index(device)
    if not native.uuid:
        return Properties("toy", native.capacity)
    return IdentifiedProperties("toy", native.capacity, uuid.UUID(int=native.visible[index] + 1))


def get_device_name(device: Place = None) -> str:
    """The name of a device."""
    return get_device_properties(device).name


def current_stream(device: Place = None) -> torch.Stream:
    """The stream into which this thread's work on a device goes."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Place = None) -> torch.Stream:
    """The stream of a device that is current where no other was chosen."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_type())


def set_stream(stream: torch.Stream) -> None:
    """Makes a stream the current one of this thread, and its device."""
    torch.accelerator.set_stream(stream)


class stream:
    """A block in which another stream is the current one; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, trace)


def synchronize(device: Place = None) -> None:
    """Waits for all streams of a device. What went wrong in one of them is raised here."""
    torch.accelerator.synchronize(_index(device))


def empty_cache() -> None:
    """Gives back memory that is kept for tensors to come."""
    torch.accelerator.memory.empty_cache()


def memory_allocated(device: Place = None) -> int:
    """Bytes in the tensors of a device."""
    return int(torch.accelerator.memory.memory_allocated(_index(device)))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes to which `torch.autocast("toy")` may cast."""
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    native.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds every device; `torch.manual_seed` calls it."""
    for index in range(device_count()):
        native.default_generator(index).manual_seed(seed)


def get_rng_state(device: Place = None) -> torch.Tensor:
    """Where the random numbers of a device stand: uint8, on the CPU. Waits for draws that are queued."""
    return native.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Place = None) -> None:
    """Goes back to a state that `get_rng_state` returned."""
    native.default_generator(_index(device)).set_state(new_state)


def hold() -> None:
    """Stops every device: streams end what they are at, and begin nothing new. Who waits for them waits until `release`."""
    native.hold()


def release() -> None:
    """Lets the devices go on."""
    native.release()


@contextmanager
def held() -> Iterator[None]:
    """A block in which the devices stand still."""
    native.hold()
    try:
        yield
    finally:
        native.release()


def queued(device: Place = None) -> int:
    """How many kernels the current stream of a device has before it, the one at work included."""
    return native.queued(_index(device))


def _sleep(seconds: float) -> None:
    """A kernel that takes this long, in the current stream; `torch.cuda._sleep` counts cycles instead."""
    native.sleep(current_device(), seconds)


def waits(thread: int | None = None) -> dict[str, int]:
    """How often the host has waited for a device since `reset_waits`, and for what.

    What is named is an operator whose result depends on values ("aten::_local_scalar_dense" is what `item()` calls), a copy
    ("copy to the host"), or what was called ("synchronize stream"). Every such call counts, whether there was something to
    wait for or not. With a `thread` (`threading.get_native_id()`) only what that one waited for: `backward` runs in others.
    """
    found: Counter[str] = Counter()
    for (reason, number), count in native.waits().items():
        if thread is None or thread == number:
            found[reason] += count
    return dict(found)


def reset_waits() -> None:
    """Counts from nought again."""
    native.forget_waits()


def set_sync_debug_mode(mode: str) -> None:
    """With "error" whatever makes the host wait without being told to raises instead, which shows where; "default" allows it.

    As with `torch.cuda.set_sync_debug_mode`, calls that are made in order to wait are not meant: `synchronize` of a device, a
    stream or an event.
    """
    if mode not in ("default", "error"):
        raise ValueError(f'set_sync_debug_mode takes "default" or "error", not {mode!r}.')
    native.refuse_waits(mode == "error")


def communicators() -> int:
    """How many communicators this process has: one for each group and device that had a collective and is not destroyed."""
    return native.communicators()


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that used a device: the threads of its streams stayed there."""
    return native.forked()


def _type() -> int:
    """The number by which torch's streams know this type of device."""
    return int(torch.Stream(device="toy").device_type)


def _index(place: Place) -> int:
    if isinstance(place, int):
        return place
    found = torch.device(place) if place is not None else torch.device("toy")
    return current_device() if found.index is None else found.index

"""What `torch.toy` is: the functions by which torch, and code that asks torch, finds its way about a device."""

from __future__ import annotations

import torch

from accel_toydevice import native

Place = int | str | torch.device | None
"""A device: its index, its name, or None for the current one."""


def is_available() -> bool:
    """Whether there is a device: always."""
    return True


def is_initialized() -> bool:
    """Whether it has been made ready: there is nothing to do."""
    return True


def device_count() -> int:
    """How many devices this process sees."""
    count: int = native.device_count
    return count


def current_device() -> int:
    """The index of the device on which this thread works."""
    index: int = native.current_device()
    return index


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


def synchronize(device: Place = None) -> None:
    """Waits for the work on a device; all of it is done when the call that asked for it returns."""
    _index(device)


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
    """Where the random numbers of a device stand: uint8, on the CPU."""
    state: torch.Tensor = native.default_generator(_index(device)).get_state()
    return state


def set_rng_state(new_state: torch.Tensor, device: Place = None) -> None:
    """Goes back to a state that `get_rng_state` returned."""
    native.default_generator(_index(device)).set_state(new_state)


def _is_in_bad_fork() -> bool:
    """Whether a fork has left the device behind: host memory survives one."""
    return False


def _index(place: Place) -> int:
    if isinstance(place, int):
        return place
    found = torch.device(place) if place is not None else torch.device("toy")
    return current_device() if found.index is None else found.index

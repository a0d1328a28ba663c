"""The random streams of a process: python's, numpy's, torch's, and that of the device."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any, TypeGuard, TypeVar

import torch

from accel_core.base.errors import CheckpointError
from accel_core.base.seeds import derive_seed

T = TypeVar("T")

PYTHON, NUMPY = "python", "numpy"
TORCH_STREAM = "torch"
"""The key of torch's stream on the CPU in what `capture_random_state` gives."""
_BEGUN = int.from_bytes(b"resume", "big")  # sets these seeds apart from those of loaders


def capture_random_state(device: torch.device | None) -> dict[str, Any]:
    """States of all streams, the device's too, as tensors and data. numpy's only if imported."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        PYTHON: {"version": version, "state": torch.tensor(numbers, dtype=torch.int64, device="cpu"), "gauss": gauss},
        TORCH_STREAM: torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states[NUMPY] = numpy.random.get_state()
    if _has_stream(device):
        states[device.type] = torch.get_device_module(device.type).get_rng_state(device)
    return states


def restore_random_state(states: dict[str, Any], device: torch.device | None) -> None:
    """Sets streams as `capture_random_state` gave them, but for devices of another kind."""
    python = states[PYTHON]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    torch.set_rng_state(states[TORCH_STREAM])
    if NUMPY in states:
        _numpy().random.set_state(states[NUMPY])
    if _has_stream(device) and device.type in states:
        torch.get_device_module(device.type).set_rng_state(states[device.type], device)


def check_random_state(states: Any, device: torch.device | None) -> None:
    """Raises an error of any kind if `restore_random_state` would fail on these; sets nothing."""
    if NUMPY in states and not 0 <= (position := states[NUMPY][2]) <= 624:  # numpy takes any, and reads there
        raise ValueError(f"the state position of numpy is {position}, and not 0 to 624")
    before = capture_random_state(device)
    try:
        restore_random_state(states, device)
    finally:
        restore_random_state(before, device)


def begin_random_state(seed: int, rank: int, step: int, device: torch.device) -> None:
    """Gives a rank that was not saved streams of its own: a function of seed, rank and step."""
    seeds = [derive_seed(_BEGUN, seed, rank, step, stream) for stream in range(4)]
    random.seed(seeds[0])
    if sys.modules.get("numpy") is not None:
        _numpy().random.seed(seeds[1] % 2**32)
    torch.default_generator.manual_seed(seeds[2])
    if _has_stream(device):
        torch.get_device_module(device.type).manual_seed(seeds[3])


def restored_behind(count: int, items: Iterator[T], before: dict[str, Any], device: torch.device | None) -> Iterator[T]:
    """The items; sets streams to `before` once so many have been fetched, at the first `next`."""
    fetched = list(itertools.islice(items, count))
    restore_random_state(before, device)
    yield from itertools.chain(fetched, items)


def _has_stream(device: torch.device | None) -> TypeGuard[torch.device]:
    return device is not None and device.type != "cpu"


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise CheckpointError(
            "The checkpoint holds the state of numpy's random stream, but numpy is missing. Type `pip install numpy`."
        ) from error

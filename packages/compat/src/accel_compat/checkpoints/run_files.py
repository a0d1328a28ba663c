"""What else a run depends on: random streams, the loss scale, positions of loaders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_compat.checkpoints.pickled_file import Shell, read_dict, read_pickled, read_shells
from accel_core import CheckpointError
from accel_core.api.checkpoint import TORCH_STREAM, check_random_state

if TYPE_CHECKING:
    from accel_compat.checkpoints.folder import PeerFolder

_PYTHON, _NUMPY, _TORCH = "random_state", "numpy_random_seed", "torch_manual_seed"
_DEVICE = re.compile(r"torch_(\w+)_manual_seed")


def read_streams(path: Path, rank: int) -> tuple[dict[str, Any], int]:
    """The random streams of a rank, as `capture_random_state` gives them, and its number of micro-batches."""
    saved = read_dict(path, _PYTHON, _TORCH)
    try:
        version, numbers, gauss = saved[_PYTHON]
        streams: dict[str, Any] = {
            "python": {"version": version, "state": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
            TORCH_STREAM: saved[_TORCH],
        }
        if saved.get(_NUMPY) is not None:
            streams["numpy"] = saved[_NUMPY]
        for key, states in saved.items():
            match = _DEVICE.fullmatch(str(key))
            if match and states:  # of all devices that the process saw
                streams[match[1]] = states[rank % len(states)]
        check_random_state(streams, None)
        step = saved.get("step", 0)  # Accelerate before 0.24 has none
        if type(step) is not int or step < 0:
            raise ValueError(f"its step is {step!r:.80}")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} was to be read, but its random states are of another version, or damaged: {type(error).__name__}: {error!s:.200}. "
            f"Take the files random_states_*.pkl out of the folder, to begin the random streams anew."
        ) from error
    return streams, step


def read_scale(path: Path | None) -> dict[str, Any]:
    """The state of the precision in a neutral checkpoint; empty if no scale was saved."""
    if path is None:
        return {}
    state = read_dict(path)
    if not state:  # a scaler that was off
        return {}
    if not {"scale", "_growth_tracker"} <= state.keys():
        raise CheckpointError(f"{path} was to be read, but it is no state of a torch.amp.GradScaler. Copy it again.")
    return {"precision": {"scale": float(state["scale"]), "growth_tracker": int(state["_growth_tracker"])}}


def read_positions(files: PeerFolder) -> list[dict[str, int] | None]:
    """The position of each loader in its epoch, or None where no file says one, or it had ended."""
    found: list[dict[str, int] | None] = [None] * (max([*files.loaders, *files.samplers], default=-1) + 1)
    for number, path in files.samplers.items():
        state = _found_sampler(read_shells(path))
        if state is not None:
            found[number] = {"batches": 0, "epoch": state}
    for number, path in files.loaders.items():
        batches = _batches(read_pickled(path), path)
        if batches:
            found[number] = {**(found[number] or {}), "batches": batches}
    return found


def _found_sampler(value: Any) -> int | None:
    """The epoch of a sampler."""
    state = value.state if isinstance(value, Shell) else None
    epoch = state.get("epoch") if isinstance(state, dict) else None
    return epoch if type(epoch) is int and epoch >= 0 else None


def _batches(state: Any, path: Path) -> int:
    """How many batches of the epoch a StatefulDataLoader has given on each rank; 0 at its end."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} was to be read, but it is no state of a loader. Copy it again.")
    if state.get("_iterator_finished"):
        return 0
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, Mapping):  # with workers, of which not every batch brings a state
        numbers = snapshot.get("_snapshot_step"), state.get("_steps_since_snapshot", 0)
    else:
        numbers = state.get("_num_yielded"), 0
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(
            f"{path} was to be read, but it does not say how many batches were given: {numbers!r}. Copy it again."
        )
    return sum(numbers)

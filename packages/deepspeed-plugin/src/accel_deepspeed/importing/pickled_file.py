"""Files of `torch.save`, read without running anything that they name.

DeepSpeed's files name classes of DeepSpeed, and of the user's state: torch's restricted unpickler
would refuse them. It takes an inert object for each such name. Tensors are mapped, and read from
the disk when they are used.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from accel_core import CheckpointError


class Inert:
    """A stand-in for an object of any class but torch's own and plain containers.

    Attributes:
        arguments: what it was to be made of.
        state: what it was to be given.
    """

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        """Whatever the class would have taken."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def member(self, name: str) -> Any:
        """An attribute of the object; None if it has none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_pickled(path: Path) -> Any:
    """The value in a file.

    Raises:
        CheckpointError: if it is damaged, or holds what only running it could make.
        OSError: if it cannot be read.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(Inert, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} was to be imported, but it is damaged, or holds what cannot be read without running code: {why}. Save it again, "
            f"with nothing but tensors and plain values in client_state."
        ) from error


def read_members(path: Path, *names: str) -> dict[str, Any]:
    """The dict in a file. Raises `CheckpointError` too if it has none with these keys."""
    found = read_pickled(path)
    if not isinstance(found, dict) or found.keys().isdisjoint(names):
        raise CheckpointError(
            f"{path} was to be imported, but it holds no dict with {' or '.join(names)}: DeepSpeed did not write it."
        )
    return found

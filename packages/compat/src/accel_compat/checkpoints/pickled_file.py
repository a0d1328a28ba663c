"""Files of `torch.save`, read by its restricted unpickler: tensors, arrays and plain values, and nothing else."""

from __future__ import annotations

import codecs
import importlib
import re
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accel_core import CheckpointError

_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since numpy 2
_OBJECTS = "ObjectDType"  # an array of these has pickles in it


class Shell:
    """A stand-in for an object whose class is not made: its state alone is read.

    Attributes:
        state: what the object was to be given.
    """

    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> Shell:
        """Whatever the class would have taken."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_pickled(path: Path, file: BinaryIO | None = None) -> Any:
    """The value in a file, with tensors mapped where they can be; `file`: a part of it, opened.

    Raises:
        CheckpointError: if it is damaged, or names anything that would have to be run.
        OSError: if it cannot be read.
    """
    with torch.serialization.safe_globals(_harmless()):
        return _loaded(path, file)


def read_shells(path: Path) -> Any:
    """The value in a file, with a `Shell` in place of each object of a class that is not harmless."""
    names = _checked(path, lambda: torch.serialization.get_unsafe_globals_in_checkpoint(path))
    known = {f"{each.__module__}.{each.__qualname__}" for each in _harmless() if not isinstance(each, tuple)}
    shells = [(Shell, name) for name in names if name not in known and not name.startswith("numpy.")]
    with torch.serialization.safe_globals([*_harmless(), *shells]):
        return _loaded(path, None)


def read_dict(path: Path, *keys: str) -> dict[str, Any]:
    """The dict in a file. Raises `CheckpointError` too if it is none, or has not all of these keys."""
    found = read_pickled(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} was to be read, but it holds a {type(found).__name__} and no dict. {_AGAIN}.")
    missing = [key for key in keys if key not in found]
    if missing:
        raise CheckpointError(
            f"{path} was to be read, but {', '.join(map(repr, missing))} is missing in it; it has {sorted(map(str, found))}. {_AGAIN}."
        )
    return found


_AGAIN = "Bring the file of the save there, or save again in the run that wrote it"
_CLEAN = "Nothing of it was run. Load it where it was written, and save it again with plain values, tensors and arrays in the state_dict()"


def _loaded(path: Path, file: BinaryIO | None) -> Any:
    if file is not None:
        return _checked(path, lambda: torch.load(file, map_location="cpu", weights_only=True))
    mapped = zipfile.is_zipfile(path)  # the format before torch 1.6 is none, and cannot be mapped
    return _checked(path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))


def _checked(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # a damaged file may bring about anything
        if isinstance(error, OSError) and error.filename is not None:
            raise
        found = _found(error)
        named = next((match[1] for pattern in _NAMED if (match := pattern.search(found))), None)
        if named is None:
            text = f"it is damaged: {type(error).__name__}: {found:.200}. {_AGAIN}"
        else:
            text = f"it names {named}, which would have to be run to make the object. {_CLEAN}"
        raise CheckpointError(f"{path} was to be read, but {text}.") from error


# How torch says which class or function it refuses.
_NAMED = tuple(
    re.compile(rf"{before}([\w.]+[\w])")
    for before in ("GLOBAL ", "Unsupported class ", "but got <class '", "Unsupported global: ")
)
_ADVICE = ("Weights only load failed", "Check the documentation", "Please file an issue", "(1) ", "(2) ")


def _found(error: Exception) -> str:
    """What torch found, without its advice, which is to run what is in the file."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.startswith(_ADVICE)), "")


def _harmless() -> list[Any]:
    """Classes and functions by which numpy's arrays, numbers and plain containers are made."""
    found: list[Any] = [codecs.encode, deque, defaultdict, OrderedDict]
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return found
    dtypes = [each for name, each in vars(importlib.import_module("numpy.dtypes")).items() if name.endswith("DType")]
    made = importlib.import_module("numpy._core.multiarray" if hasattr(numpy, "_core") else "numpy.core.multiarray")
    functions = [(getattr(made, name), f"{module}.{name}") for module in _ARRAYS for name in ("_reconstruct", "scalar")]
    return [*found, numpy.ndarray, numpy.dtype, *functions, *(each for each in dtypes if each.__name__ != _OBJECTS)]

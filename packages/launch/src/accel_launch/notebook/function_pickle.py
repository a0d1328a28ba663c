"""Pickles of a function with its arguments, for the ranks, and of its result, for the launcher.

All of it is pickled by value, so that what is defined in a cell can travel. What belongs to one
process cannot: it is refused before anything starts, by the name of the variable that holds it.
"""

from __future__ import annotations

import inspect
import io
import linecache
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from accel_core import Accelerator, World
from accel_launch.errors import LaunchError

_OF_ONE_PROCESS = (Accelerator, World, dist.ProcessGroup, dist.Store)


class Told(NamedTuple):
    """The report of a rank whose function has ended."""

    result: bytes | None = None  # what it returned, pickled; None if it raised, or if what it returned cannot travel
    error: bytes | None = None  # what it raised, pickled; None if it returned, or if that cannot travel
    text: str = ""  # why the result cannot travel; or the traceback
    raised: bool = False  # whether it raised


class _StaysError(Exception):
    """Something was met that belongs to one process."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Refuses what belongs to one process, moves tensors to the CPU, notes objects of `__main__`.

    A device's index means another device to another rank.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.own: dict[str, Any] = {}  # classes and functions of `__main__` that it has met, by name

    def reducer_override(self, obj: Any) -> Any:
        """Handles each object that is not of a simple built-in type, each class and function."""
        if isinstance(obj, _OF_ONE_PROCESS):
            raise _StaysError(f"{_article(obj)} belongs to the process that made it")
        if isinstance(obj, torch.Tensor) and obj.device.type not in {"cpu", "meta"}:
            return _on_cpu(obj)
        if isinstance(obj, types.CodeType):
            # As it is: cloudpickle leaves its file out, so tracebacks would show no lines.
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            self.own.setdefault(obj.__qualname__, obj)
        return super().reducer_override(obj)


def _on_cpu(tensor: torch.Tensor) -> Any:
    here = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        here = torch.nn.Parameter(here, tensor.requires_grad)
    return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def packed(call: str, function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickles a function with its arguments and all of the notebook that it uses.

    Raises `LaunchError`, which begins with `call` and names what cannot travel, with its type.
    """
    with _by_value(function):
        try:
            return _pickled(function, tuple(args))
        except Exception as error:
            raise _stays(call, function, args, error) from error


def unpacked(work: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Unpickles a function, its arguments, and the notebook's classes and functions by name."""
    function, args, own = pickle.loads(work)  # noqa: S301  (from the memory of the notebook, never from a file)
    return function, args, own


def cells() -> dict[str, Any]:
    """The text of the cells, for tracebacks; nothing that stands in a file."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}


def result_told(result: Any) -> bytes:
    """The pickled report of a rank whose function has returned `result`."""
    try:
        return pickle.dumps(Told(result=_pickled(result, ())))
    except Exception as error:  # noqa: BLE001  (pickling runs methods of the user's objects)
        return pickle.dumps(Told(text=f"{_article(result)}: {error}"))


def failure_told(error: Exception, text: str) -> bytes:
    """The pickled report of a rank whose function raised `error`, with the traceback `text`."""
    try:
        travelling = _pickled(error, ())
        unpacked(travelling)
    except Exception:  # noqa: BLE001  (the text says all)
        return pickle.dumps(Told(text=text, raised=True))
    return pickle.dumps(Told(error=travelling, text=text, raised=True))


def _pickled(first: Any, args: tuple[Any, ...]) -> bytes:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    # What is noted on the way is written last, when all of it has been met.
    pickler.dump((first, args, pickler.own))
    return stream.getvalue()


@contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    """A block that pickles by value a function of a module that no other process can import."""
    name = str(getattr(function, "__module__", None) or "__main__")
    if name == "__main__" or name not in sys.modules or PathFinder.find_spec(name.partition(".")[0]) is not None:
        yield
        return
    cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _stays(call: str, function: Callable[..., Any], args: Sequence[Any], error: Exception) -> LaunchError:
    """The error for what cannot travel, with the name of the variable if there is one."""
    name = getattr(function, "__name__", type(function).__name__)
    given = ((f"was given args[{at}]", value, reason) for at, value in enumerate(args) if (reason := _reason(value)))
    what = f"cannot be sent to them ({error}). Pass what it needs as args."
    if found := _culprit(function) or next(given, None):
        how, value, reason = found
        what = f"{how}: {_article(value)}, which cannot be sent to them ({reason}). Make it inside of the function, from plain data."
    return LaunchError(f"{call} was to run {name}() in other processes, and {name}() {what}")


def _culprit(function: Any) -> tuple[str, Any, str] | None:
    """The first variable of a function that cannot travel: its use, its value, the reason."""
    if not isinstance(function, types.FunctionType):
        return None
    outside = inspect.getclosurevars(function)
    defaults = {each.name: each.default for each in inspect.signature(function).parameters.values()}
    for variables, where in (({**outside.nonlocals, **outside.globals}, ""), (defaults, " as a default")):
        for name, value in variables.items():
            if value is function or not (reason := _reason(value)):
                continue
            if inner := _culprit(value):
                return f"uses {name}(), which {inner[0]}", *inner[1:]
            return f"uses `{name}`{where}", value, reason
    return None


def _reason(value: Any) -> str:
    """The reason why a value cannot be pickled; empty if it can."""
    try:
        _pickled(value, ())
    except Exception as error:  # noqa: BLE001  (pickling runs methods of the user's objects)
        return str(error) or type(error).__name__
    return ""


def _article(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"

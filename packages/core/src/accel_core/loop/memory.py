"""Memory: giving it back, and finding the largest batch size that fits.

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size, accelerator):
        accelerator.free_memory()
        loader = accelerator.prepare(DataLoader(data, batch_size=batch_size))
        ...

    train(accelerator)

In a larger world all ranks train with one batch size: see `accel_core.loop.oom_vote`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from accel_core.base.vocabulary import OUT_OF_MEMORY_MESSAGES
from accel_core.loop.oom_vote import all_done, cast_error
from accel_core.processes.failure_output import is_broken_connection
from accel_core.processes.watch.collective_scope import explain

REDUCTION = 0.9
"""By what a batch size that did not fit is multiplied."""

PATIENCE = 60.0
"""For how many seconds a rank that ran out of memory waits for the others."""


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives memory that torch keeps for reuse back to the accelerator; on a CPU there is none. No collective.

    `garbage_collection`: whether Python's unreachable objects are collected first.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drops references, and gives back the memory of what nobody else holds: `model, loss = release_memory(model, loss)`.

    Returns as many times None as objects were given. No collective. For what an Accelerator has
    prepared there is `Accelerator.free_memory`, which forgets it first.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that a device, or the host, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The error of a broken connection quotes that of the rank which broke it.
    if not isinstance(error, RuntimeError) or is_broken_connection(error):
        return False
    return any(part in str(error) for part in OUT_OF_MEMORY_MESSAGES)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    patience: float = PATIENCE,
) -> Callable[..., Any]:
    """A decorator that calls a function with smaller and smaller batch sizes, until its memory suffices.

    `function(batch_size, ...)` is called as `function(...)`. When it runs out of memory, what its
    frames held is freed, and it is called again from its beginning; any other error passes. Later
    calls start with the size that was found. In a larger world each call is a collective, and all
    ranks use one size; see `accel_core.loop.oom_vote` for a rank that runs out of memory alone.

    Args:
        function: takes the batch size as its first argument.
        starting_batch_size: the first size that is tried, at least 1.
        reduce_batch_size_fn: takes the size that did not fit, or nothing, and returns the next one,
            a smaller int; 0 ends the search. None: nine tenths, rounded down.
        patience: in a larger world, for how many seconds a rank that ran out of memory waits for
            the others to end the attempt.

    Raises:
        ValueError: if a size is below 1 at the start, or not smaller than the one before.
        RuntimeError: if no size fits, or the ranks cannot go on together.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            patience=patience,
        )
    search = _Search(function, starting_batch_size, reduce_batch_size_fn, timedelta(seconds=patience))

    @functools.wraps(function)
    def found(*args: Any, **kwargs: Any) -> Any:
        return search.run(args, kwargs)

    return found


class _Search:
    """One decorated function, and the batch size that it has come down to."""

    def __init__(
        self, function: Callable[..., Any], size: int, reduce: Callable[..., int] | None, patience: timedelta
    ) -> None:
        if not _is_int(size) or size < 1:
            raise ValueError(
                f"find_executable_batch_size(starting_batch_size={size!r}): expected an int of at least 1. Give the largest batch "
                f"size that is worth a try, such as 128."
            )
        self._name = getattr(function, "__name__", repr(function))
        self._function, self._reduce, self._patience = function, reduce, patience
        self._start = self._size = size

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tries until an attempt has ended on all ranks."""
        tried = []
        problem: str | None = None
        while self._size >= 1:
            size = self._size
            result, problem = self._attempt(size, args, kwargs)
            if all_done(self._name, size, problem, self._patience):
                return result
            result = None  # of a rank that had room, where another had none
            clear_device_cache(garbage_collection=True)
            tried.append(size)
            self._size = self._reduced(size)
        self._size = self._start
        raise RuntimeError(
            f"`{self._name}` was called with {len(tried)} batch sizes, from {tried[0]} to {tried[-1]}, and memory sufficed "
            f"for none. The last attempt: {problem or 'there was room on this rank, but not on another one'}. Free what else "
            f"is in memory (accelerator.free_memory() at the beginning of the function), or make model or inputs smaller."
        )

    def _attempt(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str | None]:
        """The result; or the first line of an error that says that memory ran out."""
        try:
            return self._function(size, *args, **kwargs), None
        except BaseException as error:
            if not is_out_of_memory(error):
                explain(error)
                cast_error(self._name, size, f"raised {type(error).__name__}: {error}")
                raise
            _clear_frames(error)
            return None, str(error).partition("\n")[0] or type(error).__name__

    def _reduced(self, size: int) -> int:
        if self._reduce is None:
            return int(size * REDUCTION)
        smaller = self._reduce(size) if inspect.signature(self._reduce).parameters else self._reduce()
        if not _is_int(smaller) or smaller >= size:
            raise ValueError(
                f"reduce_batch_size_fn returned {smaller!r} after a batch size of {size}, which did not fit. Return a smaller "
                f"int, or 0 to end the search."
            )
        return smaller


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _clear_frames(error: BaseException) -> None:
    """Empties the frames of a failed attempt, whose local variables keep tensors alive as long as an error of it lives."""
    waiting: list[BaseException | None] = [error]
    cleared = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in cleared:
            cleared.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += (each.__cause__, each.__context__)

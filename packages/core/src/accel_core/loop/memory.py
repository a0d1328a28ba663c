"""Memory: giving it back, and finding the largest batch size that fits.

In a larger world ranks vote on each attempt, through the store, as some may wait in a collective
of it. One that nobody can take back holds the others if a rank runs out of memory alone: so votes
tell how many each rank has begun, and a rank without room waits for its patience only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel_core.base.errors import CollectiveMismatchError
from accel_core.base.vocabulary import OUT_OF_MEMORY_MESSAGES
from accel_core.processes.failure_output import is_broken_connection
from accel_core.processes.process_groups import default_group, groups_beside
from accel_core.processes.watch.collective_scope import collective, explain

_DONE, _NO_ROOM = "done", "ran out of memory"


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Frees the memory that torch caches, after a `garbage_collection`. No collective."""
    if garbage_collection:
        gc.collect()
    call_allocator("empty_cache")


def call_allocator(name: str, *arguments: Any) -> Any:
    """`torch.accelerator.memory.<name>()`; None without an accelerator, and no driver is asked.

    Where torch does not know the kind of allocator, that of the device's module; None without one.
    """
    if torch.accelerator.current_accelerator() is None:
        return None
    try:
        return getattr(torch.accelerator.memory, name)(*arguments)
    except RuntimeError:  # torch's internal assertion; another error comes again
        return getattr(torch.get_device_module(), name, lambda *_: None)(*arguments)


def release_memory(*objects: Any) -> list[None]:
    """A None for each object, freed if nobody else holds it: `a, b = release_memory(a, b)`.

    No collective. What an Accelerator has prepared is forgotten by `Accelerator.free_memory`.
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
    own = isinstance(error, RuntimeError) and not is_broken_connection(error)
    return own and any(part in str(error) for part in OUT_OF_MEMORY_MESSAGES)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    patience: float = 60.0,
) -> Callable[..., Any]:
    """A decorator that calls a function with smaller batch sizes until its memory suffices.

    `function(batch_size, ...)` is called as `function(...)`, anew for each size; later calls start
    with the size that was found. In a larger world each call is a collective, and ranks use one
    size. `reduce_batch_size_fn` takes the size that did not fit, or nothing, and returns a smaller
    one, 0 to end the search; None: nine tenths. `patience`: for how many seconds a rank without
    room waits for the others. `RuntimeError` if no size fits.
    """
    if function is None:
        return lambda it: find_executable_batch_size(it, starting_batch_size, reduce_batch_size_fn, patience=patience)
    if type(starting_batch_size) is not int or starting_batch_size < 1:
        asked = f"find_executable_batch_size(starting_batch_size={starting_batch_size!r})"
        raise ValueError(f"{asked}: expected an int of at least 1.")
    name, found = getattr(function, "__name__", repr(function)), starting_batch_size

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        size, tried = found, []
        problem: str | None = None
        while size >= 1:
            result, problem = _attempt(function, name, size, args, kwargs)
            if _all_had_room(name, size, problem, timedelta(seconds=patience)):
                found = size
                return result
            result = None  # of a rank that had room, where another had none
            clear_device_cache(garbage_collection=True)
            tried.append(size)
            if reduce_batch_size_fn is None:
                size = int(size * 0.9)
                continue
            takes_size = inspect.signature(reduce_batch_size_fn).parameters
            size = reduce_batch_size_fn(size) if takes_size else reduce_batch_size_fn()
            if type(size) is not int or size >= tried[-1]:
                what = f"reduce_batch_size_fn returned {size!r} after a batch size of {tried[-1]}, which did not fit."
                raise ValueError(f"{what} Return a smaller int, or 0 to end the search.")
        raise RuntimeError(
            f"`{name}` was called with {len(tried)} batch sizes, from {tried[0]} to {tried[-1]}, and memory sufficed "
            f"for none. The last attempt: {problem or 'there was room on this rank, but not on another one'}."
        )

    return search


def _attempt(function: Callable[..., Any], name: str, size: int, args: Any, kwargs: Any) -> tuple[Any, str | None]:
    """The result; or the first line of an error that says that memory ran out."""
    try:
        return function(size, *args, **kwargs), None
    except BaseException as error:
        if not is_out_of_memory(error):
            explain(error)
            with contextlib.suppress(dist.DistError):  # the error matters more than the store
                _vote(name, size, f"raised {type(error).__name__}: {error}")
            raise
        traceback.clear_frames(error.__traceback__)  # whose variables live as long as the error does
        return None, str(error).partition("\n")[0] or type(error).__name__


def _vote(function: str, size: int, outcome: str) -> tuple[dist.Store, list[str]] | None:
    """Votes on this rank's attempt. Returns where all votes stand; None if it is alone."""
    group = default_group()
    base = None if group is None else distributed_c10d._get_default_store()
    if group is None or group.size() == 1 or base is None:  # alone, or a backend that has met by means of its own
        return None
    store = dist.PrefixStore("accel/attempts", base)
    number = store.add(f"votes/{group.rank()}", 1)
    keys = [f"vote/{number}/{rank}" for rank in range(group.size())]
    groups = [group, *groups_beside(group)]
    backends: list[Any] = [each._get_backend(device) for each in groups for device in each._device_types]
    begun = sum(backend._get_sequence_number_for_group() for backend in dict.fromkeys(backends))
    store.set(keys[group.rank()], json.dumps((function, size, outcome, begun)))
    return store, keys


def _all_had_room(function: str, size: int, problem: str | None, patience: timedelta) -> bool:
    """Whether an attempt ended well on all ranks, or all can repeat it. Raises otherwise."""
    ballot = _vote(function, size, _DONE if problem is None else _NO_ROOM)
    if ballot is None:
        return problem is None
    store, keys = ballot
    votes: list[list[Any]] | None = None
    with contextlib.suppress(dist.DistStoreError), collective("find_executable_batch_size()"):
        store.wait(keys, *([] if problem is None else [patience]))
        votes = [json.loads(store.get(key)) for key in keys]
    if votes is None:  # outside of the handler: behind an error of a store, this one would pass for another rank's
        raise RuntimeError(
            f"`{function}` was tried with a batch size of {size}, and {problem or 'there was room on this rank'}; but "
            f"ranks {[rank for rank, key in enumerate(keys) if not store.check([key])]} have not ended the attempt. A "
            f"rank that runs out of memory alone leaves the others in a collective. Start with a smaller size, or more "
            f"patience."
        )
    table = "".join(
        f"\n  rank {rank}: `{called}` with a batch size of {tried} {outcome}, after {begun} collectives"
        for rank, (called, tried, outcome, begun) in enumerate(votes)
    )
    outcomes = {outcome for _, _, outcome, _ in votes}
    if not outcomes <= {_DONE, _NO_ROOM}:
        raise RuntimeError(f"An attempt of find_executable_batch_size failed, and not for lack of memory:{table}")
    if len({(called, tried) for called, tried, _, _ in votes}) > 1:
        raise CollectiveMismatchError(
            f"The ranks are in different attempts of find_executable_batch_size:{table}\nCall the decorated function on all "
            f"ranks, with the same starting_batch_size and reduce_batch_size_fn, and make the Accelerator before."
        )
    if _NO_ROOM in outcomes and len({begun for *_, begun in votes}) > 1:
        what = "Memory ran out between two collectives, so the next one of a rank would be taken for"
        raise RuntimeError(f"{what} another one:{table}\nStart again with a smaller starting_batch_size.")
    return outcomes == {_DONE}

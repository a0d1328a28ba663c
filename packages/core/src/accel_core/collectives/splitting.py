"""Division of work between processes: a part of the inputs each, one first, or one alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Subset

from accel_core.base.errors import CollectiveMismatchError
from accel_core.base.nested import rebuilt

if TYPE_CHECKING:
    from accel_core.processes.world import World

# The call whose block runs now: blocks inside of it have no order of their own.
_turn: ContextVar[str | None] = ContextVar("accel_turn", default=None)
_FOREVER = timedelta(days=365)  # stands for no timeout, for which backends have no value


def only_where(applies: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function if `applies()` holds at the call; else it, or its coroutine, gives None."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs) if applies() else None

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if applies() else None

    return called


def is_process(call: str, argument: str, index: object, own: int, world: World, local: bool) -> bool:
    """Whether a decorator's `index` means process `own`; any index does in a world of one."""
    count, where = (world.local_size, "this machine") if local else (world.size, "this run")
    there_are = f"{where} has {count} process(es), 0 to {count - 1}, or -{count} to -1 from the end"
    if not isinstance(index, int) or isinstance(index, bool):
        raise TypeError(
            f"{call}({argument}={index!r}): expected the index of a process; {there_are}. Type {argument}=0."
        )
    if world.size == 1:
        return True
    if not -count <= index < count:
        raise ValueError(
            f"{call}({argument}={index}): there is no such process; {there_are}. Type {argument}=-1 for the last one."
        )
    return index % count == own


@contextmanager
def leader_first(world: World, local: bool) -> Iterator[None]:
    """A block that the leaders run first: rank 0, or each machine's first process if `local`.

    Exactly one collective in a larger world, without a timeout where there is a Watch. Inside of
    one of the same kind, or of any kind on one machine, it waits for nobody. `RuntimeError` on the
    others if a leader fails in its block, and on several machines inside of the other kind.
    """
    call = "local_main_process_first()" if local else "main_process_first()"
    if world.size == 1 or _is_in_order(call, world):
        yield
        return
    leads = world.is_local_main if local else world.is_main
    if not leads:
        _meet(world, call)
    token = _turn.set(call)
    try:
        yield
    except BaseException as error:  # whatever it is, the others are waiting
        # But after a mismatch: in the collective that this rank called, the others have raised the same.
        if leads and not isinstance(error, CollectiveMismatchError):
            _meet(world, call, error)
        raise
    finally:
        _turn.reset(token)
    if leads:
        _meet(world, call)


def _is_in_order(call: str, world: World) -> bool:
    outer = _turn.get()
    if outer is None or outer == call or world.local_size == world.size:
        return outer is not None
    raise RuntimeError(
        f"{call} was called inside of {outer}: on several machines who comes first in one is among the others in the other, and "
        f"they cannot wait for both. Write the blocks one after the other."
    )


def _meet(world: World, call: str, error: BaseException | None = None) -> None:
    """Waits for every rank. Raises if another comes with an error, and this one with none."""
    from accel_core.processes.channel import Letter, from_bytes, to_bytes
    from accel_core.processes.failure_output import described
    from accel_core.processes.mismatch_report import describe

    channel = world.channel()
    told = bytearray(b"" if error is None else described(error).encode())
    letter = Letter(describe(call), [(torch.uint8, ())], [len(told)], channel.message_device)
    with _without_timeout(world):
        (parts,) = channel.exchange(letter, [from_bytes(told)])
    failed = {rank: to_bytes(part).decode() for rank, part in enumerate(parts) if len(part)}
    if failed and error is None:
        errors = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise RuntimeError(
            f"{call} was called, but who was to go first failed: {errors}\nMend that one: the error of rank {world.rank} only "
            f"follows from it."
        )


@contextmanager
def _without_timeout(world: World) -> Iterator[None]:
    """Collectives of the world have no timeout inside; without a Watch they keep theirs."""
    channel = world.channel()
    group = channel.group
    backend = None if group is None or world.watch is None else group._get_backend(channel.message_device)
    if backend is None or not hasattr(backend, "options"):
        yield
        return
    timeout = backend.options._timeout
    with suppress(RuntimeError):  # of backends that do not support it
        backend.set_timeout(_FOREVER)
    try:
        yield
    finally:
        with suppress(RuntimeError):
            backend.set_timeout(timeout)


@contextmanager
def split_between_processes(inputs: Any, world: World, apply_padding: bool = False) -> Iterator[Any]:
    """See `Accelerator.split_between_processes`. `TypeError` for what has no parts, as a string."""
    length = _length(inputs, "inputs")
    yield inputs if world.size == 1 else _part(inputs, _indices(length, world, apply_padding))


def _indices(length: int, world: World, apply_padding: bool) -> list[int]:
    """The elements that this process takes; what fills it up repeats the last one."""
    each, more = divmod(length, world.size)
    begin = world.rank * each + min(world.rank, more)
    own = list(range(begin, begin + each + (world.rank < more)))
    longest = each + (more > 0)
    return own + [length - 1] * (longest - len(own)) if apply_padding else own


def _length(inputs: Any, path: str) -> int:
    """The number of elements to split. Raises for what cannot be split."""
    if isinstance(inputs, Mapping):
        lengths = {f"{path}[{key!r}]": _length(value, f"{path}[{key!r}]") for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{place} has {length}" for place, length in lengths.items())
            raise ValueError(
                f"split_between_processes() was given a {type(inputs).__name__} whose values differ in length: {found}. Split "
                f"them one by one."
            )
        return next(iter(lengths.values()), 0)
    divisible = isinstance(inputs, (Sequence, torch.Tensor, Dataset)) or _has_select(inputs) or _is_array(inputs)
    # The parts of a text are no texts that anybody means.
    if not (divisible and hasattr(inputs, "__len__")) or isinstance(inputs, (str, bytes, bytearray)):
        raise TypeError(
            f"split_between_processes() cannot split {path}, a {type(inputs).__name__}. It takes lists, tuples and other "
            f"sequences, tensors, arrays, datasets with a length, and dicts of these: wrap a single input as [input]."
        )
    return len(inputs)


def _part(inputs: Any, indices: list[int]) -> Any:
    if isinstance(inputs, Mapping):
        parts = {key: _part(value, indices) for key, value in inputs.items()}
        # One that cannot be changed need not know how to be made from a dict.
        return rebuilt(inputs, list(parts.values())) if isinstance(inputs, MutableMapping) else parts
    if isinstance(inputs, torch.Tensor):
        # Views where nothing is repeated: consecutive elements need no copy.
        whole = inputs[indices[0] : indices[-1] + 1] if indices else inputs[:0]
        return whole if len(whole) == len(indices) else inputs[indices]
    if _has_select(inputs):
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    if _is_array(inputs):
        return inputs.take(indices, axis=0)
    taken = [inputs[index] for index in indices]
    return tuple(taken) if isinstance(inputs, tuple) else taken


def _has_select(inputs: Any) -> bool:
    return not isinstance(inputs, torch.Tensor) and callable(getattr(inputs, "select", None))


def _is_array(inputs: Any) -> bool:
    """Arrays and data frames of other libraries."""
    return callable(getattr(inputs, "take", None)) and bool(getattr(inputs, "shape", ()))

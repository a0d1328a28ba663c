"""Steps that all ranks take together, and that fail on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from accel_core import CheckpointError, CollectiveMismatchError
from accel_core.api.checkpoint import raising_line
from accel_core.api.component import broadcast_object, gather_objects

if TYPE_CHECKING:
    from accel_core import World

T = TypeVar("T")

_LINE = "_accel_line"


def everywhere(world: World, step: str, work: Callable[[], T]) -> list[T]:
    """Does some work on every rank and gives each the results of all, in rank order. A collective.

    `step` goes on after "rank 1 waits". Results are pickled. If the work raises on one rank, all
    raise the error of the lowest such rank, which is named.
    """
    if world.size == 1:
        return [work()]
    result, failure = _tried(work)
    outcomes = exchange(world, step, (portable(failure), result), failure)
    for rank, (reason, _) in enumerate(outcomes):
        if reason is not None:
            raise located(reason, rank) from failure
    return [found for _, found in outcomes]  # type: ignore[misc]  # no rank has failed


def exchange(world: World, step: str, value: T, failure: Exception | None = None) -> list[T]:
    """The values of all ranks, pickled, in rank order, if all came for one step. A collective.

    Else all raise `CollectiveMismatchError`, with the failures that made ranks come here.
    """
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    found: list[tuple[str, str | None, T]] = gather_objects([(step, reason, value)], world)
    if any(other != step for other, _, _ in found):
        lines = [f"  rank {rank} waits {other}" for rank, (other, _, _) in enumerate(found)]
        lines += [f"  rank {rank} has failed: {why}" for rank, (_, why, _) in enumerate(found) if why is not None]
        raise CollectiveMismatchError(
            "The ranks wait for each other in the middle of a checkpoint, but not for the same:\n"
            + "\n".join(lines)
            + "\nRegister the same hooks and objects, and prepare the same, on every rank. Weights that are spread over the ranks are "
            "put together when they are read: let hooks read the same names in the same order on every rank, also where the main "
            "process alone writes."
        ) from failure
    return [each for _, _, each in found]


def on_each_rank(world: World, step: str, work: Callable[[], T]) -> T:
    """The result of `work` on this rank, not pickled; if one raises, all do. A collective."""
    kept: list[T] = []
    everywhere(world, step, lambda: kept.append(work()))
    return kept[0]


def on_main_rank(world: World, work: Callable[[], T]) -> T:
    """Works on the main process; gives every rank the result, or the error. A collective."""
    if world.size == 1:
        return work()
    result, failure = _tried(work) if world.is_main else (None, None)
    reason, found = broadcast_object((portable(failure), result), world)
    if reason is not None:
        raise located(reason, 0) from failure
    return found  # type: ignore[no-any-return]


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except CollectiveMismatchError:
        raise  # on every rank, so that nobody waits for the outcome
    except Exception as error:  # noqa: BLE001  (the others wait for the outcome, whatever it is)
        return None, error


def portable(error: Exception | None) -> Exception | None:
    """An error that unpickles anywhere, with the line where it occurred unless it is ours."""
    if error is None or type(error) is CheckpointError:
        return error
    carried: Exception
    if isinstance(error, OSError) and error.errno is not None:
        carried = OSError(error.errno, error.strerror, error.filename)
    elif type(error).__module__ != "builtins":
        carried = CheckpointError(f"{type(error).__qualname__}: {error}")
    elif len(error.args) == 1:
        carried = type(error)(str(error))
    else:
        carried = RuntimeError(f"{type(error).__qualname__}: {error}")
    setattr(carried, _LINE, raising_line(error, or_ours=not isinstance(error, OSError)))
    return carried


def located(error: Exception, rank: int) -> Exception:
    """The error, with the rank on which it occurred in its text."""
    line = getattr(error, _LINE, "")
    place = f" (on rank {rank})" + (f", at {line}" if line else "")
    if isinstance(error, OSError) and error.errno is not None:
        return type(error)(error.errno, f"{error.strerror}{place}", error.filename)
    return type(error)(f"{error}{place}") if len(error.args) == 1 else error

"""The outcome of a run of ranks: the result, or the exception of the rank that failed first."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from accel_launch.notebook.function_pickle import Told, unpacked

if TYPE_CHECKING:
    from accel_launch.starting.failures import Failure


class RankFailedError(RuntimeError):
    """A rank failed. It is the cause of the exception that the rank raised, with its traceback there; raised itself if there is
    none: the process was killed, or what it raised cannot be brought here.
    """


def result_of(call: str, told: Told | None) -> Any:
    """The function's result on this machine's first rank; None, with a warning, if it cannot be sent."""
    if told is None:
        return None
    if told.result is None:
        warnings.warn(
            f"{call} has ended, and what its function returned stays with rank 0, for it cannot be sent here: {told.text}. "
            f"None is returned. Return plain data or tensors; save a model with the Accelerator.",
            stacklevel=5,  # the line that calls the launcher
        )
        return None
    return unpacked(told.result)[0]


def raise_first(call: str, size: int, failures: Sequence[Failure], told: Mapping[int, Told]) -> NoReturn:
    """Raises what the rank raised that failed first.

    Args:
        call: what the user called, for messages.
        size: the number of ranks.
        failures: of this machine, the first in front.
        told: by rank, what those said that raised.
    """
    if not failures:
        raise RankFailedError(
            f"{call}: no rank of this machine has failed; the run was ended because of another one. See what is raised there."
        )
    first = failures[0]
    begin = f"{call}: rank {first.rank} of {size} (process {first.pid}) failed first"
    said = told.get(first.rank)
    if said is None:
        raise RankFailedError(f"{begin}, and raised nothing: {first.how()}. What it printed may say why.")
    trace = RankFailedError(f"{begin}. It raised:\n\n{said.text.rstrip()}")
    if said.error is None:
        raise trace
    raise _exception(said.error, trace) from trace


def _exception(error: bytes, trace: RankFailedError) -> BaseException:
    try:
        found = unpacked(error)[0]
    except Exception:  # noqa: BLE001  (of the user's classes, which differ here from what the rank had; the text says all)
        return trace
    return found if isinstance(found, BaseException) else trace

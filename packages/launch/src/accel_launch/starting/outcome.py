"""Whether a run has begun, and why it ends: one key at the board, which changes in one step."""

from __future__ import annotations

from torch.distributed import TCPStore

from accel_launch.starting.board import MeetingError

GOES_ON = " The run that had begun goes on."
"""The end of the message of a newcomer's error that does not affect the run."""

_PHASE = "phase"  # empty while the machines gather, "begun", or _ENDED and why
_BEGUN = "begun"
_ENDED = "ended: "


def begin(board: TCPStore) -> bool:
    """The run begins: from now on no newcomer ends it. False if it was ended before."""
    return board.compare_set(_PHASE, "", _BEGUN).decode() == _BEGUN


def end(board: TCPStore, reason: str, *, begun: bool) -> None:
    """Ends the run on all machines, which say `reason`. The first reason counts.

    Args:
        begun: also if the run has begun. A newcomer may only end one that has not.
    """
    found = board.compare_set(_PHASE, "", _ENDED + reason).decode()
    if begun and found == _BEGUN:
        board.compare_set(_PHASE, _BEGUN, _ENDED + reason)


def ended(board: TCPStore) -> MeetingError | None:
    """The reason why the run was ended, as an error; None if it was not."""
    phase = board.get(_PHASE).decode() if board.check([_PHASE]) else ""
    return MeetingError(phase.removeprefix(_ENDED)) if phase.startswith(_ENDED) else None


def end_well(board: TCPStore, round: int) -> None:
    """The processes that this machine started in `round` have all ended well."""
    board.add(f"round/{round}/ended well", 1)


def ended_well(board: TCPStore, round: int) -> int:
    """The number of machines of which all processes of `round` have ended well."""
    return board.add(f"round/{round}/ended well", 0)


def finish(board: TCPStore, rank: int) -> None:
    """The machine with this rank needs the board no more."""
    board.set(_finished(rank), "")


def has_finished(board: TCPStore, rank: int) -> bool:
    """Whether the machine with this rank has said so."""
    return bool(board.check([_finished(rank)]))


def over(board: TCPStore, rank: int) -> str:
    """The reason why a machine with this rank comes too late for the run; empty if it does not."""
    error = ended(board)
    if error is not None:
        return str(error).splitlines()[0]
    return f"machine {rank} has finished" if has_finished(board, rank) else ""


def has_begun(board: TCPStore) -> bool:
    """Whether all machines have met, at least once."""
    return bool(board.check([_PHASE])) and board.get(_PHASE).decode() == _BEGUN


def _finished(rank: int) -> str:
    return f"finished/{rank}"

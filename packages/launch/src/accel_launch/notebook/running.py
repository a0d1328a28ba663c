"""Ranks of a function, started by torch's elastic agent as programs of their own.

They are not forked: a copy of a process in which torch has computed waits for threads that it does
not have, and cannot use a device that was initialised before. Nor does each execute the main script
again, as Python's own way of spawning would have it.

The function and its result go through a file without a name, which ranks have as their standard
input.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from accel_launch.errors import LaunchError, RankFailedError
from accel_launch.notebook import channel, rank
from accel_launch.notebook.function_pickle import Told, cells, unpacked
from accel_launch.notebook.output import Output, is_replaced
from accel_launch.starting.failures import listed
from accel_launch.starting.logs import Logs
from accel_launch.starting.meeting_store import MeetingError
from accel_launch.starting.program import Program
from accel_launch.starting.signals import Ended, Signals
from accel_launch.starting.supervision import supervise

if TYPE_CHECKING:
    from accel_launch.starting.failures import Failure
    from accel_launch.starting.plan import Plan


def run(call: str, plan: Plan, work: bytes, variables: Mapping[str, str], prefix: str | None) -> Any:
    """Runs a function on the ranks of this machine, and returns the result of the first of them.

    `call` is what the user called, for messages; `work` the packed function; `variables` those that
    ranks have beside the plan's; `prefix` what lines of their output begin with, if anything.
    Raises the exception of the rank that failed first; `LaunchError` if ranks cannot be started, or
    their machines do not meet.
    """
    copies = prefix is not None or is_replaced()
    with tempfile.TemporaryDirectory(prefix="accel-") as folder:
        job = {
            "environment": {**plan.variables, **variables},
            "path": [each or os.getcwd() for each in sys.path],
            "argv": sys.argv,
            "cells": cells(),
            "output": folder if copies else None,
            "work": work,
        }
        output = Output(Path(folder), prefix, plan.launch.role) if copies else nullcontext()
        with output, channel.opened(pickle.dumps(job)) as descriptor:
            failures = _supervise(call, plan, Program("script", rank.__file__))
            reports = channel.records(descriptor)
    first = failures[0].local_rank if failures else 0
    told: Told | None = pickle.loads(reports[first]) if reports.get(first) else None  # noqa: S301  (of a rank from here)
    if failures is not None:
        raise_first(call, plan.processes, failures, told)
    if silent := [each for each in range(plan.here) if not reports.get(each)]:
        raise RankFailedError(
            f"{call}: {listed(silent)} of this machine ended with exit status 0 before the function had returned, as os._exit(0) does. "
            "What it printed may say why."
        )
    return result_of(call, told)


def _supervise(call: str, plan: Plan, program: Program) -> list[Failure] | None:
    """Starts the ranks and waits; returns the failures of a failed run here, the first in front."""
    try:
        with Signals() as signals, closing(Logs(plan.launch, plan.here)) as logs:
            ended = supervise(plan, program, os.environ, signals, logs, stays=True)
    except Ended:
        told = signals.received
    except SignalException as error:
        told = error.sigval
    except MeetingError as error:
        raise LaunchError(f"{call}: {error}") from error
    except (RendezvousError, dist.DistError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise LaunchError(
            f"{call} was to meet {plan.meeting}, and that has failed: {reason}. See that every node is given the same "
            "address, port and number of nodes; `accel doctor` tries the connections."
        ) from error
    else:
        if ended.result is None:
            raise LaunchError(f"{call}: the run that met {plan.meeting} has ended already. Start all nodes again.")
        return ended.failures if ended.has_failed else None
    if told is None or told == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(told)  # now that nobody has to be told of it, it does what it does without us
    raise RankFailedError(f"{call} was ended by {told.name}, which this process was sent.")


def result_of(call: str, told: Told | None) -> Any:
    """The function's result on the first rank here; None, with a warning, if it cannot be sent."""
    assert told is not None, "every rank has said something"
    if told.result is None:
        warnings.warn(
            f"{call} has ended, and what its function returned stays with rank 0, because it cannot be sent here: "
            f"{told.text}. None is returned. Return plain data or tensors; save a model with the Accelerator.",
            stacklevel=5,  # the line that calls the launcher
        )
        return None
    return unpacked(told.result)[0]


def raise_first(call: str, size: int, failures: Sequence[Failure], said: Told | None) -> NoReturn:
    """Raises the exception of the rank that failed first: `failures[0]`, which reported `said`."""
    if not failures:
        raise RankFailedError(
            f"{call}: no rank of this machine has failed; the run was ended because of another one: look there."
        )
    first = failures[0]
    begin = f"{call}: rank {first.rank} of {size} (process {first.pid}) failed first"
    if said is None or not said.raised:
        raise RankFailedError(f"{begin}, and raised nothing: {first.how()}. What it printed may say why.")
    trace = RankFailedError(f"{begin}. It raised:\n\n{said.text.rstrip()}")
    error = None
    with suppress(Exception):  # of the user's classes, which differ here from what the rank had; the text says all
        error = unpacked(said.error)[0] if said.error is not None else None
    if isinstance(error, BaseException):
        raise error from trace
    raise trace

"""Ranks of a function, started by torch's elastic agent as programs of their own.

They are not forked: a copy of a process in which torch has computed waits for threads that it does
not have, and cannot use a device that was initialised before. Nor does each execute the main script
again, as Python's own way of spawning would have it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from accel_launch.notebook import passing_on, rank
from accel_launch.notebook.desk import Desk
from accel_launch.notebook.function_pickle import cells
from accel_launch.notebook.outcome import RankFailedError, raise_first, result_of
from accel_launch.starting.errors import LaunchError
from accel_launch.starting.program import Program
from accel_launch.starting.signals import Ended, Signals
from accel_launch.starting.supervision import supervise

if TYPE_CHECKING:
    from accel_launch.starting.failures import Failure
    from accel_launch.starting.plan import Plan


def run(call: str, plan: Plan, work: bytes, variables: Mapping[str, str], prefix: str | None) -> Any:
    """Runs a function on the ranks of this machine, and returns what it returned on the first of them.

    Args:
        call: what the user called, for messages.
        plan: what is started.
        work: the function and its arguments, packed.
        variables: what the ranks find in their environment beside the plan's.
        prefix: what lines of their output begin with; None: they are shown as they are.

    Raises:
        LaunchError: if the ranks cannot be started here, or their machines do not meet.
        Exception: what the rank raised that failed first.
    """
    if not hasattr(os, "mkfifo"):
        raise LaunchError(
            f"{call} was to start {plan.here} processes, which needs pipes and sockets of Unix, and this system has none. Start one "
            f"process here; or start a script with `accel launch`, or the notebook in a Linux system (WSL)."
        )
    passes_on = passing_on.is_needed(prefix)
    job = {
        "environment": {**plan.variables, **variables},
        "path": [each or os.getcwd() for each in sys.path],
        "argv": sys.argv,
        "cells": cells(),
        "passes_on": passes_on,
    }
    with tempfile.TemporaryDirectory(prefix="accel-") as name:
        folder = Path(name)
        output = passing_on.Output(folder, plan.here if passes_on else 0, prefix, plan.launch.role)
        with output, Desk(folder, job, work, output.begin) as desk:
            failures = _supervise(call, plan, Program("script", rank.__file__, (name,)))
    if failures is not None:
        raise_first(call, plan.processes, failures, desk.told)
    return result_of(call, desk.result)


def _supervise(call: str, plan: Plan, program: Program) -> list[Failure] | None:
    """Starts the ranks and waits for them; returns the failures of this machine if the run has failed, the first in front."""
    try:
        with Signals() as signals:
            ended = supervise(plan, program, os.environ, signals, stays=True)
    except Ended:
        told = signals.received
    except SignalException as error:
        told = error.sigval
    except (RendezvousError, dist.DistError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise LaunchError(
            f"{call} was to meet {plan.meeting}, and that has failed: {reason}. See that every node is given the same address, port "
            f"and number of nodes; `accel doctor` tries the connections."
        ) from error
    else:
        if ended.result is None:
            raise LaunchError(f"{call}: the run that met {plan.meeting} has ended already. Start all nodes again.")
        return ended.failures if ended.has_failed else None
    if told is None or told == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(told)  # now that nobody has to be told of it, it does what it does without us
    raise RankFailedError(f"{call} was ended by {told.name}, which this process was sent.")

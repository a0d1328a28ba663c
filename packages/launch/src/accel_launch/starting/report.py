"""A run under an agent, as `accel launch` tells of it: what it says at the end, and the exit status."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from accel_launch.starting.agent import say
from accel_launch.starting.failures import Scene, summary
from accel_launch.starting.meeting_point import MACHINES
from accel_launch.starting.supervision import Supervised, supervise

if TYPE_CHECKING:
    from accel_launch.starting.logs import Logs
    from accel_launch.starting.meeting_point import MeetingPoint
    from accel_launch.starting.plan import Plan
    from accel_launch.starting.program import Program
    from accel_launch.starting.signals import Signals


def run_and_report(plan: Plan, program: Program, environment: Mapping[str, str], signals: Signals) -> int:
    """Starts the ranks of this machine, looks after them until the run has ended, and says who failed if it did.

    Args and result are as for `start`; `environment` is whole.
    """
    assert plan.meeting is not None, "plans with an agent have one"
    try:
        run = supervise(plan, program, environment, signals)
    except SignalException as told:
        return 128 + told.sigval
    except (RendezvousError, dist.DistError) as error:
        say(_not_met(plan, plan.meeting, error))
        return 1
    if run.result is None:
        say(f"accel launch: the run that met {plan.meeting} has ended already, and this machine took no part in it.")
        return 1
    return _report(plan, run) if run.has_failed else 0


def _report(plan: Plan, run: Supervised) -> int:
    """Says who failed, and returns the exit status."""
    failures, logs = run.failures, run.logs
    if not failures:
        say(
            "accel launch: torch's agent has ended the run, and no rank of this machine had failed. Its messages stand above."
        )
        return 1
    first, launch = failures[0], plan.launch
    where, among = socket.gethostname(), ""
    if launch.num_machines > 1:
        where += "" if plan.machine_rank is None else f", machine {plan.machine_rank}"
        among = " on this machine"
    unseen = logs.unseen(first.local_rank)
    kept = logs.folder if logs.kept else None
    say(summary(failures, run.agent.ranks, Scene(where, among, kept, unseen, _advice(plan, logs))))
    return first.exit_status


def _advice(plan: Plan, logs: Logs) -> str:
    parts = [] if logs.kept else ["--log-dir FOLDER --tee 3 keeps each rank's output in a file of its own"]
    if not plan.launch.max_restarts:
        parts.append(
            "--max-restarts N starts all ranks again, which go on from their last checkpoint if the script does"
        )
    else:
        parts.append(f"this was after {plan.launch.max_restarts} of {plan.launch.max_restarts} restarts")
    return "; ".join(parts)


def _not_met(plan: Plan, meeting: MeetingPoint, error: BaseException) -> str:
    if meeting.backend == MACHINES:
        return f"accel launch: {error}"
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    who = "this machine" if plan.machine_rank is None else f"machine {plan.machine_rank} of {plan.launch.num_machines}"
    return (
        f"accel launch: {who} was to meet {meeting}, and the meeting has failed: {reason}\n"
        f"  See that every machine is given the same address, port and number of machines; `accel doctor` tries the connections."
    )

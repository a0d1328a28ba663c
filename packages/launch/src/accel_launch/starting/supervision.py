"""The run of torch's agent on this machine: the failures, the last message and the exit status."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.elastic.agent.server import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.numa.binding import AffinityMode, NumaOptions

from accel_launch.errors import LaunchError
from accel_launch.starting.agent import HostAgent, say
from accel_launch.starting.failures import Failure, from_torch, summary
from accel_launch.starting.logs import Logs
from accel_launch.starting.machines import Machines, OneMachine
from accel_launch.starting.meeting_point import HERE, MACHINES, Address, MeetingPoint
from accel_launch.starting.meeting_store import Card
from accel_launch.starting.orphan_guard import Guard

if TYPE_CHECKING:
    from accel_launch.starting.plan import Plan
    from accel_launch.starting.program import Program
    from accel_launch.starting.signals import Signals

_REPEATED = {
    "torch.distributed.elastic.multiprocessing.api": ("failed (exitcode", "Sending process", "Unable to shutdown"),
    "torch.distributed.elastic.agent.server.api": ("Received %s death signal", "Got termination signal"),
}
"""Messages of torch's agent that say what our summary says: logger → how they begin."""

_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class Supervised:
    """The outcome of a run on this machine."""

    result: RunResult | None  # what torch's agent says; None: the run had ended before this machine could take part
    agent: HostAgent  # knows the ranks

    @property
    def has_failed(self) -> bool:
        """Whether the run failed, here or on another machine."""
        return self.result is not None and bool(self.result.is_failed())

    @property
    def failures(self) -> list[Failure]:
        """The ranks here that failed, the first in front; none if another machine ended the run."""
        told = {} if self.result is None else self.result.failures
        return self.agent.failures or from_torch(told)


def run_and_report(plan: Plan, program: Program, environment: Mapping[str, str], signals: Signals) -> int:
    """Starts the ranks here, looks after them, says who failed; returns the exit status."""
    assert plan.meeting is not None, "plans with an agent have one"
    with closing(Logs(plan.launch, plan.here)) as logs:
        try:
            run = supervise(plan, program, environment, signals, logs)
        except SignalException as told:
            return 128 + told.sigval
        except (RendezvousError, dist.DistError) as error:
            say(_not_met(plan, plan.meeting, error))
            return 1
        if run.result is None:
            say(
                f"accel launch: the run that met {plan.meeting} has ended already, and this machine took no part in it."
            )
            return 1
        if run.has_failed:
            return _report(plan, run, logs)
        return 128 + run.agent.stop_signal if run.agent.stop_signal else 0


def _report(plan: Plan, run: Supervised, logs: Logs) -> int:
    """Says who failed, and returns the exit status."""
    failures = run.failures
    if not failures:
        say(
            "accel launch: torch's agent has ended the run, for what it says above; no rank of this machine had failed."
        )
        return 1
    first, launch = failures[0], plan.launch
    where, among = socket.gethostname(), ""
    if launch.num_machines > 1:
        where += "" if plan.machine_rank is None else f", machine {plan.machine_rank}"
        among = " on this machine"
    unseen = logs.unseen(first.local_rank)
    kept = logs.folder if logs.kept else None
    say(f"{summary(failures, run.agent.ranks, where, among, kept, unseen)}\n  {_advice(plan, logs)}")
    return first.exit_status


def _advice(plan: Plan, logs: Logs) -> str:
    keeps = "" if logs.kept else "--log-dir FOLDER --tee 3 keeps each rank's output in a file of its own; "
    if count := plan.launch.max_restarts:
        return f"{keeps}this was after {count} of {count} restarts"
    return f"{keeps}--max-restarts N starts all ranks again, which go on from their last checkpoint if the script does"


def _not_met(plan: Plan, meeting: MeetingPoint, error: BaseException) -> str:
    if meeting.backend == MACHINES:
        return f"accel launch: {error}"
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    who = "this machine" if plan.machine_rank is None else f"machine {plan.machine_rank} of {plan.launch.num_machines}"
    return (
        f"accel launch: {who} was to meet {meeting}, and the meeting has failed: {reason}\n  See that every machine is "
        "given the same address, port and number of machines; `accel doctor` tries the connections."
    )


def supervise(
    plan: Plan, program: Program, environment: Mapping[str, str], signals: Signals, logs: Logs, *, stays: bool = False
) -> Supervised:
    """Starts the ranks of this machine, and looks after them until the run has ended.

    `stays` says that this process goes on when told to end: it leaves the rendezvous, which its
    end would tell else. Raises `Ended` if told before there were ranks, `SignalException` if later
    (the ranks have been told, too); `RendezvousError` or `DistError` if the machines have not
    met; `LaunchError` if there is no such rendezvous.
    """
    launch = plan.launch
    assert plan.meeting is not None, "plans with an agent have one"
    with ExitStack() as stack:
        stack.enter_context(_in_environment(environment))
        stack.enter_context(_without_repetition(environment))
        groups = program.kind == "program"  # a shell, say, which passes no signal on to what it has started
        guard = stack.enter_context(Guard(launch.shutdown_timeout, groups))
        if logs.kept and not stays:
            say(f"accel launch: the ranks' output is written to files under {logs.folder}")
        signals.interrupt = lambda number: SignalException(f"{number.name} was sent", sigval=number)
        spec = _spec(plan, program, plan.meeting)
        patience, prefix = launch.shutdown_timeout, launch.log_line_prefix_template
        agent = HostAgent(spec, logs, signals, guard, patience, prefix, groups)
        return Supervised(_run(agent, spec.rdzv_handler, patience, stays), agent)


def _spec(plan: Plan, program: Program, meeting: MeetingPoint) -> WorkerSpec:
    launch, (entrypoint, *arguments) = plan.launch, program.argv()
    numa = None if launch.numa_binding is None else NumaOptions(affinity_mode=AffinityMode(launch.numa_binding))
    return WorkerSpec(
        role=launch.role,
        local_world_size=plan.here,
        entrypoint=entrypoint,
        # Torch substitutes what looks like a macro of its own.
        args=tuple(each.replace("$", "$$") for each in arguments),
        rdzv_handler=_handler(meeting),
        max_restarts=launch.max_restarts,
        monitor_interval=launch.monitor_interval,
        local_addr=meeting.local_addr,
        numa_options=numa,
    )


def _handler(meeting: MeetingPoint) -> RendezvousHandler:
    if meeting.backend in {HERE, MACHINES}:
        address = Address(*parse_rendezvous_endpoint(meeting.endpoint, 0))
        if meeting.backend == HERE:
            return OneMachine(address)
        told = meeting.options
        card = Card(told["rank"], meeting.machines[1], told["processes"], told["restarts"])
        return Machines(address, card, told["timeout"], meeting.local_addr)
    fewest, most = meeting.machines
    parameters = RendezvousParameters(
        backend=meeting.backend,
        endpoint=meeting.endpoint,
        run_id=meeting.run_id,
        min_nodes=fewest,
        max_nodes=most,
        local_addr=meeting.local_addr,
        **meeting.options,
    )
    try:
        return get_rendezvous_handler(parameters)
    except (ValueError, ImportError) as error:
        raise LaunchError(
            f"rdzv_backend={meeting.backend} was asked for at {meeting.endpoint}, and torch cannot make that "
            f"rendezvous: {error} Give another one, such as c10d; or leave it out, so that machines meet by rank."
        ) from error


def _run(agent: HostAgent, handler: RendezvousHandler, patience: float, stays: bool) -> RunResult | None:
    """Runs the agent, closes the rendezvous; None if the run had ended before this machine came.

    As in torch's own launcher, a rendezvous that is closed finds the failure on its way, so that it
    can tell the other machines.
    """
    result: RunResult | None = None
    closes = True
    with suppress(ChildFailedError):
        try:
            result = agent.run()
            if result is not None and result.is_failed() and result.failures:
                first = {
                    each.rank: result.failures[each.rank] for each in agent.failures[:1] if each.rank in result.failures
                }
                raise ChildFailedError("the run", first or result.failures)
        except SignalException as told:
            closes = stays  # for other machines, which may go on with fewer, it stays open
            if isinstance(handler, Machines) and not stays:
                handler.stop(told.sigval, patience)
            raise
        finally:
            if closes:
                handler.shutdown()
    return result


@contextmanager
def _in_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """A block in which this process has the ranks' environment: torch's agent copies it."""
    before = dict(os.environ)
    _replace_environment(environment)
    # The others are ours (see `Signals`); of this one no process group is told but by torch.
    os.environ[_SIGNALS] = "SIGQUIT" if os.name == "posix" else "SIGTERM"
    try:
        yield
    finally:
        _replace_environment(before)


def _replace_environment(values: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update({name: value for name, value in values.items() if os.environ.get(name) != value})


@contextmanager
def _without_repetition(environment: Mapping[str, str]) -> Iterator[None]:
    """A block without the agent's messages that our summary repeats; with all if `LOGLEVEL`."""

    def is_new(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_REPEATED[record.name])

    loggers = [] if environment.get("LOGLEVEL") else [logging.getLogger(name) for name in _REPEATED]
    for logger in loggers:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_new)

"""Torch's elastic agent, for our launcher: who failed first is known, and all end in time.

`LocalElasticAgent` meets the other machines, gives ranks, starts processes, redirects their output,
and starts all again when one has failed. What it does not do: it waits 30 seconds for the others
when one has failed, whatever was asked for, and a process that was halted takes them all; a signal
that arrives while it starts or ends processes leaves some of them behind; and it takes for the
first failure what it happens to look at first. The methods that are overridden here are those that
its documentation names for that.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from accel_launch.starting.failures import Failure, find_failures, listed, unseen_errors
from accel_launch.starting.machines import Machines
from accel_launch.starting.ranks import CAN_LOOK, Ranks

if TYPE_CHECKING:
    from accel_launch.starting.logs import Logs
    from accel_launch.starting.orphan_guard import Guard
    from accel_launch.starting.signals import Signals


class HostAgent(LocalElasticAgent):
    """The agent of one machine.

    `ranks` are the processes of this attempt, `failures` those of the last failed one, the first in
    front, `stop_signal` that by which another machine was told to stop. Processes have `patience`
    seconds to end; lines to console and files begin with `prefix`; `groups`: see `Ranks`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: Logs,
        signals: Signals,
        guard: Guard,
        patience: int,
        prefix: str | None,
        groups: bool,
    ) -> None:
        super().__init__(spec, logs, log_line_prefix_template=prefix)
        self.ranks, self.failures, self.stop_signal = Ranks({}), list[Failure](), 0
        self._logs, self._signals, self._guard, self._patience, self._groups = logs, signals, guard, patience, groups
        self._attempts, self._restarts = 0, spec.max_restarts
        if CAN_LOOK:
            # `ranks` are others in each attempt.
            signals.pass_on = lambda number: self.ranks.tell(number)  # noqa: PLW0108
            signals.child_ended = lambda: self.ranks.look()  # noqa: PLW0108

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._signals.held():
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self._signals.install()  # torch has put its own in their place
            if CAN_LOOK:
                own = {each.global_rank: pids[each.local_rank] for each in worker_group.workers}
                self.ranks = Ranks(own, self._groups)
                self._guard.watch(self.ranks.pids.values())
        self._attempts += 1
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if CAN_LOOK:
            running = len(self.ranks.running)
            self.ranks.look()
            if any(ending.status for ending in self.ranks.endings.values()):
                self._conclude(worker_group)
            elif len(self.ranks.running) < running:
                self._guard.watch(self.ranks.pids[rank] for rank in self.ranks.running)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _conclude(self, worker_group: WorkerGroup) -> None:
        """Ends all, because one has failed; then says so, if they will be started again."""
        with self._signals.held():
            self.ranks.stop(signal.SIGTERM, self._patience)
        local_ranks = {each.global_rank: each.local_rank for each in worker_group.workers}
        files = {rank: self._logs.error_file(local_rank) for rank, local_rank in local_ranks.items()}
        self.failures = find_failures(self.ranks, local_ranks, files)
        if self._attempts <= self._restarts and self.failures:
            first = self.failures[0]
            line = (
                f"accel launch: rank {first.rank} failed (process {first.pid}): {first.how()}. All are started again: "
                f"{listed(list(self.ranks.pids))}, restart {self._attempts} of {self._restarts}."
            )
            unseen = self._logs.unseen(first.local_rank)
            say("\n".join([line, *unseen_errors(first, unseen, is_kept=self._logs.kept)]))

    def _exit_barrier(self) -> None:
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, Machines):
            self.stop_signal = handler.finish()
        else:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_ranks(signal.SIGTERM)
        super()._stop_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002  (`patience` is)
        self._stop_ranks(death_sig)
        if self._pcontext is not None:  # that of torch 2.9 would wait 30 seconds for them
            self._pcontext.close(death_sig, self._patience)
        super()._shutdown(death_sig)

    def _stop_ranks(self, number: signal.Signals) -> None:
        if CAN_LOOK and self.ranks.running:
            with self._signals.held():
                self.ranks.stop(number, self._patience)


def say(text: str) -> None:
    """Prints a launcher's line to standard error, apart from the script's output for programs."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  (a launcher speaks to who has typed the command)

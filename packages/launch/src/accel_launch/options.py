"""The options of starting: how many processes, on which machines, and their output and failures.

Declared once, here: the command line, files, the environment and the questionnaire are derived from
these fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class LaunchOptions:
    """The options with which a run is started.

    Args:
        num_processes: processes of the whole run, all machines together. None: one for each
            accelerator of the machines; one for each machine that has none.
        num_machines: machines that take part.
        machine_rank: which of the machines this is, from 0. None: what Slurm says, else 0 on a
            single machine.
        main_process_ip: address of machine 0, where the machines meet. None: what Slurm says, else
            this machine.
        main_process_port: port at which the machines meet on machine 0. None or 0: a free one, on a
            single machine.
        device_ids: the accelerators of this machine that take part, by index. None: all.
        num_cpu_threads_per_process: threads that a process computes with on the CPU. None: what
            OMP_NUM_THREADS says, else an equal part of this machine's cores.
        max_restarts: how often all processes are started again after one of them has failed. On
            several machines a machine that was lost may come back then, and torch numbers them, by
            their addresses.
        monitor_interval: in seconds, how often the processes are looked after.
        shutdown_timeout: in seconds, how long processes may take to end when they are told to,
            before they are killed.
        meeting_timeout: how long a machine waits for the others.
        rdzv_backend: how machines meet. None: by their machine ranks. Others are backends of
            torch's rendezvous, such as "c10d", which numbers machines as they come and lets them
            join and leave.
        rdzv_endpoint: where torch's rendezvous is, as host:port. None: main_process_ip and
            main_process_port.
        rdzv_id: the name of the job in torch's rendezvous, the same on all machines.
        rdzv_conf: further options of torch's rendezvous.
        min_machines: how few machines go on without the others; needs a rendezvous that lets
            machines leave. None: all.
        local_addr: the address by which the other machines reach this one. None: its host name.
        log_dir: folder for the output of each process.
        redirects: whose output goes to files of log_dir instead of the console: 0 none, 1 standard
            output, 2 errors, 3 both; or for single processes of this machine, as in "0:3,1:2".
        tee: whose output goes to both, in the same notation.
        local_ranks_filter: processes of this machine whose output is shown, by local rank. None:
            all.
        log_line_prefix_template: what each line of a process that `tee` names begins with, on the
            console; may contain ${rank}, ${local_rank} and ${role_name}.
        role: the name of the processes in their output.
        numa_binding: which cores of the machine a process of an accelerator is bound to: those of
            the accelerator's node, and so on.
        debug: whether every collective is compared across the ranks before it runs.
        log_level: of the loggers of `accel_core.get_logger`.
    """

    num_processes: int | None = None
    num_machines: int = 1
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    device_ids: list[int] | None = None
    num_cpu_threads_per_process: int | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    shutdown_timeout: int = 10
    meeting_timeout: timedelta = timedelta(minutes=15)
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: dict[str, str] | None = None
    min_machines: int | None = None
    local_addr: str | None = None
    log_dir: Path | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: list[int] | None = None
    log_line_prefix_template: str | None = None
    role: str = "rank"
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    debug: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None

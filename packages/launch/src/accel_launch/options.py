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
        num_processes: number of processes in the whole run, on all machines together. None: one for
            each accelerator, and one for each machine without accelerators.
        num_machines: number of machines in the run.
        machine_rank: number of this machine, counted from 0. None: the number that Slurm gives,
            else 0 on a single machine.
        main_process_ip: address of machine 0, where the machines meet. None: the address that Slurm
            gives, else this machine.
        main_process_port: port on machine 0 at which the machines meet. Several machines need one,
            unless Slurm starts them, or --rdzv-endpoint has it. Not given, or 0: a free port.
        device_ids: numbers of the accelerators (such as GPUs) to use on this machine. None: all.
        num_cpu_threads_per_process: number of CPU threads for each process. None: the value of
            OMP_NUM_THREADS, else an equal share of the cores of this machine.
        max_restarts: number of times that all processes start again after one has failed. A machine
            that was lost may rejoin then; torch numbers several machines by their addresses.
        monitor_interval: seconds between two checks whether the processes are alive.
        shutdown_timeout: seconds that processes get to end by themselves before they are killed.
        meeting_timeout: time that a machine waits for the others.
        rdzv_backend: way in which machines meet. None: each says its number, by --machine-rank.
            "c10d": they are numbered as they arrive, and may join and leave. Other backends of
            torch's rendezvous work too.
        rdzv_endpoint: address of torch's rendezvous, as host:port. None: --main-process-ip and
            --main-process-port.
        rdzv_id: name of the job in torch's rendezvous, the same on all machines.
        rdzv_conf: further options of torch's rendezvous.
        min_machines: smallest number of machines that continue without the others. Needs a
            rendezvous that lets machines leave, such as "c10d". None: all.
        local_addr: address at which the other machines reach this one. None: its host name.
        log_dir: folder for the output of the processes.
        redirects: output that goes to files in --log-dir instead of the console: 0 nothing, 1
            standard output, 2 errors, 3 both. "0:3,1:2" sets it for processes 0 and 1 of this
            machine.
        tee: output that goes to files in --log-dir and to the console: 0 nothing, 1 standard output,
            2 errors, 3 both. "0:3,1:2" sets it for processes 0 and 1 of this machine.
        local_ranks_filter: numbers of the processes of this machine that print to the console. The
            errors of one that fails are shown in any case. None: all.
        log_line_prefix_template: text before each console line of a process that --tee names. It may
            contain ${rank}, ${local_rank} and ${role_name}.
        role: word before the number of a process in console lines that --tee shows, as in "[rank0]:".
        numa_binding: CPU cores on which a process may run: "node" and "socket" are all cores near
            its accelerator, "exclusive" and "core-complex" a part of them.
        debug: compare what all processes are about to send each other, and report differences.
            Slow.
        log_level: least important messages to show.
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

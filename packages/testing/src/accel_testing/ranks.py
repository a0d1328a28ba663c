"""Run a function on several ranks: real processes, real process groups, one plain call.

    def mean_of_ranks(scale):                       # at module level: it travels by name
        world = World.current()
        ...
        return result

    def test_mean():
        first, second = run_ranks(mean_of_ranks, 2, 10.0)

Every call starts fresh processes, so nothing survives from one test to the next. They are forked
from a server that has imported torch once and lives as long as the test process, which makes the
start of a rank cheap. A rank finds the environment that torchrun would give it, and it leaves
through the interpreter's own shutdown: threads are waited for, `atexit` callbacks run, objects are
finalized. A rank that fails or aborts on its way out has failed, whatever its function returned.
torch's random numbers begin at the rank's number: ranks differ, and every run draws the same.
What the server had loaded is not taken down in every rank, which would cost more than most tests
do: who tests the very end of a process, the destructors of C++ libraries included, starts a script.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

_preloaded = [
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",  # which the first optimizer of a process imports: 0.9 s
    "accel_core.accelerator",
    "accel_checkpoint.checkpoints",
    "accel_checkpoint.loading",
    "accel_checkpoint.saving",
    "accel_testing",  # all of it, for this module is in it: 0.1 s
]
# What the server imports before the first fork.

_processes = threading.Lock()
# multiprocessing keeps one list of a process's children, and looks after it at each start: launches from several threads.

_STACKS_SIGNAL = signal.SIGUSR1

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables whose value -1 hides all devices. An empty one hides none of AMD's."""

_OF_A_RANK = ("accel", "torch.distributed", "__main__")
"""How the names of modules begin that hold what one rank has made."""


_KEPT_AT_EXIT = re.compile(r"^nanobind: leaked .*", re.MULTILINE | re.DOTALL)
"""What the library behind triton says, behind all else, of modules that `_keep_loaded` keeps."""


def preload(*modules: str) -> None:
    """Imports modules in the server before the first rank is forked: engines that take seconds.

    Call it in a `conftest.py`. Behind the first `run_ranks` of a process it has no effect but on
    the next server.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)


@dataclass(frozen=True)
class RankReport:
    """The end of one rank.

    Args:
        state: one line: "returned", "raised: ValueError: …", "did not end: killed 60 s after the
            start", "returned, and then failed while exiting: ended by SIGABRT", …
        failed: whether this rank failed by itself, or had to be killed.
        exit_code: of the process; negative numbers are signals.
        traceback: of the exception that its function raised, whole; else empty.
        stacks: of every thread of a rank that was stuck or crashed, innermost call first.
        output: what the rank wrote to stdout and stderr.
    """

    rank: int
    state: str
    failed: bool
    exit_code: int | None
    traceback: str
    stacks: str
    output: str

    def __str__(self) -> str:
        parts = [f"rank {self.rank} {self.state}"]
        for title, text in (("", self.traceback), ("Stacks:", self.stacks), ("Output:", self.output)):
            if text.strip():
                parts.append(f"{title}\n{text.rstrip()}".lstrip("\n"))
        return "\n".join(parts)


class RanksFailed(AssertionError):  # noqa: N818  (reads as a statement in a test's report)
    """At least one rank raised, crashed, failed while exiting, or did not end in time.

    `reports` has one `RankReport` per rank, in rank order.
    """

    def __init__(self, function: str, reports: list[RankReport]) -> None:
        self.reports = reports
        failed = [report.rank for report in reports if report.failed]
        summary = f"{function} on {len(reports)} ranks: {len(failed)} failed (rank {', '.join(map(str, failed))})"
        super().__init__("\n\n".join([summary, *map(str, reports)]))


def run_ranks(
    function: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    grace: float = 5.0,
    env: Mapping[str, str | None] | None = None,
    devices: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `world_size` new processes; returns results by rank.

    Function, arguments and results are pickled: the function must stand at the level of a module
    that the ranks can import (they get this process's `sys.path` and working directory). It may
    create a process group: `World.current()` and torch find what they need in the environment.

    Args:
        timeout: seconds after which every rank must have returned and exited; others are killed.
        env: environment variables of all ranks, on top of this process's own and of torchrun's;
            None removes one. Variables that torch reads at import are read once, when the first
            call starts the server.
        grace: seconds that the other ranks have to end by themselves once one rank has failed.
        devices: whether ranks see the GPUs of this machine. By default a function that makes a
            world computes on the CPU, on machines with GPUs as without: those of NVIDIA and AMD are
            hidden. Devices of other kinds cannot be hidden: ask for `cpu=True` there.

    Raises:
        RanksFailed: with the traceback of each rank that raised and the stacks of each rank that
            was stuck.
    """
    task = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _reserved_port() as port:
        ranks = [_Rank(rank, Path(folder)) for rank in range(world_size)]
        try:
            hidden = {} if devices else dict.fromkeys(_VISIBLE, "-1")
            for rank in ranks:
                environment = _environment(rank.rank, world_size, port, {**hidden, **(env or {})})
                rank.start(task, environment, timeout + 2 * grace)
            _await(ranks, time.monotonic() + timeout, grace)
        finally:
            _kill(ranks)
        failed_alone = any(rank.failed and not rank.killed for rank in ranks)
        limit = f"{grace:g} s after another rank failed" if failed_alone else f"{timeout:g} s after the start"
        reports = [rank.report(limit) for rank in ranks]
    if any(report.failed for report in reports):
        raise RanksFailed(getattr(function, "__qualname__", repr(function)), reports)
    for report in reports:
        sys.stdout.write(report.output)
    return [rank.value() for rank in ranks]


@dataclass
class _Rank:
    """One rank as seen from the test: its process, and what it has sent."""

    rank: int
    folder: Path
    process: ForkServerProcess = field(init=False)
    results: Connection | None = field(init=False, default=None)
    message: tuple[bool, bytes] | None = field(init=False, default=None)
    exit_code: int | None = field(init=False, default=None)
    running: bool = field(init=False, default=False)
    killed: bool = field(init=False, default=False)

    def start(self, task: bytes, environment: dict[str, str], limit: float) -> None:
        context = multiprocessing.get_context("forkserver")
        # `pytest` started as a script is the main module, which each child imports once more.
        context.set_forkserver_preload([*_preloaded, *(["pytest"] if "pytest" in sys.modules else [])])
        self.results, theirs = context.Pipe(duplex=False)
        self.output_file.touch()
        self.process = context.Process(
            target=_run_rank,
            args=(task, theirs, environment, str(self.output_file), str(self.stacks_file), limit),
            name=f"rank {self.rank}",
        )
        with _processes:
            self.process.start()
        self.running = True
        theirs.close()

    @property
    def output_file(self) -> Path:
        return self.folder / f"output-{self.rank}"

    @property
    def stacks_file(self) -> Path:
        return self.folder / f"stacks-{self.rank}"

    @property
    def failed(self) -> bool:
        """Whether it is known already that this rank has failed."""
        raised = self.message is not None and not self.message[0]
        return raised or (not self.running and self.exit_code != 0)

    def receive(self) -> None:
        """Takes the rank's only message; blocks while a long one is on its way."""
        assert self.results is not None
        with contextlib.suppress(EOFError):  # it died without a word; the exit code tells
            returned, payload = self.results.recv_bytes(), self.results.recv_bytes()
            self.message = (returned == b"returned", payload)
        self.results.close()
        self.results = None

    def reap(self) -> None:
        """Takes note of the exit of a process that has ended."""
        with _processes:
            self.process.join()
            self.exit_code = self.process.exitcode
            self.process.close()
        self.running = False
        if self.results is not None:
            self.receive()

    def report(self, limit: str) -> RankReport:
        returned = self.message is not None and self.message[0]
        text = self.message[1].decode() if self.message is not None and not returned else ""
        stacks = self.stacks_file.read_text(errors="replace") if self.stacks_file.exists() else ""
        return RankReport(
            rank=self.rank,
            state=self._state(returned, text, limit),
            failed=self.failed or self.killed,
            exit_code=self.exit_code,
            traceback=text,
            stacks=stacks,
            output=_KEPT_AT_EXIT.sub("", self.output_file.read_text(errors="replace")),
        )

    def _state(self, returned: bool, text: str, limit: str) -> str:
        if self.killed:
            done = "returned, but did not exit" if returned else "raised, and did not exit" if text else "did not end"
            return f"{done}: killed {limit}"
        if text:
            return f"raised: {text.rstrip().splitlines()[-1]}"
        ending = _ending(self.exit_code)
        if returned:
            return "returned" if self.exit_code == 0 else f"returned, and then failed while exiting: {ending}"
        return f"ended without returning: {ending}"

    def value(self) -> Any:
        assert self.message is not None
        return pickle.loads(self.message[1])


def _environment(rank: int, world_size: int, port: int, more: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of one rank: this process's own, torchrun's, the caller's."""
    environment: dict[str, str | None] = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return {name: value for name, value in environment.items() if value is not None}


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that no other process is given meanwhile.

    A socket that is bound, but does not listen, keeps the port out of the kernel's choice for
    others, and still lets a server bind it that sets SO_REUSEADDR, as torch's store does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _await(ranks: list[_Rank], deadline: float, grace: float) -> None:
    """Receives and reaps until every rank has exited, the time is over, or a failure's grace is."""
    failed = False
    while running := [rank for rank in ranks if rank.running]:
        if not failed and any(rank.failed for rank in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + grace)
        connections: dict[Any, _Rank] = {rank.results: rank for rank in running if rank.results is not None}
        sentinels: dict[Any, _Rank] = {rank.process.sentinel: rank for rank in running}
        ready = wait([*connections, *sentinels], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for item in ready:
            if item in connections:
                connections[item].receive()
        for item in ready:
            if item in sentinels:
                sentinels[item].reap()


def _kill(ranks: list[_Rank]) -> None:
    """Ends whoever still runs: asks for the stacks, terminates, kills."""
    running = [rank for rank in ranks if rank.running]
    for rank in running:
        rank.killed = True
        if rank.stacks_file.exists():  # else it is too young to have a handler
            _signal(rank.process, _STACKS_SIGNAL)
    if running:
        wait([rank.process.sentinel for rank in running], 0.5)
    for number, patience in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience
        for rank in running:
            _signal(rank.process, number)
        while running:
            ready = wait([rank.process.sentinel for rank in running], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in running if rank.process.sentinel in ready]:
                _signal(rank.process, signal.SIGKILL)  # the workers that its end has left behind
                rank.reap()
                running.remove(rank)


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    """Sends a signal to a process that may have ended, and to its workers."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    if number != _STACKS_SIGNAL:
        with contextlib.suppress(ProcessLookupError):  # one that is too young has no group of its own yet
            os.killpg(process.pid, number)


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _run_rank(
    task: bytes, results: Connection, environment: dict[str, str], output: str, stacks: str, limit: float
) -> NoReturn:
    """Runs the function in a forked process and leaves it for good."""
    # The collector then leaves alone what the server imported, and still collects what is new.
    gc.freeze()
    atexit.register(_keep_loaded, frozenset(sys.modules))
    os.setpgid(0, 0)
    # A worker that outlives its rank would keep the line open, and the test waiting for a message that nobody sends.
    os.register_at_fork(after_in_child=lambda: None if results.closed else results.close())
    os.environ.clear()
    os.environ.update(environment)
    _redirect_output(output)
    stacks_file = open(stacks, "w")  # noqa: SIM115  (faulthandler writes to it until the process ends)
    faulthandler.enable(stacks_file)
    faulthandler.register(_STACKS_SIGNAL, stacks_file, all_threads=True)
    faulthandler.dump_traceback_later(limit, exit=True, file=stacks_file)  # in case nobody is left to kill this rank
    exit_code = _call(task, results)
    results.close()
    _leave(exit_code)


def _redirect_output(output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)


def _call(task: bytes, results: Connection) -> int:
    """Calls the function and sends what it returned, or its traceback; gives the exit code."""
    import torch

    # A rank is started like a script: workers of its loaders are forked, and not by the server that forked the rank.
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read when the server loaded the library
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    try:
        function, args, kwargs = pickle.loads(task)
        # Plain pickle: multiprocessing's would pass tensors as handles on a process that is about to end.
        payload = pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001  (whatever ends a function is its result here)
        results.send_bytes(b"raised")
        results.send_bytes(traceback.format_exc().encode())
        if not isinstance(error, SystemExit):
            # As the interpreter does for an exception that nobody caught: `atexit` callbacks may ask.
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        return 1
    results.send_bytes(b"returned")
    results.send_bytes(payload)
    return 0


def _leave(exit_code: int) -> NoReturn:
    """Exits through the interpreter's own finalization, as the end of a script does.

    A child of multiprocessing ends with `os._exit`, which runs neither `atexit` callbacks nor the
    destructors of what modules still hold; crashes at exit would go unseen. `Py_Exit` is the C
    function behind `sys.exit`.
    """
    ctypes.pythonapi.Py_Exit(exit_code)
    raise AssertionError("Py_Exit does not return")


def _keep_loaded(inherited: frozenset[str]) -> None:
    """Keeps what the server had loaded from finalization. The last callback of `atexit`.

    Finalization takes every module apart, and C's `exit` every library, and by that they copy most
    of the memory that a rank shares with the server. Kept are modules that hold nothing of one
    rank: neither process groups, nor what is ours. Only glibc can pass the exit code over what
    libraries have registered; elsewhere that runs.
    """
    for name in inherited & sys.modules.keys():
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith(_OF_A_RANK):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.fflush(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)

"""Many launches at once: each launcher is a process of its own, forked from one that has imported torch, which is what takes long.

Run with a folder as its argument, and a list of launches as JSON on standard input. Of each launch `name`, the folder `name` gets what
was printed, the launcher's process id, and what came of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LIMIT = 60.0
HERE = Path(__file__).parent


@dataclass
class Launch:
    """One launch.

    Args:
        name: of its folder, which the script gets as its second argument.
        way: what `start_job.py` does, or a command for the shell if it begins with `$`.
        options: of `LaunchOptions`.
        signals: are sent to the launcher's process group, one after the other, once two ranks say that they stay.
        environment: more variables.
    """

    name: str
    way: str
    options: dict[str, Any] = field(default_factory=dict)
    signals: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """What came of it: exit status, output, seconds since the signal or the failure, and processes that still live."""

    status: int
    output: str
    errors: str
    seconds: float
    left: list[int]
    folder: Path


def run_together(launches: list[Launch], folder: Path, limit: float = LIMIT) -> dict[str, Result]:
    """Runs all at once, and returns when all have ended."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        process.communicate(json.dumps([asdict(launch) for launch in launches]), timeout=limit + 15)
    finally:
        process.kill()
        process.wait()
    return {launch.name: _result(folder / launch.name) for launch in launches}


def _result(folder: Path) -> Result:
    ended = json.loads((folder / "ended").read_text())
    since = [float(path.read_text()) for path in folder.glob("moment*")]
    return Result(
        ended["status"],
        (folder / "output").read_text(),
        (folder / "errors").read_text(),
        ended["time"] - max(since, default=ended["time"]),
        ended["left"],
        folder,
    )


def main() -> None:
    from accel_launch.starting import supervision  # noqa: F401  (so that no launcher has to import it)

    folder = Path(sys.argv[1])
    launches = [Launch(**each) for each in json.load(sys.stdin)]
    running = {_fork(launch, folder / launch.name): launch for launch in launches}
    deadline = time.monotonic() + LIMIT
    while running:
        for pid, launch in list(running.items()):
            own = folder / launch.name
            if launch.signals and len(list(own.glob("pid-*"))) == 2:
                _tell(pid, launch, own)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                _note(own, os.waitstatus_to_exitcode(status))
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)


def _tell(pid: int, launch: Launch, own: Path) -> None:
    time.sleep(0.1)
    (own / "moment").write_text(str(time.time()))
    for name in launch.signals:
        os.killpg(pid, signal.Signals[name])
        time.sleep(0.3 if len(launch.signals) > 1 else 0)
    launch.signals.clear()


def _note(own: Path, status: int) -> None:
    moment = time.time()
    pids = [int(path.read_text()) for kind in ("pid", "child") for path in own.glob(f"{kind}-*")]
    # The guard of a launcher that was killed needs a moment; a launcher that has ended by itself leaves nobody.
    patience = time.monotonic() + (5.0 if status == -signal.SIGKILL else 0.0)
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < patience:
        time.sleep(0.02)
    (own / "ended").write_text(json.dumps({"status": status, "time": moment, "left": left}))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _fork(launch: Launch, own: Path) -> int:
    own.mkdir(parents=True)
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    # Whoever runs the tests may have these ignored, as nohup and the background jobs of shells do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(own / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    status = 99
    try:
        status = _launch(launch, own)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _launch(launch: Launch, own: Path) -> int:
    from accel_launch.options import LaunchOptions
    from accel_launch.starting.plan import make_plan
    from accel_launch.starting.program import Program, start

    options = dict(launch.options)
    if "log_dir" in options:
        options["log_dir"] = Path(options["log_dir"])
    environment = {**os.environ, **launch.environment}
    program = Program("script", str(HERE / "start_job.py"), (launch.way, str(own)))
    if launch.way.startswith("$"):
        program = Program("program", "sh", ("-c", launch.way[1:]))
    before = dict(os.environ), [signal.getsignal(number) for number in signal.Signals]
    status = start(make_plan(LaunchOptions(**options), True, environment), program, environment)
    assert before == (dict(os.environ), [signal.getsignal(number) for number in signal.Signals])
    return status


if __name__ == "__main__":
    main()

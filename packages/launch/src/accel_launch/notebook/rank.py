"""One rank of a function that `notebook_launcher` runs: started as a program, told by a socket what to run.

Nothing but the standard library is imported until the notebook's `sys.path` and variables are
there: some of these hold only before torch is imported.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

DESK = "desk"
"""Name of the socket in the folder that the launcher names."""

STREAMS = ("out", "err")
"""Names of the two pipes for a rank's output, each followed by its local rank."""


def main(folder: Path) -> None:
    """Runs what the launcher sends, and tells it what came of it."""
    desk = Client(str(folder / DESK), "AF_UNIX")
    desk.send(_introduction())
    job, work = desk.recv(), desk.recv_bytes()
    _furnish(job)
    _pass_on_output(folder, job)
    try:
        told = _run(work)
    except KeyboardInterrupt:
        sys.excepthook = _show("")
        raise
    except Exception as error:
        text = _traceback(error)
        _tell_failure(desk, error, text)
        # What is started again shows its error itself; else the cell does.
        sys.excepthook = _show(text if _starts_again() else "")
        raise
    desk.send_bytes(told)


def _introduction() -> dict[str, int]:
    variables = {"rank": "RANK", "local_rank": "LOCAL_RANK", "attempt": "TORCHELASTIC_RESTART_COUNT"}
    return {"pid": os.getpid()} | {name: int(os.environ[variable]) for name, variable in variables.items()}


def _furnish(job: dict[str, Any]) -> None:
    """Makes this process resemble the notebook's: its variables, import path, arguments and the text of its cells."""
    os.environ.update(job["environment"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["argv"]
    linecache.cache.update(job["cells"])


def _pass_on_output(folder: Path, job: dict[str, Any]) -> None:
    if not job["passes_on"]:
        return
    for number, name in enumerate(STREAMS, start=1):
        pipe = os.open(folder / f"{name}{os.environ['LOCAL_RANK']}", os.O_WRONLY)
        os.dup2(pipe, number)
        os.close(pipe)


def _run(work: bytes) -> bytes:
    """Runs the function; returns what is told of its result."""
    from accel_launch.notebook.function_pickle import result_told, unpacked

    namespace = ModuleType("__main__")  # the notebook's own: where classes of its cells are looked up by name
    sys.modules["__main__"] = namespace
    function, args, own = unpacked(work)
    vars(namespace).update(own)
    try:
        result = function(*args)
    except SystemExit as leaving:
        if leaving.code:
            leaving.__traceback__ = _of_the_function(leaving)
            raise RuntimeError(f"The function ended its process, with {leaving.code!r} as exit status.") from leaving
        result = None
    return result_told(result) if os.environ["LOCAL_RANK"] == "0" else result_told(None)


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(type(error), error, _of_the_function(error)))


def _of_the_function(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file, which help nobody."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _tell_failure(desk: Connection, error: Exception, text: str) -> None:
    """Tells the notebook what was raised; and torch's agent, in the file and format of its own `ErrorHandler`, when and why."""
    from accel_core.api.launcher import broken_connection_in
    from accel_launch.notebook.function_pickle import failure_told

    now = time.time()
    follows = broken_connection_in(error) is not None
    extra = {"py_callstack": text, "timestamp": str(int(now)), "time": now, "follows": follows}
    content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content))
    desk.send_bytes(failure_told(error, text))


def _starts_again() -> bool:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["TORCHELASTIC_MAX_RESTARTS"])


def _show(text: str) -> Callable[..., None]:
    """An excepthook that shows `text` and no more. The interpreter has noted the exception already, for who asks at exit."""

    def show(*_: object) -> None:
        sys.stderr.write(text)

    return show


if __name__ == "__main__":
    main(Path(sys.argv[1]))

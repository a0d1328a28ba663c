"""One rank of `notebook_launcher`: a program that reads from standard input what to run.

Nothing but the standard library is imported until the notebook's `sys.path` and variables are
there: some of these hold only before torch is imported.
"""

from __future__ import annotations

import json
import linecache
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, TracebackType


def main() -> None:
    """Runs what the launcher asks for, and says what came of it."""
    sys.path.append(str(Path(__file__).parents[2]))  # of this package, should only the notebook know where it is
    from accel_launch.notebook import channel

    descriptor, rank = channel.take_over(), int(os.environ["LOCAL_RANK"])
    channel.append(descriptor, rank, b"")  # instead of what it said before a restart
    job = pickle.loads(channel.records(descriptor)[channel.WORK])  # noqa: S301  (from the memory of the notebook)
    # This process is to resemble the notebook's: its variables, import path, arguments and the text of its cells.
    os.environ.update(job["environment"])
    sys.path[:], sys.argv[:] = job["path"], job["argv"]
    linecache.cache.update(job["cells"])
    if job["output"] is not None:
        _write_to_files(Path(job["output"]))
    try:
        told = _run(job["work"])
    except KeyboardInterrupt:
        sys.excepthook = lambda *_: None
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(type(error), error, _of_the_function(error)))
        channel.append(descriptor, rank, _failure(error, text))
        # What is started again shows its error itself; else the cell does.
        again = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
        # The interpreter notes the exception all the same, for who asks at exit.
        sys.excepthook = lambda *_: sys.stderr.write(text if again else "")
        raise
    channel.append(descriptor, rank, told)


def _write_to_files(folder: Path) -> None:
    for number, name in enumerate(("stdout", "stderr"), start=1):
        path = folder / f"{name}-{os.environ['RANK']}-{os.environ['LOCAL_RANK']}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)


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


def _of_the_function(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file, which help nobody."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _failure(error: Exception, text: str) -> bytes:
    """The pickled report of an exception; writes when and why to the file of torch's agent."""
    from accel_core.api.launcher import broken_connection_in
    from accel_launch.notebook.function_pickle import failure_told

    now = time.time()
    follows = broken_connection_in(error) is not None
    extra = {"py_callstack": text, "timestamp": str(int(now)), "time": now, "follows": follows}
    content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content))
    return failure_told(error, text)


if __name__ == "__main__":
    main()

"""What a failed process leaves for its launcher and its user: the error file of torch's agents, and one traceback.

`torch.distributed.elastic.multiprocessing.errors.record` writes the same file for a main function. A
mistake that all ranks of one agent on one terminal make is shown once; ranks that come later say so
in a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

VARIABLE = "TORCHELASTIC_ERROR_FILE"

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def leave(error: BaseException, *, follows: bool, why: str = "") -> None:
    """Writes the file, if an agent has asked for one and nobody has written it yet.

    Args:
        error: what ends this process.
        follows: whether it only follows from another rank's failure.
        why: what the Watch has found out.
    """
    name = os.environ.get(VARIABLE)
    if not name or Path(name).exists():
        return
    now = time.time()
    told = {
        "message": {
            "message": why or "".join(traceback.format_exception_only(error)).strip(),
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(now)),
                "time": now,
                "follows": follows,
            },
        }
    }
    draft = Path(f"{name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(told), encoding="utf-8")
        draft.replace(name)  # at once: agents read it as soon as it is there
    except OSError as problem:
        print(f"{VARIABLE}={name} could not be written: {problem}", file=sys.stderr)  # noqa: T201


def show_once() -> None:
    """Has this process print an exception that nobody caught in one line, if another rank has printed its lines."""
    if VARIABLE in os.environ and not isinstance(sys.excepthook, ShowOnce):
        sys.excepthook = ShowOnce(sys.excepthook)


class ShowOnce:
    """A `sys.excepthook`, in front of the one `before`, which the first rank with a traceback still calls."""

    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Shows the exception: see `sys.excepthook`."""
        first = _first_rank(error)
        if first is None:
            self._before(kind, error, trace)
            return
        message = "".join(traceback.format_exception_only(error)).strip()
        print(f"Rank {os.environ.get('RANK')} failed at the same lines as rank {first}: {message}", file=sys.stderr)  # noqa: T201


def _first_rank(error: BaseException) -> str | None:
    """The rank that has shown these lines; None if it is this one, or if nobody can say."""
    try:
        stream = os.fstat(2)
        place = (os.getppid(), os.environ.get("TORCHELASTIC_RESTART_COUNT"), stream.st_dev, stream.st_ino)
        key = hashlib.sha256(repr((*place, *_lines(error))).encode()).hexdigest()
        shown = Path(os.environ[VARIABLE]).parent.parent / f"shown-{key[:16]}"
        draft = shown.with_name(f"{shown.name}.{os.getpid()}")
        draft.write_text(os.environ.get("RANK", "?"), encoding="utf-8")
        try:
            os.link(draft, shown)  # fails where the file is there, and is never seen half written
        except FileExistsError:
            return shown.read_text(encoding="utf-8")
        finally:
            draft.unlink()
    except OSError:  # no such folder, or no links in it: then all of it is shown
        return None
    return None


def _lines(error: BaseException) -> Iterator[object]:
    """Type and lines of an exception, and of those that led to it."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield type(found).__qualname__
        yield from ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(found.__traceback__))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)

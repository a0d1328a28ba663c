"""Output of a failed process: the error file of torch's agents, and one traceback for all."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

VARIABLE = "TORCHELASTIC_ERROR_FILE"
LONGEST = 4000  # characters of an error that are told, its last ones: a worker's error ends with the original exception

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def leave(error: BaseException, *, follows: bool, why: str = "") -> None:
    """Writes the agent's error file, if asked for and absent; `follows`: another rank failed."""
    name = os.environ.get(VARIABLE)
    if not name or Path(name).exists():
        return
    now = time.time()
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(now)), "time": now, "follows": follows}
    message = why or "".join(traceback.format_exception_only(error)).strip()
    draft = Path(f"{name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
        draft.replace(name)  # at once: agents read it as soon as it is there
    except OSError as problem:
        print(f"{VARIABLE}={name} could not be written: {problem}", file=sys.stderr)  # noqa: T201


def show_once() -> None:
    """Has an uncaught exception printed in one line, if another rank has printed its lines."""
    if VARIABLE in os.environ and getattr(sys.excepthook, "func", None) is not _show:
        sys.excepthook = functools.partial(_show, sys.excepthook)


def _show(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook` before `before`, which the first rank with a traceback still calls."""
    first = _first_rank(error)
    if first is None:
        before(kind, error, trace)
        return
    message = "".join(traceback.format_exception_only(error)).strip()
    print(f"Rank {os.environ.get('RANK')} failed at the same lines as rank {first}: {message}", file=sys.stderr)  # noqa: T201


def _first_rank(error: BaseException) -> str | None:
    """The rank that has shown these lines; None if it is this one, or if nobody can say."""
    passed = [(type(each).__qualname__, traceback.walk_tb(each.__traceback__)) for each in chain(error)]
    lines = [(kind, [(frame.f_code.co_filename, line) for frame, line in frames]) for kind, frames in passed]
    try:
        stream = os.fstat(2)
        place = (os.getppid(), os.environ.get("TORCHELASTIC_RESTART_COUNT"), stream.st_dev, stream.st_ino)
        key = hashlib.sha256(repr((place, lines)).encode()).hexdigest()
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


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error tells that a rank has gone; gloo's is a bare `RuntimeError` naming it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def broken_connection_in(error: BaseException) -> BaseException | None:
    """The first error of a broken connection among an error, its cause or context, and so on."""
    return next((each for each in chain(error) if is_broken_connection(each)), None)


def described(error: BaseException) -> str:
    """Type and message, and the line that raised it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return (text if len(text) <= LONGEST else f"…{text[-LONGEST:]}") + place


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, its cause or context, theirs, and so on; each once."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__

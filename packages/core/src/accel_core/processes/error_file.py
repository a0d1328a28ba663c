"""The file in which a process tells torch's agent that started it what it failed with.

`torch.distributed.elastic.multiprocessing.errors.record` writes the same for a main function.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

VARIABLE = "TORCHELASTIC_ERROR_FILE"


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

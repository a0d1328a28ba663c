"""Whether the GPUs of a machine reach each other's memory, which some drivers say that they do, and do not.

Then copies hang, or bring other values, and so does the first collective of NCCL. It is tried in a process of its own, for
nothing ends a call that hangs in a driver.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any

import torch

_BYTES = 64 << 20
_BEGUN, _WRONG = "begun", "wrong"


class Trial:
    """Copies between each two GPUs that this process sees, under way in a process of its own."""

    def __init__(self, program: Sequence[str] = (sys.executable, "-m", __name__)) -> None:
        self._printed = tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe would stay open with a process that hangs)
        self._process = subprocess.Popen(program, stdout=self._printed, stderr=subprocess.STDOUT)

    def result(self, deadline: float) -> dict[str, Any]:
        """What was found until `deadline`, of `time.monotonic`; whatever runs then is killed.

        "GB/s" by pair, pairs that are "wrong", the one that is "stuck", and the "error" that ended it.
        """
        found: dict[str, Any] = {"GB/s": {}, "wrong": []}
        try:
            status: int | None = self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver does not even die
                self._process.wait(1)
        self._printed.seek(0)
        lines = self._printed.read().splitlines()
        self._printed.close()
        last = ""
        for line in lines:
            pair, _, what = line.partition(": ")
            if what == _WRONG:
                found["wrong"].append(pair)
            elif what.endswith(" GB/s"):
                found["GB/s"][pair] = float(what.removesuffix(" GB/s"))
            last = pair if what == _BEGUN else ""
        if status is None and last:
            found["stuck"] = last
        elif status != 0:
            found["error"] = lines[-1] if lines else "it did not begin in time"
        return found


def begin() -> Trial | None:
    """Begins a trial; None where this process sees no two GPUs."""
    current = torch.accelerator.current_accelerator()
    several = current is not None and current.type == "cuda" and torch.cuda.device_count() > 1
    return Trial() if several else None


def tried(module: Any, count: int, size: int = _BYTES) -> Iterator[str]:
    """Copies `size` bytes between each two devices of torch's `module` that claim to reach each other, and says how it went."""
    kind = module.__name__.rpartition(".")[2]
    expected = torch.arange(size // 8)
    for source, target in permutations(range(count), 2):
        if not module.can_device_access_peer(source, target):
            continue
        yield f"{source} to {target}: {_BEGUN}"
        sent = expected.to(f"{kind}:{source}")
        found = sent.to(f"{kind}:{target}")
        module.synchronize(target)
        start = time.perf_counter()
        found = sent.to(f"{kind}:{target}")
        module.synchronize(target)
        seconds = time.perf_counter() - start
        right = torch.equal(found.cpu(), expected)
        yield f"{source} to {target}: {f'{size / seconds / 1e9:.1f} GB/s' if right else _WRONG}"


if __name__ == "__main__":
    for text in tried(torch.cuda, torch.cuda.device_count()):
        print(text, flush=True)  # noqa: T201  (what a `Trial` reads)

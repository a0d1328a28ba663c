"""How much more memory than the state itself a process needs at most while it saves or loads. Linux only.

Measured in processes of their own: memory that others have left there would be used again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from states import BEHIND, WAYS, Run

WARM = 1  # MiB of a run that does it first, so that imports and pools are not counted


def of_checkpoints(name: str, size: int) -> dict[str, float]:
    """The extra memory of saving, of loading into a run that has not begun, and of loading into one that has.

    Args:
        name: of `states.WAYS`.
        size: of the state, in MiB.
    """
    with tempfile.TemporaryDirectory() as place:
        return {f"{what}_memory": _measured(name, what, size, place) for what in ("save", "load", "reload")}


def of_background(name: str, size: int) -> float:
    """The extra memory of saving in the background, from the call to the folder. `name`: of `states.BEHIND`."""
    with tempfile.TemporaryDirectory() as place:
        return _measured(name, "begin", size, place)


def _measured(name: str, what: str, size: int, place: str) -> float:
    command = [sys.executable, "-W", "ignore", str(Path(__file__)), name, what, str(size), place]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")
    fraction: float = json.loads(ended.stdout.splitlines()[-1])
    return fraction


def resident(name: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _extra(name: str, what: str, size: int, folder: Path) -> float:
    """The growth of the peak, less what the state itself has grown by, as a fraction of the state.

    A load finds what was saved in `folder`, by another process: memory that saving leaves would be used again.
    """
    run = Run(size, fresh=what == "load")
    way = (BEHIND if what == "begin" else WAYS)[name](run)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before, state = resident("VmRSS"), run.nbytes()
    if what == "begin":
        way.begin(folder)()
    elif what == "save":
        way.save(folder)
    else:
        way.load(folder)
    return (resident("VmHWM") - before - (run.nbytes() - state)) / run.nbytes()


def main() -> None:
    name, what, size, place = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm:
        folder = Path(warm) / "small"
        if "load" in what:
            _extra(name, "save", WARM, folder)
        _extra(name, what, WARM, folder)
    print(json.dumps(_extra(name, what, int(size), Path(place) / "state")))


if __name__ == "__main__":
    main()

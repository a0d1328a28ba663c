"""The way of a stranger, timed: from a clone to a run of a script of one's own that was killed and goes on in two processes.

python release/first_run.py

It clones this repository, makes an environment, installs as README.md says, runs its five lines, writes a script that saves and
resumes, kills it, and resumes it in two processes. What it needs comes from the package index that pip uses.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOAL = 600
"""Seconds that all of it may take."""

SCRIPT = """\
from pathlib import Path

import torch
from accel_core import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(80_000, 8), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

if Path("checkpoint").exists():
    accelerator.load_state("checkpoint")
    accelerator.print("resumed in", accelerator.num_processes, "processes")

for number, x in enumerate(loader):
    accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if number % 1000 == 0:
        accelerator.save_state("checkpoint")
accelerator.print("done")
"""


class Clock:
    """Prints each step with its seconds."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def tell(self, what: str) -> None:
        now = time.monotonic()
        print(f"{now - self.last:6.1f} s  {what}", flush=True)
        self.last = now


def main() -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone, python = folder / "accel", folder / "accel" / ".venv" / "bin" / "python"
        run("git", "clone", "--quiet", str(ROOT), str(clone), cwd=folder)
        clock.tell("cloned")
        run(sys.executable, "-m", "venv", ".venv", cwd=clone)
        run(str(python), "-m", "pip", "install", "--quiet", "-r", "requirements/accel-all.txt", cwd=clone)
        clock.tell("installed")
        (folder / "train.py").write_text(first_program(), encoding="utf-8")
        run(str(python), "train.py", cwd=folder)
        run(str(python.with_name("accel")), "launch", "--num-processes", "2", "train.py", cwd=folder)
        clock.tell("the five lines of README.md, in one process and in two")
        (folder / "own.py").write_text(SCRIPT, encoding="utf-8")
        kill_after_a_checkpoint(python, folder)
        clock.tell("a script of one's own, killed")
        resumed = [str(python.with_name("accel")), "launch", "--num-processes", "2", "own.py"]
        said = run(*resumed, cwd=folder)
        if "resumed in 2 processes" not in said or "done" not in said:
            raise SystemExit(f"The script did not go on in two processes. It said: {said}")
        clock.tell("resumed in two processes")
    seconds = time.monotonic() - clock.began
    print(f"{seconds:6.1f} s  in all, of the {GOAL} s that it may take")
    if seconds >= GOAL:
        raise SystemExit("The way of a stranger takes too long.")


def run(*command: str, cwd: Path) -> str:
    """What a command has printed. Its errors are shown, and end this program."""
    ended = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, timeout=3 * GOAL, check=True)
    return ended.stdout


def first_program() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def kill_after_a_checkpoint(python: Path, folder: Path) -> None:
    """As the loss of a machine: no handler runs."""
    process = subprocess.Popen([str(python), "own.py"], cwd=folder)
    while not (folder / "checkpoint").exists():
        if process.poll() is not None:
            raise SystemExit(f"The script ended before it was killed, with status {process.returncode}.")
        time.sleep(0.01)
    time.sleep(0.2)
    if process.poll() is not None:
        raise SystemExit("The script had ended before it was killed.")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()

"""A rank of a run that ends in one of several ways. No torch, unless the way needs collectives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0")
way, folder = sys.argv[1], Path(sys.argv[2])


def say(text: str, stream: int = 1) -> None:
    """In one piece: the ranks share a file."""
    os.write(stream, f"{text}\n".encode())


def stay() -> None:
    """Until the launcher ends it."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(1)
    os._exit(77)


def fails() -> None:
    (folder / f"moment-{rank}").write_text(str(time.time()))


def collective() -> None:
    import torch

    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if way == "collective-all-raise":
        fails()
        raise ValueError(f"all of us, rank {rank}")
    if rank == 1 and way != "collective":
        fails()
        if way == "collective-raises":
            raise ValueError("only I")
        if way == "collective-halts":
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(3)
    say(str(accelerator.gather(torch.ones(1)).sum().item()))


def resuming() -> None:
    """Four steps, each of which is saved. Rank 1 is killed after the second, in the first attempt."""
    import torch

    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    saved = sorted(folder.glob("step-*"))
    if saved:
        accelerator.load_state(saved[-1])
    for step in range(len(saved), 4):
        accelerator.backward(-model(torch.ones(1, 1)).mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(folder / f"step-{step}")
        accelerator.wait_for_everyone()
        if rank == 1 and step == 1 and not saved:
            os.kill(os.getpid(), signal.SIGKILL)
    say(f"began at {len(saved)}, ended with {accelerator.unwrap_model(model).weight.item():g}")


def loading() -> None:
    """Saves and ends when told to, by the signal after "loads-", in a loop that workers of a DataLoader feed."""
    from torch.utils.data import DataLoader

    from accel_core import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10**6), num_workers=2))
    accelerator.stop_on_signal(way.removeprefix("loads-"))
    for number, _ in enumerate(loader):
        if number == 0:
            (folder / f"pid-{rank}").write_text(str(os.getpid()))
        if accelerator.should_stop():
            time.sleep(0.5)
            accelerator.save_state(folder / "saved")
            return


def preempted() -> None:
    """The ranks of two machines stop together when one machine is told to; some need longer."""
    stop = folder.parent / f"stop-{os.environ['MASTER_PORT']}"
    signal.signal(signal.SIGTERM, lambda *_: stop.touch())
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    end = time.monotonic() + 60
    while not stop.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(float(os.environ.get("TAKES", "0")))


if way.startswith("loads-"):
    loading()
if way == "preempted":
    preempted()
if way in {"raises", "exits", "is-killed"} and rank == 1:
    fails()
if way == "reports":
    # What `torch.distributed.elastic`'s record does, and beside that when exactly, and whether another rank is to blame.
    more = {"py_callstack": "Traceback", "timestamp": str(int(time.time())), "time": time.time(), "follows": rank == 1}
    message = {"message": f"ValueError: of rank {rank}", "extraInfo": more}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))
    time.sleep(0.5 if rank == 0 else 0)
    sys.exit(1)
if way == "resumes":
    resuming()
if way == "raises" and rank == 1:
    raise ValueError("only I")
if way == "exits" and rank == 1:
    os._exit(3)
if way == "is-killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if way == "once" and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "deaf":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"child-{rank}").write_text(str(child.pid))
    stay()
if way == "saves":

    def save(number: int, _: object) -> None:
        time.sleep(0.3)
        (folder / f"saved-{rank}").write_text(signal.Signals(number).name)
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    stay()
if way == "told":

    def told(number: int, _: object) -> None:
        with (folder / f"told-{rank}").open("a") as file:
            file.write(f"{signal.Signals(number).name}\n")
        if number == signal.SIGTERM:
            sys.exit(0)

    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, told)
    stay()
if way.startswith("children"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"child-{rank}").write_text(str(child.pid))
    if way == "children-needed":  # to save, as a loader's workers are

        def end_child(*_: object) -> None:
            time.sleep(0.3)
            (folder / f"saved-{rank}").write_text(str(child.poll()))
            child.kill()
            child.wait()
            sys.exit(0)

        signal.signal(signal.SIGTERM, end_child)
    stay()
if way.startswith("collective"):
    collective()
if way in {"raises", "exits", "is-killed", "stays"}:
    stay()
if way == "finishes":
    say(f"rank {rank} of {os.environ.get('WORLD_SIZE')}, {os.environ.get('OMP_NUM_THREADS')} threads")
    say(f"errors of rank {rank}", 2)
(folder / f"finished-{rank}").write_text(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))

"""A small run that saves and loads, and processes that are killed on the way."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from accel_checkpoint import checkpoints
from accel_core import Accelerator, ProjectConfiguration

assert checkpoints  # what a save needs is imported once, before the first fork

OPERATIONS = ("open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "ftruncate")
"""The functions of `os` by which a save changes the disk."""

SOON = 40.0
"""Seconds within which every process has to end that cannot go on. The Watch needs about five on an idle machine, and a rank
whose training has ended waits up to 15 for the files of the others."""


class Counter:
    """What a user registers."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Training:
    """A run of a few numbers, whose every step depends on all that a checkpoint holds."""

    def __init__(self, width=8, project=None, **options):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, project_config=project, **options)
        layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 2))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(layers, optimizer, scheduler)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, times=1):
        for _ in range(times):
            loss = (self.model(torch.randn(3, 4)) ** 2).sum()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.value += 1

    def fingerprint(self):
        """The number of steps, and a hash of everything that follows from them."""
        digest = hashlib.sha256()
        moments = [each for state in self.optimizer.state_dict()["state"].values() for each in state.values()]
        for tensor in (*self.model.state_dict().values(), *moments, torch.get_rng_state()):
            digest.update(tensor.numpy().tobytes())
        return self.counter.value, self.scheduler.last_epoch, self.optimizer.param_groups[0]["lr"], digest.hexdigest()


def fingerprint_after(steps, **options):
    """What a run is after some steps that nothing interrupted."""
    training = Training(**options)
    training.step(steps)
    return training.fingerprint()


def automatic(folder, limit=1):
    return ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=limit)


def names_in(folder):
    return sorted(os.listdir(folder))


def assert_clean(folder):
    """A folder that holds one checkpoint and nothing that a save left."""
    manifest, data = sorted(names_in(folder), reverse=True)
    assert manifest == "manifest.json", names_in(folder)
    assert not [name for name in names_in(folder / data) if not name.endswith(("index.json", ".safetensors"))]


def error_of(action):
    """What an action raises, as text that names the type."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# Processes that are killed


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    seconds: float
    output: str
    value: object


def arm(number):
    """From now on this process is killed at its operation on the disk with this number; of a write, half of it happens."""
    left = itertools.count(number, -1)
    for name in OPERATIONS:
        setattr(os, name, _mortal(getattr(os, name), left))


def _mortal(operation, left):
    def call(*args, **kwargs):
        if next(left) == 0:
            if operation.__name__ == "write":
                operation(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args, **kwargs)

    return call


def forked(function, world_size, *args):
    """Runs a function in forks of this process, one per rank, as a launcher would start them: `torch` is imported already.

    This process has made no World, and no thread. Returns how each rank ended; one that runs on after `SOON` seconds is
    killed, and its code says so.
    """
    return forked_together([(function, *args)], world_size)[0]


def forked_together(jobs, world_size):
    """Several launches at once, of functions with their arguments: most of the time they wait. How the ranks of each ended."""
    assert threading.active_count() == 1
    folder = tempfile.mkdtemp()  # of which the children know no finalizer
    with contextlib.ExitStack() as ports:
        start = time.monotonic()
        files = [[Path(folder, f"{number}-{rank}") for rank in range(world_size)] for number in range(len(jobs))]
        children = [_launch(job, own, _port(ports)) for job, own in zip(jobs, files, strict=True)]
        ends = iter(_reap([child for launch in children for child in launch], start))
        found = [[_ended(*next(ends), file) for file in own] for own in files]
    shutil.rmtree(folder)
    return found


def _port(stack):
    """A port that is kept from others until the stack closes."""
    holder = stack.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1]


def _launch(job, files, port):
    return [_fork(job, rank, len(files), port, file) for rank, file in enumerate(files)]


def value_of(function, *args):
    """What a function returns in a process of its own."""
    (ended,) = forked(function, 1, *args)
    assert ended.code == 0, ended.output
    return ended.value


def _fork(job, rank, world_size, port, file):
    child = os.fork()
    if child:
        return child
    code, (function, *args) = 1, job
    try:
        output = os.open(f"{file}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        Path(f"{file}.value").write_bytes(pickle.dumps(function(*args)))
        code = 0
    except BaseException as error:
        traceback.print_exc()
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    # The end of a script, but for what would wait here for threads that a fork does not have.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _reap(children, start):
    """The exit code of each, and the seconds that it took."""
    ends, limit = {}, SOON
    while len(ends) < len(children):
        if time.monotonic() > start + limit:
            for child in children:
                if child not in ends:
                    os.kill(child, signal.SIGKILL)
            limit = float("inf")
        for child in children:
            if child not in ends:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    ends[child] = os.waitstatus_to_exitcode(status), time.monotonic() - start
        time.sleep(0.005)
    return [ends[child] for child in children]


def _ended(code, seconds, file):
    output, value = Path(f"{file}.output"), Path(f"{file}.value")
    text = output.read_text(errors="replace") if output.exists() else ""
    with contextlib.suppress(FileNotFoundError):
        return Ended(code, seconds, text, pickle.loads(value.read_bytes()))
    return Ended(code, seconds, text, None)

"""The leak police: what a test, or a call, must leave as it was.

    with no_leaks(rng=True):
        Accelerator().prepare(model)

    assert_dies(lambda: Accelerator())
    assert not live_objects(Accelerator)

As a fixture of all tests, in conftest.py:

    @pytest.fixture(autouse=True)
    def leak_police():
        with no_leaks():
            yield
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_OF_PYTEST = {"PYTEST_CURRENT_TEST"}
_OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}  # set when torch's compiler is first imported
# pytest-timeout takes its alarm away as soon as a test has failed; torch's loader keeps its watch over workers for ever.
_SIGNAL_USERS = {"pytest_timeout", "torch.utils.data._utils.signal_handling"}
_OF_MULTIPROCESSING = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")


@contextmanager
def no_leaks(*, rng: bool = False, grace: float = 1.0) -> Iterator[None]:
    """Fails if the body changes the state of the process, unless it raises.

    Watched: environment variables, signal handlers, the root logger, the default dtype, gradient
    mode and determinism of torch, the working directory, torch's default process group, living
    threads and child processes (but the server of `run_ranks`), which have `grace` seconds to end.
    `rng`: the states of the random generators of Python, torch, and NumPy if it is imported, too.
    AssertionError names each thing, what it was and what it is.
    """
    before, running = settings_of_process(rng), running_now()
    yield
    problems = [f"{name} was {old} and is {new}" for name, old, new in changes(before, settings_of_process(rng))]
    problems += [f"{item} is still running" for item in left_running(running, grace)]
    if problems:
        raise AssertionError("The body was to leave the process as it was, but it left traces:\n" + "\n".join(problems))


def live_objects(kind: type[T]) -> list[T]:
    """The living instances of `kind`, after a collection of garbage."""
    gc.collect()
    # `isinstance` would ask each object for its `__class__`, at which lazy and deprecated ones wake up.
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)]


def assert_dies(factory: Callable[[], object]) -> None:
    """Fails if the object that `factory` makes outlives its last reference, and shows who holds it.

    Reference cycles are no leak: garbage is collected before the check.
    """
    reference = weakref.ref(factory())
    gc.collect()
    survivor = reference()
    if survivor is not None:
        gc.unfreeze()  # what a run of tests keeps from the collector may hold it
        holders = [f"{type(holder).__qualname__}: {repr(holder)[:200]}" for holder in gc.get_referrers(survivor)]
        raise AssertionError(
            f"{survivor!r} was to die with its last reference, but it is held by:\n" + "\n".join(holders)
        )


def settings_of_process(rng: bool) -> dict[str, Any]:
    """The settings of the process that are compared, by their names in messages."""
    settings: dict[str, Any] = {
        f"os.environ[{name!r}]": value for name, value in os.environ.items() if name not in (_OF_PYTEST | _OF_TORCH)
    }
    settings |= {f"the handler of {number.name}": _handler(number) for number in signal.Signals}
    settings |= {
        "the level of the root logger": logging.root.level,
        "the list of handlers of the root logger": list(logging.root.handlers),
        "logging.disable": logging.root.manager.disable,
        "the default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "the use of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the working directory": Path.cwd(),
        "torch's default process group": dist.group.WORLD if dist.is_initialized() else None,
    }
    if rng:
        settings |= {"the state of random": random.getstate(), "the state of torch's generator": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, *rest = numpy.random.get_state()
            settings["the state of numpy.random"] = (name, keys.tolist(), *rest)
    return settings


def _handler(number: signal.Signals) -> object:
    """The handler of a signal, unless others are known to change it."""
    handler = signal.getsignal(number)
    return signal.SIG_DFL if getattr(handler, "__module__", None) in _SIGNAL_USERS else handler


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The settings that differ: name, and what it was and is, as texts."""
    for name in {**before, **after}:
        if not _same(before.get(name), after.get(name)):
            old, new = (f"{each[name]!r:.200}" if name in each else "absent" for each in (before, after))
            yield name, old, new


def _same(before: object, now: object) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return torch.equal(before, now)
    return bool(before == now)


def left_running(before: set[str], grace: float) -> list[str]:
    """The threads and child processes that have come since, and do not end within so many seconds."""
    deadline = time.monotonic() + grace
    while (left := running_now() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(left)


def running_now() -> set[str]:
    """Threads and child processes, by a text that identifies each."""
    threads = {f"thread {thread.name!r} ({thread.ident})" for thread in threading.enumerate()}
    return threads | {f"child process {pid}: {command}" for pid, command in _children()}


def _read(task: Path) -> str:
    try:
        return task.read_text()
    except OSError:
        return ""  # a thread that has ended since


def _children() -> Iterator[tuple[int, str]]:
    """The child processes of this one as the kernel lists them; none where it does not."""
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in _read(task).split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue  # it has ended since
            if not any(name in command for name in _OF_MULTIPROCESSING):
                yield (
                    int(pid),
                    command.replace(b"\0", b" ").decode(errors="replace").strip() or "(ended, not waited for)",
                )

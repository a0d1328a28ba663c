"""The leak police sees what it claims to see, says what it was and what it is, and lets the innocent pass."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_testing import assert_dies, live_objects, no_leaks


def change_environment() -> Callable[[], object]:
    os.environ["LEAKED"] = "1"
    return lambda: os.environ.pop("LEAKED")


def change_directory() -> Callable[[], object]:
    before = Path.cwd()
    os.chdir("/")
    return lambda: os.chdir(before)


def change_dtype() -> Callable[[], object]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def change_signal() -> Callable[[], object]:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR2, before)


def change_log_level() -> Callable[[], object]:
    before = logging.root.level
    logging.root.setLevel(logging.CRITICAL)
    return lambda: logging.root.setLevel(before)


def add_log_handler() -> Callable[[], object]:
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    return lambda: logging.root.removeHandler(handler)


def switch_gradients_off() -> Callable[[], object]:
    torch.set_grad_enabled(False)
    return lambda: torch.set_grad_enabled(True)


def start_group() -> Callable[[], object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.destroy_process_group


def start_thread() -> Callable[[], object]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="worker")
    thread.start()
    return lambda: (stop.set(), thread.join())


def start_process() -> Callable[[], object]:
    process = subprocess.Popen(["sleep", "60"])
    return lambda: (process.kill(), process.wait())


@pytest.mark.parametrize(
    ("leak", "trace"),
    [
        (change_environment, r"os.environ\['LEAKED'\] was absent and is '1'"),
        (change_directory, "the working directory was PosixPath"),
        (change_dtype, "the default dtype was torch.float32 and is torch.float64"),
        (change_signal, "the handler of SIGUSR2 was <Handlers.SIG_DFL: 0> and is <Handlers.SIG_IGN: 1>"),
        (change_log_level, "the level of the root logger was .* and is 50"),
        (add_log_handler, "the list of handlers of the root logger was"),
        (switch_gradients_off, "grad mode was True and is False"),
        (start_group, "torch's default process group was None and is <torch"),
        (start_thread, "thread 'worker' .* is still running"),
        (start_process, "child process .* sleep 60 is still running"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_traces_are_found_and_named(leak: Callable[[], Callable[[], object]], trace: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)left traces:\n.*{trace}"), no_leaks(grace=0.05):
        undo = leak()
    undo()


def test_variable_that_is_removed_is_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "x")
    with pytest.raises(AssertionError, match=r"os.environ\['MINE'\] was 'x' and is absent"), no_leaks():
        del os.environ["MINE"]


@pytest.mark.parametrize(("draw", "whose"), [(random.random, "random"), (lambda: torch.rand(1), "torch's generator")])
def test_random_states_are_watched_where_asked(draw: Callable[[], object], whose: str) -> None:
    with no_leaks():
        draw()
    with pytest.raises(AssertionError, match=f"the state of {whose} was"), no_leaks(rng=True):
        draw()


def test_what_is_restored_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_leaks(rng=True), torch.no_grad(), monkeypatch.context() as patch:
        patch.setenv("MINE", "x")


def test_threads_that_are_about_to_end_are_no_trace() -> None:
    with no_leaks():
        threading.Thread(target=time.sleep, args=(0.1,)).start()


def test_error_of_the_body_is_not_hidden_by_its_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINE", raising=False)
    with pytest.raises(KeyError), no_leaks():
        monkeypatch.setenv("MINE", "x")
        raise KeyError


class Thing:
    held: list[Thing] = []


def test_object_without_references_dies_even_in_a_cycle() -> None:
    def cycle() -> Thing:
        thing = Thing()
        thing.myself = thing  # type: ignore[attr-defined]
        return thing

    assert_dies(cycle)
    assert live_objects(Thing) == []


def test_object_that_is_held_is_shown_with_its_holder() -> None:
    def held() -> Thing:
        Thing.held.append(Thing())
        return Thing.held[0]

    with pytest.raises(AssertionError, match=r"Thing object .* was to die .* held by:\n.*list: \["):
        assert_dies(held)
    assert len(live_objects(Thing)) == 1
    Thing.held.clear()

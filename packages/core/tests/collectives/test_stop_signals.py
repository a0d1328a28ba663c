"""Being told to stop: a signal on one rank is known to all at the same step, and the process is left as it was."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from accel_core.collectives.objects import broadcast_object
from accel_core.collectives.reduce_gather import gather
from accel_core.collectives.stop_signals import Preemption
from accel_core.processes.world import World
from accel_testing import assert_dies, run_ranks

LIMIT = 90


@pytest.fixture
def alone():
    return World.current(cpu=True)


@pytest.fixture
def handlers():
    """Puts back the handlers that a test changes on purpose."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


# One process


def test_alone_a_signal_is_noted_and_stays_so(alone):
    preemption = Preemption(alone)
    preemption.watch()
    assert (preemption.received, preemption.check()) == (None, False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (preemption.received, preemption.check(), preemption.check()) == ("SIGTERM", True, True)
    preemption.close()
    assert (preemption.received, preemption.check()) == ("SIGTERM", True)


@pytest.mark.parametrize("given", ["SIGUSR2", signal.SIGUSR2, int(signal.SIGUSR2)], ids=repr)
def test_a_signal_is_named_in_any_way(alone, given):
    preemption = Preemption(alone)
    preemption.watch(given)
    signal.raise_signal(signal.SIGUSR2)
    assert preemption.received == "SIGUSR2"


def test_several_signals_can_be_watched_and_the_first_one_is_named(alone):
    preemption = Preemption(alone)
    preemption.watch("SIGUSR1", "SIGUSR2")
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    assert preemption.received == "SIGUSR2"


def test_other_signals_are_left_alone(alone):
    before = {number: signal.getsignal(number) for number in signal.Signals}
    preemption = Preemption(alone)
    preemption.watch()
    after = {number: signal.getsignal(number) for number in signal.Signals}
    preemption.close()
    assert [number.name for number in before if before[number] != after[number]] == ["SIGTERM"]


def test_the_first_arrival_is_noted_and_one_after_the_grace_does_what_it_did_before(alone, handlers):
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append("theirs"))
    preemption = Preemption(alone, grace=0)
    preemption.watch("SIGUSR2")
    signal.raise_signal(signal.SIGUSR2)
    assert (preemption.received, seen) == ("SIGUSR2", [])
    preemption.watch("SIGUSR2")  # is watched already, and has arrived
    signal.raise_signal(signal.SIGUSR2)
    assert seen == ["theirs"]


def test_arrivals_within_the_grace_count_as_the_first(alone, handlers):
    """A scheduler that signals every process of a job tells a rank twice: itself, and by way of the launcher."""
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append("theirs"))
    preemption = Preemption(alone)
    preemption.watch("SIGUSR2")
    for _ in range(3):
        signal.raise_signal(signal.SIGUSR2)
    assert (preemption.received, seen) == ("SIGUSR2", [])
    preemption.close()
    signal.raise_signal(signal.SIGUSR2)
    assert seen == ["theirs"]


def test_the_grace_begins_at_the_first_arrival_and_lasts_as_long_as_it_says(alone, handlers):
    ends = []
    signal.signal(signal.SIGUSR2, lambda *_: ends.append(time.monotonic()))
    preemption = Preemption(alone, grace=0.2)
    preemption.watch("SIGUSR2")
    start = time.monotonic()
    while not ends and time.monotonic() < start + LIMIT:
        signal.raise_signal(signal.SIGUSR2)
    assert ends[0] - start >= 0.2


def test_each_signal_has_a_grace_of_its_own(alone, handlers):
    preemption = Preemption(alone)
    preemption.watch("SIGUSR1", "SIGUSR2")
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)  # would end this process
    assert preemption.received == "SIGUSR1"


def test_a_handler_in_front_of_ours_is_called_once_for_each_arrival(alone, handlers):
    """As libraries do it that note a signal and hand it on."""
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append("behind"))
    preemption = Preemption(alone, grace=0)
    preemption.watch("SIGUSR2")
    ours = signal.getsignal(signal.SIGUSR2)

    def in_front(number, frame):
        seen.append("in front")
        ours(number, frame)

    signal.signal(signal.SIGUSR2, in_front)
    signal.raise_signal(signal.SIGUSR2)
    assert (preemption.received, seen) == ("SIGUSR2", ["in front"])
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert seen == ["in front", *["in front", "behind"] * 2]


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL], ids=str)
def test_what_was_done_before_may_be_nothing(alone, handlers, before):
    """By default SIGCONT does nothing. Whoever is in front of ours stays there."""
    seen = []
    former = signal.signal(signal.SIGCONT, before)
    preemption = Preemption(alone, grace=0)
    preemption.watch("SIGCONT")
    ours = signal.getsignal(signal.SIGCONT)
    signal.signal(signal.SIGCONT, lambda number, frame: (seen.append("in front"), ours(number, frame)))
    for _ in range(3):
        signal.raise_signal(signal.SIGCONT)
    signal.signal(signal.SIGCONT, former)
    assert (preemption.received, seen) == ("SIGCONT", ["in front"] * 3)


def test_closing_puts_back_what_was_there(alone, handlers):
    before = {number: signal.getsignal(number) for number in signal.Signals}
    preemption = Preemption(alone)
    preemption.watch("SIGTERM", "SIGUSR1")
    preemption.close()
    preemption.close()
    assert {number: signal.getsignal(number) for number in signal.Signals} == before
    preemption.watch("SIGUSR1")  # may begin again
    signal.raise_signal(signal.SIGUSR1)
    assert preemption.received == "SIGUSR1"


def test_closing_leaves_a_handler_that_replaced_ours(alone, handlers):
    preemption = Preemption(alone)
    preemption.watch("SIGUSR2")
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    preemption.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


def watching(world, **options):
    preemption = Preemption(world, **options)
    preemption.watch("SIGUSR2")
    return preemption


def test_the_last_reference_takes_everything_along(alone, handlers):
    assert_dies(lambda: watching(alone))
    assert signal.getsignal(signal.SIGUSR2) == handlers[signal.SIGUSR2]


def test_one_that_dies_in_another_thread_leaves_a_handler_that_does_what_was_done_before(alone, handlers):
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append("theirs"))
    owners = [watching(alone)]
    thread = threading.Thread(target=owners.clear)
    thread.start()
    thread.join()
    gc.collect()
    signal.raise_signal(signal.SIGUSR2)
    assert seen == ["theirs"]


def test_all_that_watch_a_signal_are_told_and_a_later_arrival_is_for_those_before(alone, handlers):
    """Two Accelerators live in one process."""
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append("theirs"))
    first, second = watching(alone, grace=0), watching(alone, grace=0)
    signal.raise_signal(signal.SIGUSR2)
    assert (first.received, second.received, seen) == ("SIGUSR2", "SIGUSR2", [])
    signal.raise_signal(signal.SIGUSR2)
    assert seen == ["theirs"]


@pytest.mark.parametrize("graces", [(0, 3600), (3600, 0)], ids=str)
def test_what_one_of_them_counts_as_its_first_is_kept_from_those_before(alone, handlers, graces):
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append("theirs"))
    first = watching(alone, grace=graces[0])
    signal.raise_signal(signal.SIGUSR2)
    second = watching(alone, grace=graces[1])
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert (first.received, second.received, seen) == ("SIGUSR2", "SIGUSR2", [])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_they_may_close_in_any_order(alone, handlers, order):
    both = [watching(alone), watching(alone)]
    both[order[0]].close()
    signal.raise_signal(signal.SIGUSR2)
    assert [each.received for each in both] == [None if i == order[0] else "SIGUSR2" for i in range(2)]
    both[order[1]].close()
    assert signal.getsignal(signal.SIGUSR2) == handlers[signal.SIGUSR2]


def test_none_is_watched_beside_one_that_does_not_exist(alone):
    for given, kind in (("TERM", KeyError), (1000, ValueError), (-1, ValueError)):
        with pytest.raises(kind, match=str(given)):
            Preemption(alone).watch("SIGUSR2", given)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_outside_of_the_main_thread_watching_is_refused(alone):
    caught = []

    def watch():
        try:
            Preemption(alone).watch()
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=watch, name="trainer")
    thread.start()
    thread.join()
    assert "signal only works in main thread" in caught[0]


# Real endings

AGAIN_AND_AGAIN = """
import os, signal
from accel_core.collectives.stop_signals import Preemption
from accel_core.processes.world import World

preemption = Preemption(World.current(cpu=True), grace=0.2)
preemption.watch()
os.kill(os.getpid(), signal.SIGTERM)
print(preemption.received, preemption.check(), flush=True)
while True:
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_after_the_grace_ends_the_process():
    command = [sys.executable, "-c", AGAIN_AND_AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "SIGTERM True\n", "")


TORCHRUN = """
import os, signal
from accel_core.collectives.stop_signals import Preemption
from accel_core.processes.world import World

reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)  # gets a byte per arrival
interrupted = signal.getsignal(signal.SIGINT)
preemption = Preemption(World.current(cpu=True), grace=3600)
preemption.watch()
assert signal.getsignal(signal.SIGINT) is interrupted
step = 0
while not preemption.check():
    if step == 3:
        os.write(1, f"\\n{os.getpid()} is running\\n".encode())
    step += 1
os.write(1, b"\\nsaving\\n")
arrived = b""
while len(arrived) < 2:
    arrived += os.read(reader, 9)
os.write(1, f"\\nsaved at {step}, told by {preemption.received}\\n".encode())
"""


def test_ranks_that_a_scheduler_and_torchrun_tell_to_stop_end_at_the_same_step_and_can_save(tmp_path):
    """Slurm's scancel and systemd signal every process of a job, and torchrun passes on what it is sent."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TORCHRUN))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        try:
            lines = (
                line for line in launcher.stdout if re.match(r"\d+ is running|saving", line)
            )  # gloo of torch 2.9 prints too
            ranks = [int(next(lines).split()[0]) for _ in range(2)]
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
            assert [next(lines) for _ in range(2)] == ["saving\n"] * 2
            launcher.send_signal(signal.SIGTERM)
            output, errors = launcher.communicate(timeout=LIMIT)
        finally:
            launcher.kill()
    first, second = re.findall("saved at .*", output)
    assert first == second, errors
    assert first.startswith("saved at ")
    assert first.endswith(", told by SIGTERM")


# Ranks


def step_of_each(told, step):
    """At which step this rank sees that `told` was told at `step`, what it received itself, and what a check costs then."""
    world = World.current(cpu=True)
    preemption = Preemption(world)
    if world.rank == told:  # the other one watches nothing
        preemption.watch()
    channel, calls = world.channel(), []
    exchange = channel.exchange
    channel.exchange = lambda *arguments: calls.append(1) or exchange(*arguments)
    for now in range(10):
        if (world.rank, now) == (told, step):
            os.kill(os.getpid(), signal.SIGTERM)
        if preemption.check():
            break
    before = len(calls)
    again = [preemption.check() for _ in range(3)]
    del channel.exchange
    return now, preemption.received, again, (before, len(calls) - before)


def mismatched():
    world = World.current(cpu=True)
    try:
        Preemption(world).check() if world.rank == 0 else gather(torch.tensor(1), world)
    except RuntimeError as error:
        return str(error)
    return "fine"


def signalled_in_a_collective(folder):
    """Rank 1 signals rank 0 once that one waits in a collective for it."""
    world = World.current(cpu=True)
    preemption = Preemption(world)
    preemption.watch()
    pid = broadcast_object(os.getpid(), world)
    entering = Path(folder, "entering")
    if world.rank == 0:
        entering.touch()
    else:
        while not (entering.exists() and asleep(pid)):
            pass
        os.kill(pid, signal.SIGTERM)
    values = gather(torch.tensor([world.rank]), world).tolist()
    return values, preemption.received, preemption.check()


def asleep(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def child_that_is_terminated():
    """How a forked child ends that inherits the handler, as a worker of a pool does, and what its parent has noted."""
    preemption = Preemption(World.current(cpu=True))
    preemption.watch()
    context = multiprocessing.get_context("fork")
    ready, report = context.Pipe(duplex=False)
    # In short naps: a signal that comes just before a long one would be noticed behind it.
    child = context.Process(target=lambda: (report.send("ready"), [time.sleep(0.01) for _ in range(6000)]))
    child.start()
    ready.recv()
    child.terminate()
    child.join()
    return child.exitcode, preemption.received


def on_two_ranks(folder):
    return (
        step_of_each(0, 4),
        step_of_each(1, 0),
        mismatched(),
        signalled_in_a_collective(folder),
        child_that_is_terminated(),
    )


def test_ranks(tmp_path):
    first, second = run_ranks(on_two_ranks, 2, str(tmp_path))
    told_first, told_second, said, interrupted, child = zip(first, second, strict=True)
    assert told_first == ((4, "SIGTERM", [True] * 3, (5, 0)), (4, None, [True] * 3, (5, 0)))
    assert told_second == ((0, None, [True] * 3, (1, 0)), (0, "SIGTERM", [True] * 3, (1, 0)))
    assert said[0] == said[1]
    assert "rank 0: should_stop" in said[0]
    assert interrupted == (([0, 1], "SIGTERM", True), ([0, 1], None, True))
    assert child == ((-signal.SIGTERM, None),) * 2

"""The end of a run, however the program comes to it: what was logged is recorded, the run is closed once, and what failed is told."""

from __future__ import annotations

import gc
import os  # noqa: F401
import signal  # noqa: F401
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trackers_for_tests import Listing, Wrong  # noqa: F401  (the scripts import everything of this module)

from accel_core import Accelerator, TrackingKwargs
from accel_testing import RanksFailed, run_ranks

TESTS = [str(Path(__file__).parent), str(Path(__file__).parents[4] / "tests" / "strategies")]


def begun(*trackers: Any, rules: TrackingKwargs | None = None) -> Accelerator:
    """A run with one record."""
    accelerator = Accelerator(cpu=True, log_with=list(trackers), kwargs_handlers=None if rules is None else [rules])
    accelerator.init_trackers("project")
    accelerator.log({"first": 1})
    return accelerator


def output_of(script: str, *, code: int = 0) -> tuple[str, str]:
    """What a program prints, and what it says beside that."""
    lines = f"import sys; sys.path[:0] = {TESTS!r}\nfrom test_recording_ends import *\n{script}"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


class Slow(Listing):
    """Takes a second to finish."""

    def finish(self, failed: bool) -> None:
        time.sleep(1.0)
        super().finish(failed)


class Saying(Listing):
    """Prints that it is finished."""

    def finish(self, failed: bool) -> None:
        print(f"{self.name} finished, failed: {failed}", flush=True)


# --- records that come late --------------------------------------------------------------------------------------------------


class TakesLong(dict[str, Any]):
    """Values that are being read while the run ends."""

    def __init__(self, reading: threading.Event, go_on: threading.Event) -> None:
        super().__init__(load=1)
        self.reading, self.go_on = reading, go_on

    def items(self) -> Any:
        self.reading.set()
        self.go_on.wait(20)
        return super().items()


def join(thread: threading.Thread, go_on: threading.Event) -> None:
    go_on.set()
    thread.join()


def test_what_another_thread_is_about_to_log_when_the_run_ends_is_left_out_with_a_word() -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    reading, go_on = threading.Event(), threading.Event()
    late = threading.Thread(target=lambda: accelerator.log(TakesLong(reading, go_on)))
    late.start()
    reading.wait(20)
    accelerator.end_training()
    with pytest.warns(RuntimeWarning, match="'listing' leaves out what is logged while the run ends, or later"):
        join(late, go_on)
    assert [call[0] for call in tracker.calls] == ["start", "log", "finish"]


@pytest.mark.full
def test_a_thread_that_goes_on_to_log_does_not_hold_up_the_exit() -> None:
    """Nor has it the tracker switched off, as what it logs is not done before the end."""
    began = time.monotonic()
    printed, said = output_of("""
accelerator = begun(Slow("slow"), Saying("quick"), rules=TrackingKwargs(finish_timeout=60))
def log_the_load():
    while True:
        accelerator.log({"load": 1})
        time.sleep(0.05)
threading.Thread(target=log_the_load, daemon=True).start()
time.sleep(0.3)
""")
    assert time.monotonic() - began < 45
    assert printed == "quick finished, failed: False\n"
    assert "switched off" not in said
    assert "leaves out what is logged while the run ends, or later" in said


@pytest.mark.full
def test_what_is_logged_at_the_exit_after_the_run_was_closed_is_left_out_with_a_word() -> None:
    printed, said = output_of("""
import atexit
tracker = Listing()
atexit.register(lambda: (accelerator.log({"last": 1}), print([call[0] for call in tracker.calls])))
accelerator = begun(tracker)
""")
    assert printed == "['start', 'log', 'finish']\n"
    assert "The tracker 'listing' leaves out what is logged while the run ends, or later" in said


# --- programs that do not call `end_training` ---------------------------------------------------------------------------------


class VerySlow(Listing):
    """Needs longer than ranks wait for each other at the end."""

    ended = 0.0

    def finish(self, failed: bool) -> None:
        time.sleep(8.0)
        self.ended = time.time()


def end_together(says_so: bool) -> float:
    global kept
    tracker = VerySlow()
    kept = accelerator = begun(tracker)
    if not says_so:
        return 0.0
    accelerator.end_training()
    return tracker.ended if accelerator.is_main_process else time.time()


@pytest.mark.parametrize("says_so", [True, pytest.param(False, marks=pytest.mark.full)])
def test_other_ranks_do_not_wait_for_the_trackers_of_the_main_process(
    says_so: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_ranks(end_together, 2, says_so)
    assert not says_so or second < first
    assert "ends without the others" not in capsys.readouterr().out


def leave_the_others() -> None:
    global kept
    kept = accelerator = begun(Saying())
    if accelerator.process_index == 1:
        accelerator.wait_for_everyone()  # which the other does not


def test_a_run_is_closed_although_the_ranks_do_not_end_alike() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(leave_the_others, 2)
    output = caught.value.reports[0].output
    assert "listing finished, failed: True" in output
    assert "WorldError: The training of rank 0 ended, but that of the others did not" in output


@pytest.mark.parametrize("collected", [pytest.param(False, marks=pytest.mark.full), True])
def test_what_fails_after_the_accelerator_went_out_of_scope_is_told(collected: bool) -> None:
    _, said = output_of(f"""
def boom():
    time.sleep(0.2)
    raise ConnectionError("the disk is full")
def main():
    begun(Wrong("finish", boom))
main()
if {collected}:
    time.sleep(0.5)
    gc.collect()
""")
    assert said.count("The tracker 'wrong' is switched off: finish() raised ConnectionError: the disk is full") == 1


def test_a_fork_that_collects_the_accelerator_closes_nothing_and_goes_on() -> None:
    printed, _ = output_of("""
accelerator = begun(Saying(), Listing("other"))
if (child := os.fork()) == 0:
    del accelerator
    gc.collect()
    os.write(1, b"child\\n")
    os._exit(0)
os.waitpid(child, 0)
accelerator.end_training()
""")
    assert printed == "child\nlisting finished, failed: False\n"


def test_sigterm_at_the_end_neither_keeps_the_run_from_being_closed_nor_is_ignored_by_children() -> None:
    printed, _ = output_of("""
class Terminated(Saying):
    def finish(self, failed):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        code = "import signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)"
        subprocess.run([sys.executable, "-c", code], check=True)
        super().finish(failed)
accelerator = begun(Terminated())
""")
    assert printed == "True\nlisting finished, failed: False\n"


# --- how it ended ------------------------------------------------------------------------------------------------------------


def exits(code: object) -> Callable[[], None]:
    def leave() -> None:
        sys.exit(code)  # type: ignore[arg-type]

    return leave


def breaks() -> None:
    raise ValueError("the end")


def is_interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "act, failed",
    [
        (exits(None), False),
        (exits(0), False),
        (exits(3), True),
        (exits("no data"), True),
        (exits([1]), True),
        (breaks, True),
        (is_interrupted, True),
    ],
    ids=["exit", "exit 0", "exit 3", "exit with a message", "exit with an object", "raises", "is interrupted"],
)
def test_in_a_finally_the_run_has_failed_if_the_program_has(act: Callable[[], None], failed: bool) -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    with pytest.raises((SystemExit, ValueError, KeyboardInterrupt)):
        try:
            act()
        finally:
            accelerator.end_training()
    assert tracker.calls[-1] == ("finish", failed)


def test_the_end_of_a_generator_is_no_failure() -> None:
    tracker = Listing()

    def steps() -> Iterator[int]:
        accelerator = begun(tracker)
        try:
            yield from range(3)
        finally:
            accelerator.end_training()

    for _ in steps():
        break
    gc.collect()
    assert tracker.calls[-1] == ("finish", False)


@pytest.mark.parametrize("failed", [False, True])
def test_the_script_can_say_whether_the_run_failed(failed: bool) -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    try:
        raise StopIteration  # of early stopping, say
    except StopIteration:
        accelerator.end_training(failed=failed)
    assert tracker.calls[-1] == ("finish", failed)


def test_explain_says_that_the_run_has_ended() -> None:
    accelerator = begun(Listing())
    accelerator.end_training()
    assert "has recorded the run 20" in str(accelerator.explain())

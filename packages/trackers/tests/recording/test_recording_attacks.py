"""What trackers, and programs that use them strangely, may try: none of it costs the run anything, and nothing is lost."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trackers_for_tests import Listing, Older, Wrong, begun, opened_at_the_end, said

from accel_core import Accelerator, Histogram, TrackerError, TrackingKwargs
from accel_testing import run_ranks
from accel_trackers.recording.record import Record
from accel_trackers.recording.recorder import Recorder

TOYS = str(Path(__file__).parents[4] / "tests" / "strategies")
"""Where scripts find `trackers_for_tests`."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    with opened_at_the_end() as event:
        yield event


def ready_to_save(*trackers: Any, rules: TrackingKwargs | None = None) -> Accelerator:
    accelerator = begun(*trackers, rules=rules)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


def fail() -> None:
    raise ConnectionError("the server is gone")


def alive(shape: torch.Size) -> int:
    """How many tensors of a shape this process holds. (The memory of a process says less: the allocator keeps what is freed.)"""
    return sum(type(each) is torch.Tensor and each.shape == shape for each in gc.get_objects())


# --- starting -------------------------------------------------------------------------------------------------------------


class Logs(Listing):
    """A service that says something while it starts, which the program forwards to its trackers."""

    accelerator: Accelerator

    def start(self, run: Any) -> None:
        self.accelerator.log({"connecting": 1})
        super().start(run)


def test_what_is_logged_while_a_tracker_starts_comes_after_that_and_blocks_nobody() -> None:
    tracker = Logs()
    accelerator = tracker.accelerator = begun(tracker, rules=TrackingKwargs(start_timeout=20))
    began = time.monotonic()
    accelerator.log({"loss": 1})
    assert time.monotonic() - began < 10
    accelerator.end_training()
    assert sorted(tracker.logged(), key=str) == [({"connecting": 1}, 0), ({"loss": 1}, 1)]
    assert tracker.calls[-1] == ("finish", False)


def test_a_signal_handler_that_logs_while_the_run_begins_starts_it_once() -> None:
    class Interrupting(Listing):
        was_asked = False

        @property
        def requires_logging_directory(self) -> bool:
            self.was_asked, was_asked = True, self.was_asked
            if not was_asked:
                signal.raise_signal(signal.SIGALRM)
            return False

    tracker = Interrupting()
    accelerator = begun(tracker)
    before = signal.signal(signal.SIGALRM, lambda *_: accelerator.log({"alarm": 1}))
    try:
        accelerator.log({"loss": 1})
    finally:
        signal.signal(signal.SIGALRM, before)
    accelerator.end_training()
    assert [call[0] for call in tracker.calls] == ["start", "log", "log", "finish"]
    assert tracker.logged() == [({"alarm": 1}, 0), ({"loss": 1}, 1)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_run_begins_under_any_default_device(device: str) -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    with torch.device(device):
        accelerator.log({"loss": 1})
    accelerator.end_training()
    assert tracker.logged() == [({"loss": 1}, 0)]


def test_threads_that_log_first_at_the_same_time_start_the_run_once() -> None:
    tracker = Wrong("start", lambda: time.sleep(0.2))
    accelerator = begun(tracker)
    threads = [threading.Thread(target=accelerator.log, args=({"loss": number},)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    accelerator.end_training()
    assert [call[0] for call in tracker.calls] == ["start", *["log"] * 4, "finish"]


def test_threads_that_log_get_a_step_each() -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    accelerator.log({"loss": 0})
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [accelerator.log({"loss": 1}) for _ in range(2000)]) for _ in range(4)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    accelerator.end_training()
    assert sorted(step for _, step in tracker.logged()) == list(range(8001))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, also where whoever started the tests has it ignored, as shells do for what they put into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
@pytest.mark.usefixtures("interruptible")
def test_a_run_whose_start_was_interrupted_is_still_recorded_at_the_exit() -> None:
    script = f"""
import _thread, sys, threading, time
sys.path.insert(0, {TOYS!r})
from accel_core import Accelerator
from trackers_for_tests import Listing

class Slow(Listing):
    def start(self, run):
        super().start(run)
        time.sleep(1)
    def log(self, values, step, **options):
        time.sleep(0.1)
        print("log", flush=True)
    def finish(self, failed):
        print("finish", flush=True)

accelerator = Accelerator(cpu=True, log_with=Slow())
accelerator.init_trackers("project")
threading.Timer(0.3, _thread.interrupt_main).start()
try:
    accelerator.log({{"loss": 0}})
except KeyboardInterrupt:  # as a notebook does
    pass
for _ in range(5):
    accelerator.log({{"loss": 1}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [*["log"] * 5, "finish"]


@pytest.mark.filterwarnings("ignore:The tracker 'wrong' is switched off")
def test_a_tracker_that_never_started_is_not_resumed(tmp_path: Path) -> None:
    before = ready_to_save(Wrong("start", fail), Listing())
    before.log({"loss": 1})
    before.save_state(tmp_path / "c")
    before.end_training()
    tracker, other = Listing("wrong"), Listing()
    after = ready_to_save(tracker, other)
    after.load_state(tmp_path / "c")
    after.log({"loss": 1})
    after.end_training()
    assert other.runs[0].resumed is not None
    assert tracker.runs[0].resumed is None


def test_runs_that_begin_in_the_same_second_have_ids_of_their_own() -> None:
    from accel_core import World
    from accel_trackers.recording.trackers import new_id

    world = World.current(cpu=True)
    ids = [new_id(world) for _ in range(3000)]
    assert len(set(ids)) == len(ids)


# --- what is handed over --------------------------------------------------------------------------------------------------


def test_options_that_change_after_the_call_do_not_show(gate: threading.Event) -> None:
    tracker = Wrong("log", lambda: gate.wait(10))
    accelerator = begun(tracker)
    options = {"wrong": {"walltime": 0}}
    for number in range(3):
        options["wrong"]["walltime"] = number
        accelerator.log({"loss": number}, log_kwargs=options)
    gate.set()
    accelerator.end_training()
    assert [call[2]["walltime"] for call in tracker.logged()] == [0, 1, 2]


def test_options_of_the_start_that_change_later_do_not_show() -> None:
    tracker = Listing()
    options: dict[str, Any] = {"listing": {"group": "a"}}
    accelerator = begun(tracker, init_kwargs=options)
    options["listing"]["group"] = "b"
    accelerator.log({"loss": 1})
    accelerator.end_training()
    assert tracker.runs[0].options == {"group": "a"}


def test_lists_and_arrays_that_change_after_the_call_do_not_show(gate: threading.Event) -> None:
    numpy = pytest.importorskip("numpy")

    class Waiting(Older):
        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            gate.wait(10)
            super().log(values, step)

    tracker = Waiting()
    accelerator = begun(tracker)
    rows, array = [1, 2], numpy.zeros(2)
    accelerator.log({"rows": rows, "array": array})
    rows.append(3)
    array[:] = 7
    gate.set()
    accelerator.end_training()
    values = tracker.seen[0][1]
    assert (values["rows"], list(values["array"])) == ([1, 2], [0, 0])


def test_what_one_tracker_does_to_its_configuration_no_other_sees() -> None:
    class Spoiling(Listing):
        def start(self, run: Any) -> None:
            super().start(run)
            run.config["nested"]["lr"] = "spoilt"

    class Late(Listing):
        def start(self, run: Any) -> None:
            time.sleep(0.2)
            super().start(run)

    late = Late("late")
    accelerator = begun(Spoiling("spoiling"), late, config={"nested": {"lr": 1}})
    accelerator.end_training()
    assert late.runs[0].config == {"nested": {"lr": 1}}


@pytest.mark.filterwarnings("ignore:The tracker 'wrong' is switched off")
def test_histograms_that_wait_for_a_tracker_take_no_memory_without_end(gate: threading.Event) -> None:
    rules = TrackingKwargs(most_pending=1_000, finish_timeout=0.1)
    accelerator = begun(Wrong("log", lambda: gate.wait(20)), rules=rules)
    accelerator.log({"loss": 0})
    weights = torch.ones(1_000_003)  # counts as a hundred records
    for _ in range(8):
        accelerator.log({"weights": Histogram(weights)})
    assert alive(weights.shape) == 1 + 8
    for _ in range(8):
        accelerator.log({"weights": Histogram(weights)})
    assert alive(weights.shape) == 1
    assert "switched off: it is 1000 records behind" in str(accelerator.explain())
    accelerator.end_training()


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise LookupError("the store is closed")


class NoArray:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("it is on another machine")


@pytest.mark.parametrize(
    "record, reason",
    [
        (lambda a: a.log(Unreadable(loss=1)), "LookupError: the store is closed"),
        (lambda a: a.log_images({"x": NoArray()}), "it is on another machine"),
        (lambda a: a.log_images({"x": torch.zeros(3, 4, 4, device="meta")}), "meta"),
    ],
    ids=["values", "array", "meta"],
)
def test_values_that_cannot_be_read_cost_the_record_and_not_the_run(
    record: Callable[[Accelerator], None], reason: str
) -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    with pytest.warns(RuntimeWarning, match=f"A record of .* is left out: .*{reason}"):
        record(accelerator)
    accelerator.log({"loss": 1})
    accelerator.end_training()
    assert ({"loss": 1}, 0) in tracker.logged()


def test_save_state_waits_for_all_trackers_together_and_says_who_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    slow = [Wrong("log", lambda: go_on.wait(0.05)) for _ in range(3)]
    for number, tracker in enumerate(slow):
        tracker.name = f"slow{number}"
    accelerator = ready_to_save(*slow, rules=TrackingKwargs(stall_timeout=1.0))
    for step in range(400):  # each of them would need 20 s
        accelerator.log({"step": step})
    waits: list[float] = []
    wait = Recorder.wait
    monkeypatch.setattr(Recorder, "wait", lambda recorder, timeout: (waits.append(timeout), wait(recorder, timeout))[1])
    with pytest.warns(RuntimeWarning) as said:
        accelerator.save_state(tmp_path / "checkpoint")
    monkeypatch.undo()
    go_on.set()
    accelerator.end_training()
    assert len(waits) >= 3
    assert sum(waits) < 2.0
    texts = [str(each.message) for each in said]
    assert (
        "The tracker 'slow0' has not recorded all that was logged before save_state(), which waits 1 s at most"
        in texts[0]
    )
    assert [step for _, step in slow[-1].logged()] == list(range(400))


def test_a_call_that_takes_long_is_waited_for_once_however_often_the_state_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    tracker = Wrong("log", lambda: gate.wait(20))
    accelerator = ready_to_save(tracker, rules=TrackingKwargs(stall_timeout=1.0))
    accelerator.log({"step": 0})
    waits: list[float] = []
    wait = Recorder.wait
    monkeypatch.setattr(Recorder, "wait", lambda recorder, timeout: (waits.append(timeout), wait(recorder, timeout))[1])

    def work() -> None:
        for number in range(3):
            accelerator.save_state(tmp_path / f"checkpoint{number}")
        assert accelerator.get_tracker("wrong", unwrap=True) is tracker.calls

    text = said(work)
    monkeypatch.undo()
    assert sum(waits) < 1.5
    assert text.count("a run that resumes from it may miss, or repeat, some") == 3
    assert text.count("is busy: log() has taken more than 1 s") == 1
    gate.set()
    accelerator.end_training()
    assert tracker.logged() == [({"step": 0}, 0)]


def test_options_for_trackers_that_are_not_chosen_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = begun(Listing())
    accelerator.log({"loss": 0}, log_kwargs={"wandb": {"commit": False}})
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: pytest.fail("looked for what is installed"))
    for step in range(3):
        accelerator.log({"loss": step}, log_kwargs={"wandb": {"commit": False}})
    monkeypatch.undo()
    accelerator.end_training()


def test_what_stands_for_a_tracker_can_be_measured_and_printed() -> None:
    accelerator = begun(Wrong("start", fail))
    with pytest.warns(RuntimeWarning, match="switched off"):
        blank = accelerator.get_tracker("wrong", unwrap=True)
    assert (len(blank.items), isinstance(f"{blank.loss}", str)) == (0, True)
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore:The tracker 'wrong' is switched off")
def test_what_waited_for_a_tracker_is_freed_when_it_is_switched_off(gate: threading.Event) -> None:
    rules = TrackingKwargs(most_pending=2, finish_timeout=0.1)
    accelerator = begun(Wrong("log", lambda: gate.wait(20)), rules=rules)
    accelerator.log({"loss": 0})

    class Own:
        """An object of a service, say."""

    own = Own()
    reference = weakref.ref(own)
    accelerator.log({"own": own})
    del own
    accelerator.log({"loss": 1})  # which is one too many
    assert "switched off" in str(accelerator.explain())
    gc.collect()
    assert reference() is None
    accelerator.end_training()


# --- failures -------------------------------------------------------------------------------------------------------------


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail_without_words() -> None:
    raise Speechless


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_that_cannot_be_printed_is_reported_like_others() -> None:
    accelerator = begun(Wrong("start", fail_without_words), rules=TrackingKwargs(start_timeout=3))
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"switched off: start\(\) raised Speechless"):
        accelerator.log({"loss": 1})
    assert time.monotonic() - began < 2
    accelerator.end_training()


class StartsInPart(Listing):
    """Fails to start, when the service has opened the run, or before."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    @property
    def tracker(self) -> Any:
        if self.run is AttributeError:
            raise AttributeError("start() comes first")
        return self.run

    def start(self, run: Any) -> None:
        fail()


@pytest.mark.parametrize("run, calls", [(object(), [("finish", True)]), (None, []), (AttributeError, [])])
def test_a_run_whose_start_fails_is_closed_if_the_service_has_opened_it(run: Any, calls: list[Any]) -> None:
    tracker = StartsInPart(run)
    accelerator = begun(tracker)
    with pytest.warns(RuntimeWarning) as warned:
        accelerator.end_training()
    (warning,) = warned
    assert "start() raised ConnectionError: the server is gone" in str(warning.message)
    assert tracker.calls == calls


@pytest.mark.filterwarnings("ignore:The tracker 'closing' is switched off")
def test_a_tracker_that_raised_is_closed_before_the_end() -> None:
    closed = []

    class Closing(Listing):
        def log(self, values: Any, step: int, **options: Any) -> None:
            fail()

        def finish(self, failed: bool) -> None:
            time.sleep(0.5)  # as services do that write what they have gathered
            closed.append(failed)

    accelerator = begun(Closing("closing"))
    accelerator.log({"loss": 1})
    accelerator.end_training()
    found = list(closed)
    time.sleep(0.7)
    assert found == [True]


def test_a_device_that_takes_long_is_not_the_fault_of_the_tracker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joined = Record.joined

    def late(record: Record) -> Any:
        time.sleep(0.6)  # as where a collective in the stream waits for another rank
        return joined(record)

    monkeypatch.setattr(Record, "joined", late)
    tracker = Listing()
    accelerator = begun(tracker, rules=TrackingKwargs(stall_timeout=0.3))
    for number in range(3):
        accelerator.log({"loss": number})
        time.sleep(0.4)
    accelerator.end_training()
    assert len(tracker.logged()) == 3
    assert not caplog.messages  # where a warning goes that tests make an error


@pytest.mark.filterwarnings("ignore:The tracker 'blocked")
def test_several_trackers_that_block_share_one_timeout(gate: threading.Event) -> None:
    class Blocked(Listing):
        def finish(self, failed: bool) -> None:
            gate.wait(20)

    accelerator = begun(*(Blocked(f"blocked{number}") for number in range(5)), rules=TrackingKwargs(finish_timeout=1))
    accelerator.log({"loss": 1})
    began = time.monotonic()
    accelerator.end_training()
    assert time.monotonic() - began < 3


def test_strict_mode_closes_the_other_trackers_when_one_does_not_start() -> None:
    other = Listing()
    accelerator = begun(Wrong("start", fail), other, rules=TrackingKwargs(strict=True))
    with pytest.raises(TrackerError, match="start"):
        accelerator.end_training()
    assert other.calls[-1][0] == "finish"


def test_a_tracker_may_log_and_ask_for_itself_without_end(gate: threading.Event) -> None:
    held: list[Accelerator] = []

    class Recursive(Listing):
        def log(self, values: Any, step: int, **options: Any) -> None:
            super().log(values, step, **options)
            if len(self.calls) < 50:
                held[0].log({"again": step})

    tracker = Recursive()
    accelerator = begun(tracker)
    held.append(accelerator)
    accelerator.log({"loss": 1})
    deadline = time.monotonic() + 10
    while len(tracker.calls) < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    accelerator.end_training()
    assert len(tracker.calls) == 51
    held.clear()


def test_a_dropped_accelerator_leaves_nothing_behind() -> None:
    tracker = Listing()
    reference = weakref.ref(tracker)
    accelerator = begun(tracker)
    accelerator.log({"loss": 1})
    del accelerator, tracker
    deadline = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert reference() is None


def test_one_object_records_one_run() -> None:
    tracker = Listing()
    first = begun(tracker)
    first.log({"loss": 1})
    second = begun(tracker)
    with pytest.warns(
        RuntimeWarning, match="this object records another run; give each Accelerator a tracker of its own"
    ):
        second.log({"loss": 2})
    second.end_training()
    first.end_training()
    assert [call[0] for call in tracker.calls] == ["start", "log", "finish"]


# --- processes ------------------------------------------------------------------------------------------------------------


FORKED = """
import os, sys, time
sys.path.insert(0, {tests!r})
from accel_core import Accelerator
from trackers_for_tests import Listing

class Shown(Listing):
    def finish(self, failed):
        print("finish", flush=True)

accelerator = Accelerator(cpu=True, log_with=Shown())
accelerator.init_trackers("project")
accelerator.log({{"loss": 0}})
child = os.fork()
if child == 0:
    {act}
    sys.exit(7)
assert os.waitpid(child, 0)[1] >> 8 == 7
accelerator.log({{"loss": 1}})
accelerator.end_training()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "act",
    [
        pytest.param("pass", id="just ends"),
        pytest.param(
            "accelerator.end_training()",
            id="ends the training",
        ),
        pytest.param(
            "accelerator.get_tracker('listing')",
            id="asks for a tracker",
        ),
    ],
)
def test_a_forked_process_neither_hangs_nor_records(act: str) -> None:
    script = FORKED.format(tests=TOYS, act=act)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        raise
    assert process.returncode == 0
    assert out.split() == [b"finish"]


def saves_with_trackers_on_the_main_process_alone(folder: str) -> str:
    rank = int(os.environ["RANK"])
    tracker = Listing()
    accelerator = Accelerator(cpu=True, log_with=tracker if rank == 0 else None)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1})
    try:
        accelerator.save_state(folder)
    finally:
        accelerator.end_training()
    return "saved"


def test_ranks_without_log_with_take_part_in_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(saves_with_trackers_on_the_main_process_alone, 2, str(tmp_path / "c")) == ["saved", "saved"]


FAILING_RANK = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
from accel_core import Accelerator
from trackers_for_tests import Listing

class Slow(Listing):
    def finish(self, failed):
        time.sleep(3)
        print("closed", failed, flush=True)

accelerator = Accelerator(cpu=True, log_with=Slow())
accelerator.init_trackers("project")
accelerator.log({{"loss": 1}})
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    raise ValueError("the training failed")
for _ in range(1000):
    accelerator.reduce(torch.ones(1))
    time.sleep(0.01)
"""


@pytest.mark.full
def test_the_failure_of_the_main_process_is_recorded_under_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING_RANK.format(tests=TOYS))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode != 0
    assert "closed True" in done.stdout, done.stderr[-2000:]

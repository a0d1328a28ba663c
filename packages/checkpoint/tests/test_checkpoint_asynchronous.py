"""Saving while training goes on: what reaches the file, who waits for whom, and where a failure is heard of."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sharded_strategies import Rows
from torch import nn

from accel_checkpoint import background
from accel_checkpoint.background import Background
from accel_checkpoint.host_copies import Staging
from accel_core import Accelerator, CheckpointError, ProjectConfiguration
from accel_core.api.component import capture_random_state, restore_random_state
from accel_testing import RanksFailed, assert_dies, live_objects, run_ranks

MODES = ("eager", "lazy")


@pytest.fixture(autouse=True)
def own_streams():
    before = capture_random_state(None)
    yield
    restore_random_state(before, None)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Run:
    """A model that trains on what it draws."""

    def __init__(self, width=4, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        self.layers = Net(width)
        optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.layers, optimizer)
        self.width = width

    def step(self):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(torch.randn(3, self.width)).pow(2).mean())
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weight(self):
        return self.layers.first.weight.detach().clone()


def content(folder):
    """The tensors of a checkpoint, by file and key."""
    files = Path(folder).glob("data-*/*.safetensors")
    return {(file.name, key): tensor for file in files for key, tensor in load_file(file).items()}


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def is_complete(folder):
    return (Path(folder) / "manifest.json").exists()


@contextmanager
def no_file_larger_than(nbytes):
    """What a full disk is to one process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def interruptible():
    """A shell may have this process ignore SIGINT: one does that it started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def held_threads(seconds=0.0, saved=None):
    """Threads that start in the block go on when the event is set that this gives: at its end, or some seconds after it began or `saved`."""
    go_on = threading.Event()

    def release():
        if saved is None or saved.wait(30):
            go_on.wait(seconds)
            go_on.set()

    releasing = threading.Thread(target=release)
    if seconds:
        releasing.start()
    threading.setprofile(lambda *_: go_on.wait(30))
    try:
        yield go_on
    finally:
        threading.setprofile(None)
        go_on.set()
        if saved is not None:
            saved.set()
        if seconds:
            releasing.join()


def saves_the_present(folder, strategy=None, **options):
    """Whatever is done after `save_state` returned, the file holds what was there when it was called."""
    torch.manual_seed(0)
    run = Run(strategy=strategy and strategy(), **options)
    for _ in range(3):
        run.step()
    accelerator = run.accelerator
    for mode in MODES:
        accelerator.save_state(f"{folder}/now")
        accelerator.save_state(f"{folder}/{mode}", asynchronous=mode)
        for _ in range(2):
            run.step()
        run.layers.eval()
        run.model(torch.randn(3, 4))
        run.layers.train()
        if mode == "eager":
            nn.init.zeros_(run.layers.first.weight)
            run.optimizer.state.clear()
        accelerator.wait_for_checkpoint()
        if accelerator.is_main_process:
            assert is_same(content(f"{folder}/{mode}"), content(f"{folder}/now")), mode
    accelerator.load_state(f"{folder}/lazy")
    accelerator.end_training()
    return len(content(f"{folder}/lazy"))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
def test_what_changes_afterwards_does_not_reach_the_file(options, tmp_path):
    assert saves_the_present(tmp_path, **options)


@pytest.mark.parametrize(("strategy", "options"), [(None, {"gradient_accumulation_steps": 2}), (Rows, {})])
def test_nor_does_it_on_two_ranks(strategy, options, tmp_path):
    run_ranks(saves_the_present, 2, str(tmp_path), strategy, **options)


@pytest.mark.parametrize("first", [0, 1])
def test_the_next_step_of_any_prepared_optimizer_waits_for_the_copies(first, tmp_path):
    accelerator = Accelerator(cpu=True)
    layers = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    model, *optimizers = accelerator.prepare(layers, *(torch.optim.SGD(each.parameters(), 0.1) for each in layers))

    def step(number):
        accelerator.backward(model[number](torch.ones(1, 2)).sum())
        optimizers[number].step()
        optimizers[number].zero_grad()

    step(0)
    step(1)
    before = [each.weight.detach().clone() for each in layers]
    saved = threading.Event()
    with held_threads(0.3, saved) as go_on:
        accelerator.save_state(tmp_path / "a", asynchronous="lazy")
        assert not go_on.is_set()
        saved.set()
        step(first)
        assert go_on.is_set()
    step(1 - first)
    accelerator.wait_for_checkpoint()
    found = content(tmp_path / "a")
    for number in (0, 1):
        assert torch.equal(found["rank-00000.safetensors", f"model.0/{number}.weight"], before[number])
        assert not torch.equal(layers[number].weight, before[number])


def test_the_next_step_does_not_wait_for_an_eager_save(tmp_path):
    run = Run()
    with held_threads() as go_on:
        run.accelerator.save_state(tmp_path / "a", asynchronous="eager")
        weight = run.weight()
        run.step()
        assert not go_on.is_set()
    run.accelerator.wait_for_checkpoint()
    assert torch.equal(content(tmp_path / "a")["rank-00000.safetensors", "model.0/first.weight"], weight)


def test_a_change_that_nobody_held_back_makes_the_save_fail(tmp_path):
    """By the step of an optimizer that is not prepared."""
    run = Run()
    run.accelerator.save_state(tmp_path / "a")
    weight = run.weight()
    stranger = torch.optim.SGD([run.layers.first.weight], lr=1.0)
    run.layers.first.weight.grad = torch.ones(4, 4)
    with held_threads():
        run.accelerator.save_state(tmp_path / "a", asynchronous="lazy")
        stranger.step()
    message = r"1 tensors were changed while .*'lazy'.*: model\.0/first\.weight\. Change them after wait_for_checkpoint"
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.wait_for_checkpoint()
    run.accelerator.wait_for_checkpoint()
    run.accelerator.load_state(tmp_path / "a")
    assert torch.equal(run.weight(), weight), "the one before is untouched"


@pytest.mark.parametrize("waits", ["wait_for_checkpoint", "load_state", "save_state", "end_training"])
@pytest.mark.parametrize("mode", MODES)
def test_whatever_needs_the_save_waits_for_it(waits, mode, tmp_path):
    run = Run()
    run.step()
    with held_threads(0.2):
        folder = run.accelerator.save_state(tmp_path / "a", asynchronous=mode)
        assert not is_complete(folder)
        arguments = {"load_state": [folder], "save_state": [tmp_path / "b"]}
        getattr(run.accelerator, waits)(*arguments.get(waits, ()))
        assert is_complete(folder)


def interrupt_until(caught):
    """Ctrl-C, and again if it was lost: Python prints what is raised in a finalizer, and goes on."""
    while not caught.wait(1.0):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_a_wait_that_was_interrupted_can_be_repeated(tmp_path):
    """By Ctrl-C in a notebook: the thread goes on, and its memory is not given to the next save."""
    run = Run()
    caught = threading.Event()
    interrupt = threading.Thread(target=interrupt_until, args=[caught])
    with held_threads(), interruptible():
        run.accelerator.save_state(tmp_path / "a", asynchronous=True)
        threading.setprofile(None)
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            try:
                run.accelerator.wait_for_checkpoint()
            finally:
                caught.set()
        interrupt.join()
        assert not is_complete(tmp_path / "a")
    run.accelerator.save_state(tmp_path / "b", asynchronous=True)
    assert is_complete(tmp_path / "a")
    run.accelerator.wait_for_checkpoint()
    assert is_same(content(tmp_path / "a"), content(tmp_path / "b"))


class Live:
    """Its state is what it computes with, not a copy."""

    def __init__(self):
        self.values, self.names = torch.ones(3), ["a"]

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.parametrize("mode", MODES)
def test_the_live_state_of_registered_objects_is_copied_at_once(mode, tmp_path):
    live = Live()
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(live)
    with held_threads():
        accelerator.save_state(tmp_path / "a", asynchronous=mode)
        live.values.zero_()
        live.names.append("b")
    accelerator.load_state(tmp_path / "a")
    assert (live.values.tolist(), live.names) == ([1, 1, 1], ["a"])


class Quantised(torch.Tensor):
    """Says nothing of what it is made of."""


@pytest.mark.parametrize("mode", [False, *MODES])
def test_what_is_no_plain_tensor_is_refused_in_every_mode(mode, tmp_path):
    model = nn.Linear(2, 1)
    model.weight = nn.Parameter(torch.ones(1, 2).as_subclass(Quantised))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    with pytest.raises(
        CheckpointError, match=r"plain, dense tensors with their data, but 'model\.0/weight' is a Quantised"
    ):
        accelerator.save_state(tmp_path / "a", asynchronous=mode)
        accelerator.wait_for_checkpoint()  # alone, a lazy save finds it out behind
    assert not list((tmp_path / "a").iterdir())


def test_tensors_of_inference_mode_have_no_version_and_are_copied_at_once(tmp_path):
    with torch.inference_mode():
        model = nn.Linear(2, 1)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.save_state(tmp_path / "a", asynchronous="lazy")
    accelerator.wait_for_checkpoint()
    assert torch.equal(content(tmp_path / "a")["rank-00000.safetensors", "model.0/weight"], model.weight)


class Fused(torch.optim.SGD):
    """Updates during the backward, as LOMO does."""

    def fused_backward(self, loss, lr):
        loss.backward()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=lr)
                    parameter.grad = None


def test_an_optimizer_that_updates_during_the_backward_cannot_be_saved_lazily(tmp_path):
    accelerator = Accelerator(cpu=True)
    layers = nn.Linear(2, 1)
    model, _ = accelerator.prepare(layers, Fused(layers.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"updates parameters during the backward.*Use asynchronous='eager'"):
        accelerator.save_state(tmp_path / "a", asynchronous="lazy")
    assert not (tmp_path / "a").exists()
    before = layers.weight.detach().clone()
    accelerator.save_state(tmp_path / "a", asynchronous="eager")
    accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.1)
    accelerator.wait_for_checkpoint()
    assert torch.equal(content(tmp_path / "a")["rank-00000.safetensors", "model.0/weight"], before)


def test_many_saves_follow_each_other_and_memory_does_not_grow(tmp_path):
    def held():
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in {torch.Tensor, nn.Parameter}]
        tensors = [each for each in tensors if each.layout is torch.strided]
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())

    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    run = Run(64, project_config=config)
    sizes = []
    for number in range(20):
        run.step()
        run.accelerator.save_state(asynchronous=MODES[number % 2])
        if number in (2, 19):
            run.accelerator.wait_for_checkpoint()
            sizes.append(held())
    assert sizes[0] == sizes[1]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_18", "checkpoint_19"]
    assert [thread.name for thread in threading.enumerate() if "accel" in thread.name] == []
    other = Run(64, project_config=config)
    other.accelerator.load_state()
    assert torch.equal(other.weight(), run.weight())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heard", [True, False])
def test_nothing_outlives_the_accelerator(mode, heard, tmp_path):
    def saved():
        run = Run()
        run.step()
        with held_threads():
            run.accelerator.save_state(tmp_path / "a", asynchronous=mode)
            (thread,) = (each for each in threading.enumerate() if each.name == "accel checkpoint")
        if heard:
            run.accelerator.wait_for_checkpoint()
        thread.join()
        return run.layers

    assert_dies(saved)
    assert not live_objects(Background)
    assert not live_objects(Staging)
    assert is_complete(tmp_path / "a")


def test_staging_memory_is_used_again_and_holds_any_dtype():
    staging = Staging(0)
    dtypes = (torch.bool, torch.bfloat16, torch.complex128, torch.float8_e5m2, torch.int64)
    tensors = {str(dtype): torch.ones(3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "turned": torch.rand(3, 2).T}
    first = staging.room(tensors)
    for key, tensor in tensors.items():
        first[key].copy_(tensor)
    for key, tensor in tensors.items():
        assert (first[key].dtype, first[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(first[key].to(torch.complex128), tensor.to(torch.complex128)), "no two places overlap"
    again = staging.room(tensors)
    assert all(again[key].data_ptr() == first[key].data_ptr() for key in tensors)
    assert staging.room({"larger": torch.empty(10**6)})["larger"].shape == (10**6,)


class TestFailures:
    def test_they_are_raised_by_whatever_comes_next_and_once(self, tmp_path):
        run = Run(64)
        accelerator = run.accelerator
        accelerator.save_state(tmp_path / "a")
        weight = run.weight()
        for after in (
            accelerator.wait_for_checkpoint,
            lambda: accelerator.save_state(tmp_path / "b"),
            lambda: accelerator.load_state(tmp_path / "a"),
        ):
            for mode in MODES:
                run.step()
                with no_file_larger_than(4096):
                    accelerator.save_state(tmp_path / "a", asynchronous=mode)
                    with pytest.raises(OSError, match="File too large"):
                        after()
                accelerator.wait_for_checkpoint()
        assert not (tmp_path / "b").exists()
        assert len(list((tmp_path / "a").glob("data-*"))) == 1, "nothing of the failed ones is left"
        accelerator.load_state(tmp_path / "a")
        assert torch.equal(run.weight(), weight)

    def test_end_training_raises_them_at_its_end(self, tmp_path):
        run = Run(64)
        with no_file_larger_than(4096):
            run.accelerator.save_state(tmp_path / "a", asynchronous=True)
            with pytest.raises(OSError, match="File too large"):
                run.accelerator.end_training()
        run.accelerator.end_training()

    def test_of_an_accelerator_that_died_they_are_said_on_stderr(self, tmp_path, capfd):
        def saved():
            run = Run(64)
            run.accelerator.save_state(tmp_path / "a", asynchronous=True)

        with no_file_larger_than(4096):
            saved()
            for thread in threading.enumerate():
                if thread.name == "accel checkpoint":
                    thread.join()
        gc.collect()
        assert f"The checkpoint in {tmp_path / 'a'} was not saved: [Errno 27]" in capfd.readouterr().err


def failing_on_one_rank(folder):
    """A rank that cannot even write down that it cannot write."""
    run = Run(64)
    accelerator = run.accelerator
    accelerator.save_state(folder)
    weight = run.weight()
    for mode in MODES:
        for after in (accelerator.wait_for_checkpoint, lambda: accelerator.save_state(folder)):
            run.step()
            with no_file_larger_than(10 if accelerator.process_index == 1 else resource.RLIM_INFINITY):
                accelerator.save_state(folder, asynchronous=mode)
                with pytest.raises(OSError, match=r"File too large.*\(on rank 1\)"):
                    after()
    accelerator.load_state(folder)
    assert torch.equal(run.weight(), weight)
    accelerator.save_state(folder, asynchronous=True)
    accelerator.end_training()
    return [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name]


def without_memory_on_one_rank(folder):
    """A rank that cannot take its copies, while the other has begun to write."""
    run = Run(2048)
    accelerator = run.accelerator
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    if accelerator.process_index == 1:
        resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), before[1]))
    with pytest.raises(RuntimeError, match=r"(allocate memory|start new thread)[\s\S]*\(on rank 1\)"):
        accelerator.save_state(folder, asynchronous=True)
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert not is_complete(folder)
    accelerator.wait_for_checkpoint()
    accelerator.save_state(folder, asynchronous=True)
    accelerator.end_training()


@pytest.mark.parametrize("job", [failing_on_one_rank, without_memory_on_one_rank], ids=lambda job: job.__name__)
def test_the_failure_of_one_rank_is_raised_on_all(job, tmp_path):
    run_ranks(job, 2, str(tmp_path / "a"))
    assert is_complete(tmp_path / "a")


def waiting_for_a_rank_that_is_gone(folder):
    """It was killed before it had written its part, which nobody could tell from a slow one."""
    run = Run(256)
    run.accelerator.save_state(folder)
    weight = run.weight()
    run.step()
    with held_threads() as go_on:
        run.accelerator.save_state(folder, asynchronous=True)
        if run.accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        go_on.set()
        try:
            run.accelerator.wait_for_checkpoint()
        except RuntimeError:
            print("it was noticed", flush=True)
    assert len(list(Path(folder).glob("data-*"))) == 1
    (found,) = (tensor for (_, key), tensor in content(folder).items() if key == "model.0/first.weight")
    assert torch.equal(found, weight)


def test_waiting_for_a_rank_that_is_gone_ends(tmp_path):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(waiting_for_a_rank_that_is_gone, 2, str(tmp_path / "a"))
    first, second = caught.value.reports
    assert second.exit_code == -signal.SIGKILL
    assert "it was noticed" in first.output
    assert not first.traceback


def ending_while_another_is_stuck(folder):
    background.ORPHANED = 1.0
    run = Run()
    run.accelerator.save_state(folder)
    if run.accelerator.process_index == 1:
        go_on = threading.Event()
        threading.Timer(4.0, go_on.set).start()
        threading.setprofile(lambda *_: go_on.wait())
    run.accelerator.save_state(folder, asynchronous=True)


def ending_while_the_machine_stands_still(folder):
    """Longer than ranks wait for each other's files; the part of rank 1 is written right after that."""
    background.ORPHANED = 3.0
    run = Run()
    ranks = " ".join(map(str, run.accelerator.gather(torch.tensor([os.getpid()])).tolist()))
    if run.accelerator.process_index == 1:
        go_on = threading.Event()
        threading.Timer(2.0, go_on.set).start()
        threading.setprofile(lambda *_: go_on.wait())
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {ranks}; sleep 4; kill -CONT {ranks}"])
    run.accelerator.save_state(folder, asynchronous=True)


def ending(folder, mode, how):
    """A process that ends right after a save; the accelerator dies with the function, or with the process."""
    run = Run(256)
    run.step()
    if how == "fails":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    run.accelerator.save_state(folder, asynchronous=mode)
    if how == "lives on":
        sys.kept = run
    if how == "raises" and run.accelerator.process_index == 1:
        raise KeyError("only I")
    if how == "ends":
        run.accelerator.end_training()


class TestExits:
    @pytest.mark.parametrize(
        ("world_size", "how"), [(1, "dies"), (1, "lives on"), (2, "dies"), (2, "lives on"), (2, "ends")]
    )
    @pytest.mark.parametrize("mode", MODES)
    def test_a_process_that_ends_right_after_a_save_completes_it(self, world_size, how, mode, tmp_path, capsys):
        run_ranks(ending, world_size, str(tmp_path / "a"), mode, how)
        said = capsys.readouterr().out.splitlines()
        assert [line for line in said if not line.startswith("[Gloo] ")] == []  # as gloo of torch 2.9 begins its lines
        assert is_complete(tmp_path / "a")

    def test_a_process_does_not_wait_for_ever_for_one_that_is_stuck(self, tmp_path, capsys):
        run_ranks(ending_while_another_is_stuck, 2, str(tmp_path / "a"))
        found = capsys.readouterr().out
        assert (
            "The training ended, and the parts of ranks [1] were not written: for 1 s none of their files grew" in found
        )
        assert is_complete(tmp_path / "a"), "the one before"

    def test_a_machine_that_stands_still_while_processes_end_loses_no_save(self, tmp_path, capsys):
        run_ranks(ending_while_the_machine_stands_still, 2, str(tmp_path / "a"))
        assert "was not saved" not in capsys.readouterr().out
        assert is_complete(tmp_path / "a")

    def test_a_rank_that_raises_right_after_a_save_has_written_its_part(self, tmp_path):
        with pytest.raises(RanksFailed) as caught:
            run_ranks(ending, 2, str(tmp_path / "a"), "lazy", "raises")
        first, second = caught.value.reports
        assert first.state.startswith("returned")
        assert second.state == "raised: KeyError: 'only I'"
        assert is_complete(tmp_path / "a")

    def test_what_failed_and_nobody_asked_for_is_said_on_stderr(self, tmp_path, capsys):
        run_ranks(ending, 1, str(tmp_path / "a"), "eager", "fails")
        found = capsys.readouterr().out
        assert found.count(f"The checkpoint in {tmp_path / 'a'} was not saved: [Errno 27]") == 1
        assert not is_complete(tmp_path / "a")

"""Masters and optimizer state in memory-mapped files leave the process's memory, and go with it; in memory they are there once."""

from __future__ import annotations

import gc
import itertools
import resource
import signal

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_deepspeed.model_engine import live_engines
from accel_deepspeed.state_files import StateFiles
from accel_testing import run_ranks

WIDTH = 1024
MODEL = 4 * WIDTH * (WIDTH + 1)
"""Bytes of the model."""


def test_a_file_has_no_name_and_its_tensor_has_a_memory_of_its_own(tmp_path):
    files = StateFiles(tmp_path / "made")
    first, second = files.zeros(5, torch.float32), files.copy_of(torch.arange(3))
    assert first.add_(1).tolist() == [1, 1, 1, 1, 1]
    assert second.tolist() == [0, 1, 2]
    assert files.copy_of(second) is second
    assert files.zeros(0, torch.float32).numel() == 0
    assert not list((tmp_path / "made").iterdir())


@pytest.fixture
def small_files():
    """No file may have more than a MiB, as if the disk were full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_without_room_is_an_error_before_anything_is_written(tmp_path, small_files):
    with pytest.raises(OSError, match="too large"):
        StateFiles(tmp_path).zeros(1 << 20, torch.float32)
    assert not list(tmp_path.iterdir())


def held():
    """The bytes of all tensors of this process that are in no file, each memory once."""
    for _ in range(3):  # what autograd held of an earlier run
        gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values() if storage.filename is None)


def of_model(accelerator, model, optimizer):
    """The masters on this rank, and the moments."""
    (engine,) = live_engines()
    masters = [engine.master(each) for each in accelerator.unwrap_model(model).parameters()]
    return masters, [value for state in optimizer.state.values() for value in state.values() if value.dim()]


def are_in_files(tensors):
    return [each.untyped_storage().filename is not None for each in tensors]


def stepped(folder, chosen):
    """The bytes that a run holds after two steps, in models, and what is in files, also after a load."""
    before = held()
    options = {"offload_optimizer": chosen, "offload_folder": folder / "files" if chosen == "nvme" else None}
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1}}
    accelerator = Accelerator(strategy=DeepSpeed(config=config, **options), cpu=True)
    model = nn.Linear(WIDTH, WIDTH)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    tensors = of_model(accelerator, model, optimizer)
    size = (held() - before) * accelerator.num_processes / MODEL
    accelerator.save_state(folder / str(chosen))
    accelerator.load_state(folder / str(chosen))
    in_files = [are_in_files(each) for each in (*tensors, *of_model(accelerator, model, optimizer))]
    accelerator.end_training()
    return size, in_files


def all_stepped(folder):
    return [stepped(folder, chosen) for chosen in (None, "cpu", "nvme")]


@pytest.mark.parametrize("world", [1, 2])
def test_masters_are_the_parameters_or_in_files_with_the_moments(world, tmp_path):
    for in_memory, on_host, in_files in run_ranks(all_stepped, world, tmp_path, timeout=100):
        # Parameters, two moments and the gradients that are summed up; offloaded, gradients of the host as well.
        assert in_memory[0] == pytest.approx(4, abs=0.1)
        assert on_host[0] == pytest.approx(5, abs=0.1)
        assert in_files[0] == pytest.approx(3, abs=0.1)
        assert not any(itertools.chain(*in_memory[1], *on_host[1]))
        assert all(itertools.chain(*in_files[1]))
        assert [len(each) for each in in_files[1]] == [2, 4, 2, 4]

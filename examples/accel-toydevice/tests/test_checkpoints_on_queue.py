"""Checkpoints of what a device still computes: nothing torn, nothing early, and no wait of the host for each tensor."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_core import Accelerator, CheckpointError
from accel_testing import run_ranks

MODES = (False, "eager", "lazy")
LAYERS, WIDTH = 4, 32


class Run:
    """A model that trains on what it draws; some of its state is in buffers, and some of it on the CPU."""

    def __init__(self, norm=True):
        torch.manual_seed(0)
        self.accelerator = Accelerator()
        layers = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)] if norm else [nn.Linear(WIDTH, WIDTH)]
        self.layers = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.layers, optimizer)
        self.x = torch.randn(8, WIDTH, device=self.accelerator.device)

    def step(self):
        self.accelerator.backward(self.model(self.x).pow(2).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self):
        """What the device has, when it has done all that it was asked for."""
        torch.accelerator.synchronize()
        found = {f"model.0/{name}": value.cpu() for name, value in self.layers.state_dict().items()}
        for name, parameter in self.layers.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key} of {name}"] = value.cpu().clone()
        return found


def content(folder):
    """The tensors of a checkpoint, by key."""
    files = Path(folder).glob("data-*/*.safetensors")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@contextlib.contextmanager
def waits():
    """How often this thread waits for the device in the block, in a list."""
    found = []
    torch.toy.reset_waits()
    yield found
    found.append(torch.toy.waits(threading.get_native_id()))


def saves(folder, mode):
    """The waits of a second save and of the step behind it: the first one makes its memory."""
    run = Run()
    run.step()
    run.accelerator.save_state(f"{folder}/first", asynchronous=mode)
    run.accelerator.wait_for_checkpoint()
    run.step()
    with waits() as saving:
        run.accelerator.save_state(f"{folder}/second", asynchronous=mode)
    with waits() as stepping:
        run.step()
    run.accelerator.end_training()
    return saving[0], stepping[0]


@pytest.mark.parametrize(("mode", "most"), [(False, 1), ("eager", 1), ("lazy", 0)])
def test_the_host_waits_once_or_not_at_all(tmp_path, mode, most):
    ((saving, stepping),) = run_ranks(saves, 1, str(tmp_path), mode)
    assert sum(saving.values()) <= most, saving
    assert not stepping


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_file_has_what_was_computed_when_it_was_asked_for(tmp_path, mode, aside, norm):
    """The device is far behind when `save_state` is called, and what is changed afterwards does not reach the file."""
    run = Run(norm)
    torch.accelerator.synchronize()  # what it was made of is there for any stream
    with torch.Stream(run.accelerator.device) if aside else contextlib.nullcontext():
        run.step()
        torch.toy._sleep(0.3)
        run.step()
        run.accelerator.save_state(tmp_path / "now", asynchronous=mode)
        torch.toy._sleep(0.1)
        run.step()
        run.layers.train()
        run.model(run.x)
        run.accelerator.wait_for_checkpoint()
        later = run.tensors()
    run.accelerator.end_training()

    again = Run(norm)
    again.step()
    again.step()
    expected = again.tensors()
    found = content(tmp_path / "now")
    names = [name for name in expected if name.startswith("model.0/")]
    assert names
    assert is_same({name: found[name] for name in names}, {name: expected[name] for name in names})
    assert not is_same({name: later[name] for name in names}, {name: expected[name] for name in names})
    again.step()
    again.accelerator.load_state(tmp_path / "now")
    assert is_same(again.tensors(), expected)
    again.accelerator.end_training()


def test_a_lazy_save_returns_before_the_device_has_begun_and_so_does_the_next_step(tmp_path):
    run = Run()
    run.step()
    expected = run.tensors()
    run.accelerator.save_state(tmp_path / "first", asynchronous="lazy")  # it makes the memory that is used again
    run.accelerator.wait_for_checkpoint()
    with torch.toy.held():
        run.accelerator.save_state(tmp_path / "now", asynchronous="lazy")
        run.step()
    run.accelerator.wait_for_checkpoint()
    found = content(tmp_path / "now")
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name in found)
    assert not is_same(run.tensors(), expected)


def test_a_change_by_a_stranger_makes_a_lazy_save_fail(tmp_path):
    run = Run()
    run.step()
    with torch.toy.held():
        run.accelerator.save_state(tmp_path / "a", asynchronous="lazy")
        with torch.no_grad():
            run.layers[0].weight.zero_()
        run.step()
    with pytest.raises(CheckpointError, match=r"1 tensors were changed while .*'lazy'.*: model\.0/0\.weight\. "):
        run.accelerator.wait_for_checkpoint()
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_what_is_freed_while_it_is_copied_is_saved(tmp_path):
    run = Run()
    run.step()
    expected = run.tensors()
    torch.toy._sleep(0.3)
    run.accelerator.save_state(tmp_path / "a", asynchronous="lazy")
    accelerator = run.accelerator
    run.model, run.optimizer = accelerator.free_memory(run.model, run.optimizer)
    del run.layers
    others = [torch.full((WIDTH, WIDTH), 7.0, device=accelerator.device) for _ in range(8 * LAYERS)]
    accelerator.wait_for_checkpoint()
    assert all(other.eq(7.0).all().item() for other in others)
    found = content(tmp_path / "a")
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name in found)


def copies_on_two(folder):
    """Whether both ranks save lazily what they have, and load it again."""
    run = Run()
    run.step()
    torch.toy._sleep(0.2)
    expected = run.tensors()
    run.accelerator.save_state(folder, asynchronous="lazy")
    run.step()
    run.accelerator.wait_for_checkpoint()
    run.accelerator.load_state(folder)
    same = is_same(run.tensors(), expected)
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    return same


def test_two_ranks_save_lazily(tmp_path):
    assert run_ranks(copies_on_two, 2, str(tmp_path)) == [True, True]

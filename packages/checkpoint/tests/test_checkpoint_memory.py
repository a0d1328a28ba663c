"""Saving and loading need buffers beside what is trained, and never a copy of the state."""

from __future__ import annotations

import pytest
import torch
from sharded_strategies import Flat, Rows
from torch import nn

from accel_core import DDP, Accelerator, hookimpl
from accel_testing import run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED, extra_memory

WIDTH, LAYERS = 2048, 6
WEIGHT = 4 * WIDTH * WIDTH  # bytes
LIMIT = 4 * WEIGHT  # a rank has at least nine of them, and up to eighteen; gaps in the heap look like some


class CutInRows(Rows):
    """Leaves out to gather what was loaded, which is the strategy's and takes what it takes."""

    @hookimpl
    def model_loaded(self, model):
        pass


class CutFlat(Flat):
    @hookimpl
    def model_loaded(self, model):
        pass


STRATEGIES = {strategy.__name__: strategy for strategy in (DDP, CutInRows, CutFlat)}


def accelerator_of(strategy, width):
    """Under it are a model, and an Adam that keeps twice as much."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    accelerator = Accelerator(strategy=STRATEGIES[strategy](), cpu=True)
    called, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=False))
    accelerator.backward(called(torch.ones(1, width)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator


def saving(folder, strategy):
    small = accelerator_of(strategy, 8)
    small.save_state(folder / "small")  # imports
    accelerator = accelerator_of(strategy, WIDTH)
    return extra_memory(lambda: accelerator.save_state(folder / strategy))


def loading(folder, strategy):
    small = accelerator_of(strategy, 8)
    small.load_state(folder / "small")
    accelerator = accelerator_of(strategy, WIDTH)
    return {
        source: extra_memory(lambda source=source: accelerator.load_state(folder / source)) for source in STRATEGIES
    }


measured = pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="the kernel does not measure peaks")


@measured
@pytest.mark.full
def test_saving_and_loading_need_buffers_only(tmp_path):
    """Whatever strategy saved it: boxes are read into their places."""
    saved = {strategy: run_ranks(saving, 2, tmp_path, strategy) for strategy in STRATEGIES}
    loaded = {strategy: run_ranks(loading, 2, tmp_path, strategy) for strategy in STRATEGIES}
    assert all(found <= LIMIT for ranks in saved.values() for found in ranks), saved
    assert all(found <= LIMIT for ranks in loaded.values() for rank in ranks for found in rank.values()), loaded


def copying():
    weights = [torch.ones(WIDTH, WIDTH) for _ in range(6)]
    return extra_memory(lambda: [weight.clone() for weight in weights])


@measured
def test_a_copy_would_be_seen():
    (found,) = run_ranks(copying, 1)
    assert LIMIT < 6 * WEIGHT <= found <= 6 * WEIGHT + (8 << 20)

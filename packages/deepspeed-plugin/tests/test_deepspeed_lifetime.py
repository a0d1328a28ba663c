"""What an engine takes, it gives back: a process may train, and end, any number of times."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_deepspeed.model_engine import ModelEngine
from accel_testing import live_objects, run_ranks

WIDTH, TIMES, SETTLED = 512, 20, 5
BOUND = 4 << 20
"""Bytes by which the memory of a process may grow in 15 trainings. One of the models has 2 MiB, and its optimizer twice as much."""
_MMAP_THRESHOLD = -3


def train(stage):
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.get_state_dict(model)
    accelerator.end_training()


def again_and_again(stage):
    if sys.platform == "linux":  # else memory is kept in a heap with holes, and what is in use cannot be told
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    found = []
    for _ in range(TIMES):
        train(stage)
        for _ in range(3):  # what autograd holds is let go of in the pass after that which has found it
            gc.collect()
        kept = {
            "live": [len(live_objects(kind)) for kind in (ModelEngine, nn.Parameter, nn.Linear, Accelerator)],
            "groups": dist.is_initialized() or len(dist.distributed_c10d._world.pg_map),
            "threads": threading.active_count(),
            "environment": dict(os.environ),
            "linear": torch.nn.functional.linear.__module__,
        }
        process = psutil.Process()
        found.append((kept, process.num_fds(), process.memory_info().rss))
    return found


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_twenty_trainings_in_one_process_leave_nothing(stage):
    for rank in run_ranks(again_and_again, 2, stage, timeout=280):
        kept, files, memory = zip(*rank, strict=True)
        assert kept[0]["live"] == [0, 0, 0, 0]
        assert not kept[0]["groups"]
        assert all(each == kept[0] for each in kept)
        assert max(files) - files[0] < TIMES // 4  # a connection may be about to close
        assert max(memory[SETTLED:]) - memory[SETTLED - 1] < BOUND

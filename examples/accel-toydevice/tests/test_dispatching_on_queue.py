"""Batches that another rank has read are copied to the device without a wait, and are those that were read."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_core import Accelerator
from accel_data import DataLoaderConfiguration
from accel_testing import run_ranks

ROWS, BATCH = 32, 4


def dispatched(placed):
    """What a rank gets of an epoch, the waits of that, and whether tensors were page-locked where they are not placed."""
    configuration = DataLoaderConfiguration(dispatch_batches=True, non_blocking=True)
    accelerator = Accelerator(dataloader_config=configuration, device_placement=placed)
    data = TensorDataset(torch.arange(ROWS * 3.0).view(ROWS, 3), torch.arange(ROWS), torch.empty(ROWS, 0))
    loader = accelerator.prepare(DataLoader(data, batch_size=BATCH))
    torch.toy.reset_waits()
    batches = list(loader)
    waits = torch.toy.waits(threading.get_native_id())
    pinned = {tensor.is_pinned() for batch in batches for tensor in batch if tensor.numel()}
    numbers = [[tensor.tolist() for tensor in batch] for batch in batches]
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return numbers, waits, pinned


def expected(rank):
    rows = range(ROWS)
    return [
        [[[3.0 * row + at for at in range(3)] for row in part], list(part), [[] for _ in part]]
        for start in range(0, ROWS, 2 * BATCH)
        for part in [rows[start + rank * BATCH : start + (rank + 1) * BATCH]]
    ]


@pytest.mark.parametrize("placed", [True, False])
def test_a_batch_of_another_rank_is_copied_without_a_wait(placed):
    (first, *_), (second, waits, pinned) = run_ranks(dispatched, 2, placed)
    assert (first, second) == (expected(0), expected(1))
    assert not waits
    assert pinned == {not placed}

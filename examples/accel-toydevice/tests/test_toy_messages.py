"""What ranks exchange, wherever it lies: on the device, on the host, here so and there otherwise."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_core import Accelerator, CollectiveMismatchError, broadcast, gather_object
from accel_testing import run_ranks


def exchanged(*, by_device_alone=False, apart=False):
    """What calls return, and where; `apart`: the tensors of rank 0 lie on the host, those of rank 1 on the device."""
    if by_device_alone:  # as somebody else may have started it
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.accelerator.set_device_index(rank)
        dist.init_process_group("toyccl", rank=rank, world_size=size)
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    place = torch.device("cpu") if apart and rank == 0 else device
    found = []
    for turn in range(3):
        own = torch.arange(2 + rank, device=place, dtype=torch.float32) + 10 * rank + turn
        results = [
            accelerator.gather(own),
            accelerator.gather((own[:1], torch.ones((), dtype=torch.bool)))[0],
            accelerator.reduce(own[:2], "mean"),
            accelerator.reduce(torch.full((1 << 18,), turn + rank, device=place), "sum")[:1],
            broadcast(own[:2], 1),
        ]
        assert {result.device for result in results} == {place}
        found.append([result.tolist() for result in results])
        assert accelerator.pad_across_processes(own).shape == (3,)
        assert gather_object(["x" * 5000 * rank, turn]) == ["", turn, "x" * 5000, turn]
        with pytest.raises(CollectiveMismatchError, match="float32.*int64|int64.*float32"):
            accelerator.gather(own.to(torch.int64) if rank else own)
    accelerator.end_training()
    return found


@pytest.mark.parametrize("options", [{}, {"apart": True}, {"by_device_alone": True}], ids=str)
def test_values_are_exact_wherever_they_lie(options):
    expected = [
        [
            [turn, 1 + turn, 10 + turn, 11 + turn, 12 + turn],
            [turn, 10 + turn],
            [5 + turn, 6 + turn],
            [2 * turn + 1],
            [10 + turn, 11 + turn],
        ]
        for turn in range(3)
    ]
    for found in run_ranks(exchanged, 2, **options):
        assert found == expected


def in_streams(turns):
    """The sums of gathers of which each is in a new stream on rank 0 and in the default one on rank 1, among long messages."""
    accelerator = Accelerator()
    number, found, streams = torch.ones(1, device=accelerator.device), [], []
    for turn in range(turns):
        if turn % 7 == 0:
            assert gather_object(["x" * 20000]) == ["x" * 20000] * 2
        streams.append(torch.Stream(accelerator.device) if accelerator.is_main_process else None)
        with streams[-1] or nullcontext():
            found.append(accelerator.gather(number * turn).sum().item())
    accelerator.end_training()
    return found


def test_ranks_may_gather_in_unlike_streams():
    assert run_ranks(in_streams, 2, 22, devices=True) == [[2.0 * turn for turn in range(22)]] * 2

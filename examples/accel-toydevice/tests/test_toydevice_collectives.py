"""Collectives of the device are enqueued, as those of NCCL are, and refuse what NCCL refuses."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_testing import run_ranks


def joined(timeout=60):
    """Makes the process group of a program that does not use accel-core; returns rank and device."""
    rank = int(os.environ["RANK"])
    device = torch.device("toy", rank)
    torch.toy.set_device(device)
    dist.init_process_group("cpu:gloo,toy:toyccl", device_id=device, timeout=timedelta(seconds=timeout))
    return rank, device


def left():
    dist.barrier()
    dist.destroy_process_group()
    assert torch.toy.communicators() == 0


def together():
    """What holds for every rank alike, which is told by the checks in it."""
    rank, device = joined()
    assert torch.toy.communicators() == 0  # there has been no collective on the device

    # Refusals.
    work = [torch.ones(2, dtype=dtype, device=device) for dtype in (torch.int16, torch.uint16, torch.uint32)]
    for tensor in work:
        with pytest.raises(TypeError, match="Input tensor data type is not supported for toyccl process group"):
            dist.all_reduce(tensor)
    backend = dist.group.WORLD._get_backend(device)
    with pytest.raises(RuntimeError, match="Tensors must be of a toy device and dense"):
        backend.allreduce([torch.ones(2)]).wait()
    with pytest.raises(RuntimeError, match="bitwise"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32, device=device), op=dist.ReduceOp.BOR)
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device=device)[:, 1])
    host = torch.ones(2)
    dist.all_reduce(host)  # the host's tensors go over the other half of the group
    assert host.tolist() == [2.0, 2.0]

    # Operations and dtypes.
    def reduced(values, op=dist.ReduceOp.SUM, dtype=torch.float32):
        tensor = torch.tensor(values, dtype=dtype, device=device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    assert reduced([rank + 1.0, 5.0], dist.ReduceOp.AVG) == [1.5, 5.0]
    assert reduced([rank + 1.0], dist._make_nccl_premul_sum(0.5)) == [1.5]
    assert reduced([rank + 1], dist.ReduceOp.MAX, torch.int64) == [2]
    assert reduced([rank == 0, False], dtype=torch.bool) == [True, False]
    assert reduced([1 + 1j * rank], dtype=torch.complex64) == [2 + 1j]
    assert reduced([1.5 + rank], dtype=torch.bfloat16) == [4.0]
    assert reduced([1.5 + rank], dtype=torch.float64) == [4.0]

    # Uneven and coalesced ones.
    parts = [torch.zeros(1 + each, device=device) for each in range(2)]
    dist.all_gather(parts, torch.full((1 + rank,), rank + 1.0, device=device))
    assert [part.tolist() for part in parts] == [[1.0], [2.0, 2.0]]
    into, out = torch.zeros(2, device=device), torch.full((2,), rank + 1.0, device=device)
    operations = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert into.tolist() == [2.0 - rank] * 2
    several = [torch.full((2,), rank + 1.0, device=device) for _ in range(3)]
    with dist._coalescing_manager(device=device):
        for tensor in several:
            dist.all_reduce(tensor)
    assert [tensor.tolist() for tensor in several] == [[3.0, 3.0]] * 3
    swapped = [torch.zeros(1 + each, device=device) for each in (rank, rank)]
    dist.all_to_all(swapped, [torch.full((1 + each,), rank * 1.0, device=device) for each in (0, 1)])
    assert [tensor.tolist() for tensor in swapped] == [[0.0] * (1 + rank), [1.0] * (1 + rank)]

    # A group of its own has a communicator of its own, from its first collective to its end.
    group = dist.new_group([0, 1])
    before = torch.toy.communicators()
    x = torch.ones(1, device=device)
    dist.all_reduce(x, group=group)
    assert (before, torch.toy.communicators(), x.tolist()) == (1, 2, [2.0])
    dist.destroy_process_group(group)
    assert torch.toy.communicators() == 1

    # Threads do not become more.
    dist.all_reduce(x)
    x.tolist()
    count = len(os.listdir("/proc/self/task"))
    for _ in range(100):
        dist.all_reduce(x)
        x.mul_(0.5)
    assert x.tolist() == [4.0]
    assert len(os.listdir("/proc/self/task")) <= count + 1
    left()


def test_what_it_takes_and_what_it_computes():
    run_ranks(together, 2)


def enqueued():
    rank, device = joined()
    x = torch.full((1000,), rank + 1.0, device=device)
    warm = torch.ones(1, device=device)
    dist.all_reduce(warm)
    torch.toy.synchronize()
    torch.toy.reset_waits()
    torch.toy.hold()
    x.mul_(2)
    work = dist.all_reduce(x, async_op=True)
    y = x.clone()  # before it waits for it, and so at most what the host has asked for
    work.wait()
    z = x + 1
    future = work.get_future()
    after = future.then(lambda done: done.value()[0] * 10)
    assert not work.is_completed()
    assert torch.toy.waits() == {}
    torch.toy.release()
    assert z.unique().tolist() == [7.0]
    assert after.wait().unique().tolist() == [60.0]
    assert work.is_completed()
    assert work.is_success()
    assert y.numel() == 1000
    torch.toy.reset_waits()
    dist.barrier()
    assert torch.toy.waits() == {"barrier": 1}
    # An input that is freed when the call has returned is not used again before the collective has read it.
    torch.toy.hold()
    gathered = torch.zeros(2000, device=device)
    work = dist.all_gather_into_tensor(gathered, torch.full((1000,), rank + 1.0, device=device), async_op=True)
    others = [torch.full((1000,), -1.0, device=device) for _ in range(5)]
    torch.toy.release()
    work.wait()
    assert gathered.view(2, 1000)[:, ::111].unique(dim=1).tolist() == [[1.0], [2.0]]
    assert len(others) == 5
    left()


def test_it_returns_at_once_and_makes_the_stream_wait_and_not_the_host():
    run_ranks(enqueued, 2)


def alone():
    """Rank 0 begins collectives that rank 1 never joins."""
    rank, device = joined()
    dist.barrier()
    if rank == 0:
        x = torch.ones(4, device=device)
        begun = time.monotonic()
        for _ in range(10):
            dist.all_reduce(x)
            x.add_(1)
        assert time.monotonic() - begun < 10  # it has not waited for the other
        timer = threading.Timer(0.5, dist.group.WORLD._get_backend(device).abort)
        timer.start()
        assert len(x.tolist()) == 4  # garbage, but the host goes on
        timer.join()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(x)
        assert torch.toy.communicators() == 0
    dist.distributed_c10d._get_default_store().set(f"done {rank}", "")
    dist.distributed_c10d._get_default_store().wait(["done 0", "done 1"])


def test_an_abort_ends_what_is_queued_and_refuses_what_comes():
    run_ranks(alone, 2)


def deserted():
    """Rank 1 leaves, and rank 0 waits for a collective with it."""
    rank, device = joined()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["gone"])
        dist.all_reduce(x := torch.ones(4, device=device))
        with pytest.raises(dist.DistBackendError, match="toyccl: a collective failed"):
            x.tolist()
    else:
        dist.destroy_process_group()
        store.set("gone", "")


def test_the_error_of_a_collective_is_raised_by_the_next_wait():
    run_ranks(deserted, 2)


def ends_with_work_queued():
    _, device = joined()
    x = torch.ones(1000, device=device)
    for _ in range(20):
        dist.all_reduce(x)
        x.mul_(0.5)


def test_a_process_may_end_with_work_in_its_queues():
    for _ in range(3):
        run_ranks(ends_with_work_queued, 2)

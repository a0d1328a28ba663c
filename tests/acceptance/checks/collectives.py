"""Collectives return what they promise, whatever the dtype, size and shape."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from acceptance.registry import ALL, ANY, Run, check, skip

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.bool, torch.complex64)
SMALL, LARGE = 3, 3 << 20  # elements: below, and above, what travels with its description


def dtypes(run: Run) -> list[torch.dtype]:
    """Those of which the device can have tensors at all."""
    found = []
    for dtype in (*INTEGERS, *FLOATS, *EIGHT_BITS, *OTHERS):
        try:
            torch.zeros(2, device=run.device).to(dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        found.append(dtype)
    return found


def of_rank(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: small whole numbers, which every dtype has."""
    return ((torch.arange(size) + rank) % 3).to(dtype)


@check(devices=ALL, seconds=240)
def gather(run: Run) -> str:
    """`gather` of every dtype, small and large."""
    accelerator = run.accelerator()
    count = 0
    for dtype, size in itertools.product(dtypes(run), sizes(run)):
        found = accelerator.gather(of_rank(run.rank, size, dtype).to(run.device))
        expected = torch.cat([of_rank(rank, size, dtype) for rank in range(run.size)])
        assert_equal(found, expected, run, f"gather of {size} {dtype}")
        count += 1
    return f"{count} kinds"


def sizes(run: Run) -> tuple[int, ...]:
    return (SMALL, LARGE // 16 if run.quick else LARGE)


def assert_equal(found: torch.Tensor, expected: torch.Tensor, run: Run, what: str) -> None:
    assert found.device == run.device, f"{what}: on {found.device}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}"
    found = found.cpu()
    if found.dtype in EIGHT_BITS:
        found, expected = found.float(), expected.float()
    assert torch.equal(found, expected), f"{what}: other values"


@check(devices=ALL, seconds=240)
def reduce(run: Run) -> str:
    """`reduce` to sum and mean, small and large: int16 and 8-bit floats, which backends lack, too."""
    accelerator = run.accelerator()
    count = 0
    for dtype, size, reduction in itertools.product(dtypes(run), sizes(run), ("sum", "mean")):
        if dtype is torch.bool or (reduction == "mean" and dtype in INTEGERS):
            continue
        found = accelerator.reduce(of_rank(run.rank, size, dtype).to(run.device), reduction)
        stacked = torch.stack([of_rank(rank, size, dtype) for rank in range(run.size)])
        wide = torch.complex64 if dtype is torch.complex64 else torch.float64
        exact = stacked.to(wide).sum(0) / (run.size if reduction == "mean" else 1)
        expected = exact.to(dtype).to(wide)  # of eight ranks, float8_e5m2 has no sum of nine
        assert found.dtype == dtype, f"reduce of {dtype}: {found.dtype}"
        assert found.device == run.device, f"reduce of {dtype}: on {found.device}"
        error = (found.cpu().to(wide) - expected).abs().max().item()
        allowed = 0.3 if dtype in EIGHT_BITS else 0.02 if dtype in (torch.float16, torch.bfloat16) else 1e-6
        assert error <= allowed, f"{reduction} of {size} {dtype}: {error} off"
        count += 1
    return f"{count} kinds"


@check(devices=ALL, seconds=120)
def broadcast(run: Run) -> str:
    """`broadcast` of every dtype, small and large, from the last rank."""
    from accel_core import broadcast

    run.accelerator()
    count = 0
    for dtype, size in itertools.product(dtypes(run), sizes(run)):
        found = broadcast(of_rank(run.rank, size, dtype).to(run.device), run.size - 1)
        assert_equal(found, of_rank(run.size - 1, size, dtype), run, f"broadcast of {size} {dtype}")
        count += 1
    return f"{count} kinds"


@check(devices=ALL)
def ragged(run: Run) -> str:
    """`pad_across_processes`, and `gather` of what it made, where ranks have different shapes."""
    accelerator = run.accelerator()
    for dtype in dtypes(run):
        mine = of_rank(run.rank, 2 * (run.rank + 1), dtype).view(run.rank + 1, 2).to(run.device)
        if dtype in EIGHT_BITS:
            continue  # torch cannot pad them
        padded = accelerator.pad_across_processes(mine, dim=0)
        assert padded.shape == (run.size, 2), (dtype, padded.shape)
        whole = accelerator.gather(padded)
        for rank in range(run.size):
            part = whole[rank * run.size : (rank + 1) * run.size]
            expected = of_rank(rank, 2 * (rank + 1), dtype).view(rank + 1, 2)
            assert_equal(part[: rank + 1], expected, run, f"{dtype} of rank {rank}")
            assert not part[rank + 1 :].cpu().to(torch.complex64).any(), f"{dtype}: padded with something"
    return "all dtypes"


@check(devices=ALL)
def nested(run: Run) -> str:
    """Nested structures of several dtypes in one call, and objects."""
    from accel_core import broadcast_object_list, gather_object

    accelerator = run.accelerator()
    value = {"a": [torch.full((2,), run.rank, device=run.device)], "b": (torch.ones(1, device=run.device).half(),)}
    found = accelerator.gather(value)
    assert found["a"][0].tolist() == [rank for rank in range(run.size) for _ in range(2)], found
    assert found["b"][0].dtype == torch.float16
    assert len(found["b"][0]) == run.size
    assert gather_object([("rank", run.rank)]) == [("rank", rank) for rank in range(run.size)]
    objects: list[Any] = [b"x" * (3 << 20)] if run.rank == 0 else [None]
    assert broadcast_object_list(objects) == [b"x" * (3 << 20)], "another object"
    return "tensors and objects"


@check(devices=ALL)
def triggers(run: Run) -> str:
    """What one rank sets, all see; and afterwards nobody."""
    accelerator = run.accelerator()
    assert not accelerator.check_trigger()
    if run.rank == run.size - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    return "seen by all"


@check(devices=ANY)
def metrics(run: Run) -> str:
    """`gather_for_metrics` counts each sample of an uneven set once."""
    accelerator = run.accelerator()
    count = 4 * run.size + 1
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(count), batch_size=2))
    found = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    assert sorted(found.tolist()) == list(range(count)), found
    return f"{count} samples"


@check(devices=ALL, on="accelerator", seconds=120)
def pairs(run: Run) -> str:
    """Each pair of devices sends 64 MiB there and back, whole; the slowest pair."""
    run.accelerator()
    slowest = (float("inf"), "")
    sent = torch.full((16 << 20,), float(run.rank), device=run.device)
    received = torch.empty_like(sent)
    for first, second in itertools.combinations(range(run.size), 2):
        if run.rank in (first, second):
            peer = second if run.rank == first else first
            for _ in range(2):  # the first makes the connection
                torch.accelerator.synchronize()
                began = time.perf_counter()
                both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()
                torch.accelerator.synchronize()
                seconds = time.perf_counter() - began
            assert bool((received == peer).all()), f"{first} and {second}: other values than were sent"
            slowest = min(slowest, (sent.nbytes / seconds / 1e9, f"{first}-{second}"))
        dist.barrier()
    every = gathered(slowest)
    rate, pair = min(every)
    return f"slowest {pair}: {rate:.1f} GB/s"


def gathered(value: Any) -> list[Any]:
    from accel_core import gather_object

    return list(gather_object([value]))


@check(devices=ALL, on="accelerator")
def bandwidth(run: Run) -> str:
    """All-reduce of 256 MiB: bytes on the bus a second."""
    run.accelerator()
    value = torch.ones(64 << 20, device=run.device)
    for number in range(6):
        if number == 1:
            torch.accelerator.synchronize()
            began = time.perf_counter()
        dist.all_reduce(value)
    torch.accelerator.synchronize()
    seconds = (time.perf_counter() - began) / 5
    if run.size**6 > 2**24:
        skip("too many devices for exact sums")
    assert value[-1].item() == run.size**6, value[-1]
    return f"{2 * (run.size - 1) / run.size * value.nbytes / seconds / 1e9:.1f} GB/s"

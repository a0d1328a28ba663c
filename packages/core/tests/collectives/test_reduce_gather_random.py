"""Random trees through every collective, against what one process computes from all ranks' trees."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from accel_core.collectives import operations
from accel_core.processes.world import World
from accel_testing import run_ranks

CASES = 80
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.bool, torch.complex64, torch.complex128)
MOVED = (*INTEGERS, *FLOATS, *OTHERS, torch.float8_e4m3fn, torch.uint16)
"""Dtypes of what only travels."""

Pair = namedtuple("Pair", "first second")
BUILD: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda parts: dict(enumerate(parts)),
    "ordered": lambda parts: OrderedDict((f"k{number}", part) for number, part in enumerate(parts)),
    "user": lambda parts: UserDict({f"k{number}": part for number, part in enumerate(parts)}),
}


def plan(draw: random.Random, dtypes: tuple[torch.dtype, ...], depth: int = 0) -> Any:
    """What all ranks have in common: containers, dtypes and shapes."""
    if depth > 2 or draw.random() < 0.4:
        return draw.choice(dtypes), [draw.choice([0, 1, 2, 3]) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    if draw.random() < 0.2:
        return Pair(plan(draw, dtypes, depth + 1), plan(draw, dtypes, depth + 1))
    return {draw.choice(list(BUILD)): [plan(draw, dtypes, depth + 1) for _ in range(draw.randint(0, 3))]}


def filled(dtype: torch.dtype, shape: list[int], draw: random.Random) -> torch.Tensor:
    """Small whole numbers, in memory of some order."""
    values = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(draw.randrange(2**32)))
    tensor = (values - 1j * values if dtype.is_complex else values).to(dtype)
    if len(shape) > 1 and draw.random() < 0.4:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if shape and draw.random() < 0.3:
        return torch.stack([tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor] * 2, -1)[..., 0].view(dtype)
    return tensor.requires_grad_() if dtype in FLOATS and draw.random() < 0.2 else tensor


def built(planned: Any, draw: random.Random, ragged: bool) -> Any:
    """One rank's tree; `ragged`: with rows of its own."""
    if isinstance(planned, Pair):
        return Pair(*[built(part, draw, ragged) for part in planned])
    if isinstance(planned, dict):
        ((kind, parts),) = planned.items()
        return BUILD[kind]([built(part, draw, ragged) for part in parts])
    dtype, shape = planned
    return filled(dtype, [draw.choice([0, 1, 2, 4]), *shape[1:]] if ragged and shape else shape, draw)


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree.detach()
    else:
        for child in tree.values() if isinstance(tree, (dict, UserDict)) else tree:
            yield from leaves(child)


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype in (torch.float8_e4m3fn, torch.uint16):
        left, right = left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    return torch.equal(left, right)


def check_gather(trees: list[Any], mine: Any, draw: random.Random) -> None:
    for found, parts in zip(leaves(operations.gather(mine)), zip(*map(leaves, trees), strict=True), strict=True):
        assert equal(found, torch.cat([part if part.ndim else part.reshape(1) for part in parts]))


def check_reduce(trees: list[Any], mine: Any, draw: random.Random) -> None:
    reduction = draw.choice(["sum", "mean"])
    reduced = operations.reduce(mine, reduction)  # type: ignore[arg-type]
    for found, parts in zip(leaves(reduced), zip(*map(leaves, trees), strict=True), strict=True):
        stacked = torch.stack(parts).to(torch.complex128)
        expected = stacked.sum(0) if reduction == "sum" else stacked.mean(0)
        tolerance = max(torch.finfo(part.dtype).eps if part.dtype in FLOATS else 1e-6 for part in parts)
        torch.testing.assert_close(found.to(torch.complex128), expected, rtol=tolerance, atol=tolerance)


def check_broadcast(trees: list[Any], mine: Any, draw: random.Random) -> None:
    source = draw.randrange(len(trees))
    assert all(map(equal, leaves(operations.broadcast(mine, source)), leaves(trees[source])))


def check_padding(trees: list[Any], mine: Any, draw: random.Random) -> None:
    first, value = draw.random() < 0.5, draw.choice([0, 1])
    padded = list(leaves(operations.pad_across_processes(mine, 0, value, first)))
    for found, own, *parts in zip(padded, leaves(mine), *map(leaves, trees), strict=True):
        if not own.ndim:
            assert equal(found, own)
            continue
        lacking = max(map(len, parts)) - len(own)
        filling, kept = (found[:lacking], found[lacking:]) if first else (found[len(own) :], found[: len(own)])
        assert equal(kept, own)
        assert equal(filling, torch.full_like(filling, value))


def check_objects(trees: list[Any], mine: Any, draw: random.Random) -> None:
    gathered = operations.gather_object([mine, "text" * draw.choice([1, 2000])])
    assert all(map(equal, leaves(gathered[::2]), leaves(trees)))
    source = draw.randrange(len(trees))
    received = operations.broadcast_object_list([mine, {"rank": World.current().rank}], source)
    assert received[1] == {"rank": source}
    assert all(map(equal, leaves(received[0]), leaves(trees[source])))


def check_mismatch(trees: list[Any], mine: Any, draw: random.Random) -> None:
    """Rank 0 has another tree, or calls something else: whatever the ranks raise, all do, and what comes next works."""
    call = draw.choice([operations.gather, operations.broadcast, operations.pad_across_processes])
    tree = (mine, torch.ones(1)) if World.current().rank else draw.choice([mine, (mine, "text"), [mine]])
    outcome = "fine"
    try:
        call(tree)
    except (RuntimeError, TypeError, ValueError) as error:
        outcome = "refused"
        assert str(error)
    assert operations.gather_object([outcome]) == ["refused"] * len(trees)


CHECKS: dict[Callable[[list[Any], Any, random.Random], None], tuple[tuple[torch.dtype, ...], bool]] = {
    check_gather: (MOVED, True),
    check_reduce: ((*INTEGERS, *FLOATS, *OTHERS), False),
    check_broadcast: (MOVED, False),
    check_padding: (MOVED, True),
    check_objects: (MOVED, True),
    check_mismatch: (MOVED, False),
}


def run_cases() -> int:
    world = World.current()
    for case in range(CASES):
        common = random.Random(case)
        check = common.choice(list(CHECKS))
        dtypes, ragged = CHECKS[check]
        planned = plan(common, dtypes)
        trees = [built(planned, random.Random(1000 * case + rank), ragged) for rank in range(world.size)]
        try:
            check(trees, trees[world.rank], common)
        except BaseException as error:
            error.add_note(f"case {case}: {check.__name__} of {planned}") if hasattr(error, "add_note") else None
            raise
    return CASES


@pytest.mark.parametrize("debug", ["0", "1"])
def test_collectives_do_what_one_process_would(debug: str) -> None:
    assert run_ranks(run_cases, 3, env={"ACCELERATE_DEBUG_MODE": debug}) == [CASES] * 3

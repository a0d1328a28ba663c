"""Collectives over trees and objects: exact results, one collective per call, and errors instead of hangs."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from together import Together

from accel_core.base.errors import CollectiveMismatchError
from accel_core.base.torch_versions import COLLECTIVES
from accel_core.collectives.objects import broadcast_object, broadcast_object_list, gather_objects
from accel_core.collectives.reduce_gather import gather, reduce_tree
from accel_core.processes import channel as channel_module
from accel_core.processes.channel import Channel, Letter, from_bytes, to_bytes
from accel_core.processes.mismatch_report import describe, mismatch
from accel_core.processes.world import World
from accel_testing import run_ranks

ON_TWO = Together(2)

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)


class Alone:
    """A world of one, as far as collectives look at it."""

    rank = 0
    size = 1
    device = torch.device("cpu")

    def channel(self, group: Any = None) -> Channel:
        raise AssertionError("a world of one needs no channel")


ALONE: Any = Alone()


def count_collectives(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a function returns, and the names of the functions of torch.distributed that it called."""
    calls: list[str] = []
    names = [
        "all_gather",
        "all_gather_object",
        COLLECTIVES["all_gather_single"],
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "monitored_barrier",
        "recv",
        "reduce",
        "reduce_scatter",
        "scatter",
        "send",
    ]
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, counting(name))
        return function(), calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def rows_of(rank: int, dtype: torch.dtype, rows: int, *sizes: int) -> torch.Tensor:
    """Deterministic content that differs by rank."""
    count = rows * int(torch.tensor(sizes).prod())
    return (torch.arange(count).reshape(rows, *sizes) * 3 + rank).to(dtype)


@ON_TWO
def gather_many() -> int:
    world = World.current()
    cases = 0
    for rows in ([3, 3], [3, 5], [0, 2], [2, 0], [0, 0], [700, 1], [1, 700], [40, 40]):
        for dtype in DTYPES:
            for sizes in ((), (4,), (2, 3), (0,)):
                mine = rows_of(world.rank, dtype, rows[world.rank], *sizes)
                expected = torch.cat([rows_of(rank, dtype, rows[rank], *sizes) for rank in range(2)])
                got = gather({"a": mine, "b": [mine.transpose(0, -1).contiguous().transpose(0, -1)]}, world)
                for tensor in (got["a"], got["b"][0]):
                    assert tensor.dtype == dtype
                    assert tensor.shape == expected.shape
                    assert torch.equal(tensor, expected)
                cases += 1
    return cases


def test_gather_concatenates_ragged_rows_of_any_dtype() -> None:
    """Ranks may differ in dim 0, a rank may have no rows, any dtype, contiguous or not."""
    assert ON_TWO.run(gather_many) == [256, 256]


@ON_TWO
def gather_odd_ones() -> None:
    world = World.current()
    rank = float(world.rank)
    scalar = gather(torch.tensor(rank), world)
    assert scalar.tolist() == [0.0, 1.0]
    leaf = torch.full((1,), rank, requires_grad=True)
    result = gather(OrderedDict(x=leaf, y=(leaf * 2, torch.tensor(rank))), world)
    assert type(result) is OrderedDict
    assert result["y"][0].tolist() == [0.0, 2.0]
    assert not result["x"].requires_grad
    assert not result["y"][0].requires_grad
    assert leaf.grad_fn is None
    assert gather(torch.nn.Parameter(torch.ones(2)), world).shape == (4,)
    assert gather(torch.full((1,), 1j * rank).conj(), world).tolist() == [0, -1j]
    assert gather({}, world) == {}
    with torch.inference_mode():
        assert gather(torch.full((9000,), rank), world).sum() == 9000  # grows the buffers in inference mode
    assert gather(torch.full((9000,), rank), world).sum() == 9000
    first = gather(torch.full((3,), rank), world)
    gather(torch.full((3,), -1.0), world)
    assert first.tolist() == [0, 0, 0, 1, 1, 1]  # the result is no view of a buffer


def test_gather_of_scalars_gradients_views_and_inference_tensors() -> None:
    """A 0-d leaf gives N elements. Results are detached and stay what they were."""
    ON_TWO.run(gather_odd_ones)


def test_a_world_of_one_copies_nothing() -> None:
    """A 0-d leaf gives one element, for N = 1 too."""
    tensor = torch.zeros(2, 3)
    batch = {"a": tensor, "b": [tensor]}
    assert gather(batch, ALONE) is batch
    assert gather(torch.tensor(3.0), ALONE).shape == (1,)
    leaf = torch.ones(2, requires_grad=True)
    result = gather(leaf, ALONE)
    assert not result.requires_grad
    assert result.data_ptr() == leaf.data_ptr()
    assert reduce_tree(tensor, ALONE).data_ptr() == tensor.data_ptr()
    assert gather_objects([1], ALONE) == [1]
    assert gather_objects((1,), ALONE) == [1]
    assert broadcast_object(batch, ALONE) is batch


def test_what_is_no_tensor_is_named_with_its_path() -> None:
    with pytest.raises(
        TypeError, match=r"gather\(\) takes tensors .*; data\['a'\]\[1\] is a str\. Use torch.tensor\(\.\.\.\)"
    ):
        gather({"a": [torch.zeros(1), "text"]}, ALONE)
    with pytest.raises(TypeError, match=r"reduce\(\) takes tensors .*; data is a int.* use_gather_object=True\)\."):
        reduce_tree(3, ALONE)
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo\. Pass data\.to_dense\(\)"):
        gather(torch.eye(2).to_sparse(), ALONE)
    with pytest.raises(TypeError, match=r"gather_object\(dict\): expected a list or a tuple.*Pass \[value\]"):
        gather_objects({}, ALONE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"broadcast_object\(source=1\): the group has 1 ranks; choose one of 0 to 0"):
        broadcast_object(1, ALONE, source=1)


def count_in_a_loop() -> dict[str, list[int]]:
    world = World.current()
    logits, labels = torch.randn(32, 10), torch.arange(32)
    large = torch.randn(300, 1000)
    kinds: dict[str, Callable[[int], Any]] = {
        "same": lambda step: gather((logits, labels), world),
        "ragged": lambda step: gather((logits[: 32 - step % 3 - world.rank], labels), world),
        "reduce": lambda step: reduce_tree(labels, world, "mean"),
        "objects": lambda step: gather_objects(["text"] * 3, world),
        "broadcast": lambda step: broadcast_object({"seed": 7}, world),
        "large": lambda step: gather(large, world),
        "alternating": lambda step: gather(large, world) if step % 2 else reduce_tree(labels, world),
        "padded to other widths": lambda step: gather(torch.zeros(64, 100 + step), world),
    }
    counts = {}
    for name, call in kinds.items():
        counts[name] = [len(count_collectives(lambda step=step, call=call: call(step))[1]) for step in range(16)]
    return counts


def test_a_repeated_call_takes_exactly_one_collective() -> None:
    """Exactly one collective per call in a steady loop, also where small and large calls alternate."""
    for counts in run_ranks(count_in_a_loop):
        assert {name: sum(steps[4:]) for name, steps in counts.items() if name != "padded to other widths"} == {
            name: 12 for name in counts if name != "padded to other widths"
        }
        assert sum(counts["padded to other widths"]) <= 16 + 6  # the capacity grows by eighths
        assert all(sum(steps[:4]) <= 4 + 2 for steps in counts.values())


def capacities_after_one_large_call() -> list[int]:
    world = World.current()
    channel = world.channel()
    sent: list[int] = []
    original = getattr(dist, COLLECTIVES["all_gather_single"])

    def recording(output: Any, given: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(given.numel())
        return original(output, given, **kwargs)

    setattr(dist, COLLECTIVES["all_gather_single"], recording)
    try:
        for _ in range(3):
            reduce_tree(torch.zeros(4), world)
        gather(torch.zeros(1 << 20), world)
        del sent[:]
        for _ in range(12):
            reduce_tree(torch.zeros(4), world)
    finally:
        setattr(dist, COLLECTIVES["all_gather_single"], original)
    assert len(channel._frames) <= channel_module.KEPT_FRAMES
    return sent


def test_one_large_gather_does_not_make_later_calls_large() -> None:
    for sent in run_ranks(capacities_after_one_large_call):
        assert len(sent) == 12
        assert sum(size > channel_module.FRAME_STEP for size in sent) <= channel_module.MEMORY
        assert set(sent[-4:]) == {channel_module.FRAME_STEP}


def huge_buffers_are_dropped() -> int:
    world = World.current()
    gather(torch.zeros(24 << 20, dtype=torch.uint8), world)
    return sum(frame.received.numel() for frame in world.channel()._frames.values())


def test_huge_buffers_are_not_kept() -> None:
    for kept in run_ranks(huge_buffers_are_dropped):
        assert kept < 1 << 20


@ON_TWO
def reduce_many() -> None:
    world = World.current()
    rank = world.rank
    for count in (3, 200_000):  # locally, and by all_reduce
        values = torch.arange(count, dtype=torch.float32) + rank
        total = 2 * torch.arange(count, dtype=torch.float32) + 1
        kept = values.clone()
        tree = {"f": values, "i": values.long(), "b": values.long() % 2 == 0, "h": (values % 100).bfloat16()}
        summed = reduce_tree(tree, world)
        assert torch.equal(values, kept)
        assert torch.equal(summed["f"], total)
        assert torch.equal(summed["i"], total.long())
        assert summed["i"].dtype == torch.int64
        assert torch.equal(summed["b"], torch.ones(count, dtype=torch.int64))
        assert summed["h"].dtype == torch.bfloat16
        mean = reduce_tree(tree, world, "mean")
        assert torch.equal(mean["f"], total / 2)
        assert torch.equal(mean["i"], total / 2)
        assert mean["i"].dtype == torch.float32
        assert torch.equal(mean["b"], torch.full((count,), 0.5))
        largest = reduce_tree(tree, world, "max")
        assert torch.equal(largest["f"], values - rank + 1)
        assert largest["b"].dtype == torch.bool
        assert largest["b"].all()
        scaled = reduce_tree((values, values.long()), world, scale=0.5)
        assert torch.equal(scaled[0], total / 2)
        assert torch.equal(scaled[1], total / 2)
        assert torch.equal(reduce_tree(values + 1j, world), total + 2j)
        for dtype in (
            torch.float8_e4m3fn,
            torch.int16,
            torch.uint16,
        ):  # which torch, or a backend, cannot sum as they are
            narrow = torch.full((count,), rank + 1).to(dtype)
            for reduction, expected in (("sum", 3), ("max", 2)):
                assert torch.equal(reduce_tree(narrow, world, reduction).float(), torch.full((count,), float(expected)))
        assert not reduce_tree(values.clone().requires_grad_(), world).requires_grad
        assert torch.equal(reduce_tree(values.reshape(1, -1).t(), world), total[:, None])
    scalar = reduce_tree(torch.tensor(rank + 1.0), world, "mean")
    assert (scalar.shape, scalar.item()) == ((), 1.5)
    assert reduce_tree(torch.zeros(0), world).shape == (0,)
    tree = {"x": "anything"}
    assert reduce_tree(tree, world, "none") is tree


def test_reduce_sums_averages_and_leaves_its_input_alone() -> None:
    """Every reduction, small and large, for every kind of dtype; `"none"` returns its input."""
    ON_TWO.run(reduce_many)


def test_a_world_of_one_gives_the_dtypes_of_a_larger_one() -> None:
    flags = torch.tensor([True, False])
    assert reduce_tree(flags, ALONE).dtype == torch.int64
    assert reduce_tree(flags, ALONE, "max").dtype == torch.bool
    assert reduce_tree(torch.tensor([3]), ALONE, "mean").dtype == torch.float32
    assert reduce_tree(torch.tensor([3]), ALONE, scale=0.5).item() == 1.5


def test_an_unknown_reduction_is_an_error_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"reduction='avg'.*Choose one of 'sum', 'mean', 'max', 'none'"):
        reduce_tree(torch.zeros(1), ALONE, "avg")  # type: ignore[arg-type]


@ON_TWO
def reduce_collectives() -> list[list[str]]:
    world = World.current()
    large = [torch.zeros(100_000), torch.zeros(100_000), torch.zeros(4, dtype=torch.int64)]
    return [count_collectives(lambda tree=tree: reduce_tree(tree, world))[1] for tree in (large[2], large)]


def test_a_large_reduce_compares_headers_and_calls_all_reduce_once_per_dtype() -> None:
    for small, large in ON_TWO.run(reduce_collectives):
        assert small == [COLLECTIVES["all_gather_single"]]
        assert large == [COLLECTIVES["all_gather_single"], "all_reduce", "all_reduce"]


@ON_TWO
def move_objects() -> None:
    world = World.current()
    mine = [{"id": world.rank, "text": "x" * 100 * world.rank}] * (world.rank + 1)
    assert [item["id"] for item in gather_objects(mine, world)] == [0, 1, 1]
    assert gather_objects((), world) == []
    assert gather_objects([None] * world.rank, world) == [None]
    assert gather_objects([torch.tensor([world.rank])], world) == [torch.tensor([0]), torch.tensor([1])]
    for size in (10, 3_000_000):
        obj = {"from": world.rank, "data": bytes(size)}
        got = broadcast_object(obj, world, source=1)
        assert got == {"from": 1, "data": bytes(size)}
        assert (got is obj) == (world.rank == 1)
    assert broadcast_object(None, world) is None


def test_objects_are_gathered_and_broadcast() -> None:
    """Lists of any length on each rank, empty ones too; objects larger than a message."""
    ON_TWO.run(move_objects)


class Elsewhere:
    """What only some ranks can unpickle, as if its class stood in a module that the others lack."""

    def __init__(self, rank: int, padding: int = 0) -> None:
        self.rank, self.padding = rank, bytes(padding)

    def __reduce__(self) -> Any:
        return arrive_elsewhere, (self.rank, self.padding)


def arrive_elsewhere(rank: int, _: bytes) -> str:
    if World.current().rank == rank:
        raise ImportError(f"no module named elsewhere on rank {rank}")
    return "arrived"


def lose_objects() -> dict[str, tuple[str, str]]:
    world = World.current()
    last = world.size - 1
    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: gather_objects([Elsewhere(last)], world),
        "gather from one": lambda: gather_objects([Elsewhere(last)] if world.rank == 0 else [1], world),
        "broadcast": lambda: broadcast_object(Elsewhere(last), world),
        "broadcast large": lambda: broadcast_object(Elsewhere(last, 3_000_000), world),
        "list": lambda: broadcast_object_list([Elsewhere(last)], world),
    }
    outcomes = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            outcomes[name] = type(error).__name__, str(error)
        assert gather(torch.tensor([world.rank]), world).tolist() == list(range(world.size))  # and life goes on
    assert gather_objects([Elsewhere(-1)], world) == ["arrived"] * world.size
    assert broadcast_object(Elsewhere(-1), world, source=last) != "nobody"
    return outcomes


@pytest.mark.parametrize("size", [2, 3])
def test_what_one_rank_cannot_unpickle_is_an_error_on_every_rank(size: int) -> None:
    """Else the others would go on, and wait for that one in another collective."""
    *fine, lost = run_ranks(lose_objects, size)
    for name, (kind, text) in lost.items():
        assert kind == "UnpicklingError"
        assert (
            f"what rank 0 sent cannot be unpickled here: ImportError: no module named elsewhere on rank {size - 1}. Send"
            in text
        )
        for outcomes in fine:
            assert outcomes[name][0] == CollectiveMismatchError.__name__
            assert f"rank {size - 1}: UnpicklingError: {text}" in outcomes[name][1]
    assert set(lost) == set(fine[0])


@ON_TWO
def collectives_of_objects() -> list[int]:
    world = World.current()
    plain = {"a": [1, 2.0, None, "text", b"bytes", (True,)], "b": torch.ones(2), "c": OrderedDict(d=torch.Size([1]))}
    calls: list[Callable[[], Any]] = [
        lambda: gather_objects([plain], world),
        lambda: broadcast_object(plain, world),
        lambda: broadcast_object_list([plain], world),
        lambda: broadcast_object(plain if world.rank == 0 else Elsewhere(-1), world),
        lambda: gather_objects([Elsewhere(-1)] if world.rank == 1 else [], world),
        lambda: broadcast_object(Elsewhere(-1), world),
    ]
    return [len(count_collectives(call)[1]) for call in calls]


def test_plain_objects_take_one_collective_and_others_a_second_one() -> None:
    assert ON_TWO.run(collectives_of_objects) == [[1, 1, 1, 1, 2, 2]] * 2


def replace_lists() -> dict[str, tuple[str, str]]:
    world = World.current()
    for size in (10, 3_000_000):
        mine = [world.rank, bytes(size), {"rank": world.rank}]
        assert broadcast_object_list(mine, world, source=world.size - 1) is mine
        assert mine == [world.size - 1, bytes(size), {"rank": world.size - 1}]
    empty: list[Any] = []
    assert broadcast_object_list(empty, world) is empty
    calls: dict[str, Callable[[], Any]] = {
        "length": lambda: broadcast_object_list([None] * (world.rank + 1), world),
        "source": lambda: broadcast_object_list([None], world, source=world.rank),
        "no source": lambda: broadcast_object_list([None], world, source=world.size),
        "one has no source": lambda: broadcast_object_list([None], world, source=-world.rank),
        "tuple": lambda: broadcast_object_list((None,) if world.rank == 0 else [None], world),  # type: ignore[arg-type]
        "no pickle": lambda: broadcast_object_list([lambda: 1], world),
    }
    outcomes = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            outcomes[name] = type(error).__name__, str(error)
    assert broadcast_object_list([world.rank], world) == [0]
    return outcomes


@pytest.mark.parametrize("size", [2, 3])
def test_a_list_takes_the_items_of_one_rank(size: int) -> None:
    """In place, and returned; what does not fit raises on every rank."""
    first, second, *_ = run_ranks(replace_lists, size)
    wrong = CollectiveMismatchError.__name__
    assert first["length"] == second["length"]
    assert "rank 0: broadcast_object_list(from_process=0): a list of 1" in first["length"][1]
    assert "rank 1: broadcast_object_list(from_process=0): a list of 2" in first["length"][1]
    assert first["length"][1].endswith(
        "a list of the same length on every rank; where there is nothing to send, of None."
    )
    assert first["source"] == second["source"]
    assert first["source"][1].startswith("The ranks called broadcast_object_list with different options.")
    text = f"broadcast_object_list(from_process={size}): the group has {size} ranks; choose one of 0 to {size - 1}."
    assert first["no source"] == second["no source"] == ("ValueError", text)
    assert [first["one has no source"][0], second["one has no source"][0]] == [wrong, "ValueError"]
    assert [first["tuple"][0], second["tuple"][0]] == ["TypeError", wrong]
    assert "broadcast_object_list(tuple): expected a list, whose items are replaced" in first["tuple"][1]
    assert "such as [None]." in second["tuple"][1]
    assert second["no pickle"][0] == wrong
    assert "lambda" in second["no pickle"][1]


def test_a_list_alone_is_returned_as_it_is() -> None:
    items = [lambda: 1]
    assert broadcast_object_list(items, ALONE) is items
    with pytest.raises(TypeError, match=r"broadcast_object_list\(str\): expected a list"):
        broadcast_object_list("text", ALONE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"broadcast_object_list\(from_process='a'\): the group has 1 ranks"):
        broadcast_object_list(items, ALONE, source="a")  # type: ignore[arg-type]


def in_pairs() -> list[Any]:
    world = World.current()
    pairs = [world.subgroup([0, 1]), world.subgroup([2, 3])]
    group = pairs[world.rank // 2]
    mine = torch.full((world.rank + 1,), world.rank)
    return [
        gather(mine, world, group).tolist(),
        reduce_tree(torch.tensor(world.rank), world, group=group).item(),
        gather_objects([world.rank], world, group),
        broadcast_object(world.rank, world, source=1, group=group),
        gather(torch.tensor(world.rank), world).tolist(),
    ]


def test_groups_have_collectives_of_their_own() -> None:
    results = run_ranks(in_pairs, 4)
    assert results[0] == results[1] == [[0, 1, 1], 1, [0, 1], 1, [0, 1, 2, 3]]
    assert results[2] == results[3] == [[2, 2, 2, 3, 3, 3, 3], 5, [2, 3], 3, [0, 1, 2, 3]]


def mismatched(first: bool, world: World, case: str) -> None:
    """Calls something on rank 0 that does not fit what rank 1 calls."""
    x, y = torch.zeros(4, 3), torch.zeros(4)
    big = torch.zeros(600, 600)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "structure": (lambda: gather({"a": x}, world), lambda: gather({"b": x}, world)),
        "container": (lambda: gather((x, y), world), lambda: gather([x, y], world)),
        "count": (lambda: gather((x, y), world), lambda: gather((x, y, y), world)),
        "dtype": (lambda: gather((x, y), world), lambda: gather((x, y.long()), world)),
        "trailing": (lambda: gather((x, y), world), lambda: gather((torch.zeros(4, 5), y), world)),
        "dims": (lambda: gather(x, world), lambda: gather(y, world)),
        "call": (lambda: gather(x, world), lambda: reduce_tree(x, world)),
        "large call": (lambda: gather(big, world), lambda: reduce_tree(big, world)),
        "reduction": (lambda: reduce_tree(x, world), lambda: reduce_tree(x, world, "mean")),
        "scale": (lambda: reduce_tree(x, world), lambda: reduce_tree(x, world, scale=2.0)),
        "shape": (lambda: reduce_tree(x, world), lambda: reduce_tree(x[:2], world)),
        "small and large": (lambda: reduce_tree(x, world), lambda: reduce_tree(torch.zeros(400_000), world)),
        "object": (lambda: gather(x, world), lambda: gather_objects(["a"], world)),
        "large object": (lambda: gather(x, world), lambda: gather_objects(["a" * 100_000], world)),
        "source": (lambda: broadcast_object(1, world, 0), lambda: broadcast_object(1, world, 1)),
        "no tensor": (lambda: gather(x, world), lambda: gather("text", world)),
        "no pickle": (lambda: gather_objects([1], world), lambda: gather_objects([lambda: 1], world)),
        "meta": (lambda: gather(big, world), lambda: gather(big.to("meta"), world)),
        "large meta": (lambda: reduce_tree(big, world), lambda: reduce_tree(big.to("meta"), world)),
        "sparse": (lambda: reduce_tree(x, world), lambda: reduce_tree(x.to_sparse(), world)),
        "no reduction": (lambda: reduce_tree(x, world), lambda: reduce_tree(x, world, "avg")),  # type: ignore[arg-type]
        "no reduction, large": (lambda: reduce_tree(big, world), lambda: reduce_tree(big, world, "avg")),  # type: ignore[arg-type]
        "no list": (lambda: gather_objects([1], world), lambda: gather_objects({}, world)),  # type: ignore[arg-type]
    }
    calls[case][0 if first else 1]()


CASES = (
    *(
        "structure",
        "container",
        "count",
        "dtype",
        "trailing",
        "dims",
        "call",
        "large call",
        "reduction",
        "scale",
        "shape",
    ),
    *("small and large", "object", "large object", "source", "no tensor", "no pickle", "meta"),
    *("large meta", "sparse", "no reduction", "no reduction, large", "no list"),
)


@ON_TWO
def raise_mismatches() -> dict[str, tuple[str, str, float]]:
    world = World.current()
    outcomes = {}
    for case in CASES:
        began = time.monotonic()
        try:
            mismatched(world.rank == 0, world, case)
        except Exception as error:
            outcomes[case] = (type(error).__name__, str(error), time.monotonic() - began)
        gathered = gather(torch.full((2,), world.rank), world)  # and life goes on
        assert gathered.tolist() == [0, 0, 1, 1]
    return outcomes


def test_calls_that_do_not_fit_raise_on_every_rank() -> None:
    """Another structure, dtype, dimension, call or option is an error with a table."""
    first, second = ON_TWO.run(raise_mismatches)
    own = {
        "no tensor": ("TypeError",),
        "no pickle": ("AttributeError", "PicklingError"),
        "meta": ("NotImplementedError",),
        "large meta": ("NotImplementedError",),
        "sparse": ("TypeError",),
        "no reduction": ("ValueError",),
        "no reduction, large": ("ValueError",),
        "no list": ("TypeError",),
    }
    for case in CASES:
        kind, text, seconds = first[case]
        assert kind == CollectiveMismatchError.__name__, (case, first[case])
        assert seconds < 5
        if case in own:
            assert second[case][0] in own[case], (case, second[case])
            assert f"rank 1: {second[case][0]}" in text
            assert "Correct the call on the ranks that show an error." in text
        else:
            assert second[case][:2] == (kind, text), case
    assert "rank 0: gather: data[0]: float32[*, 3]; 1 alike on all ranks" in first["trailing"][1]
    assert "rank 1: gather: data[0]: float32[*, 5]; 1 alike on all ranks" in first["trailing"][1]
    padding = (
        "all others must agree: pad the tensors to one shape first, with accelerator.pad_across_processes(tensors, "
    )
    assert [case for case in CASES if padding in first[case][1]] == ["trailing"]
    assert first["trailing"][1].endswith(f"{padding}dim=1).")
    assert "different collectives" in first["call"][1]
    options = [case for case in CASES if " with different options.\n" in first[case][1]]
    assert options == ["reduction", "scale", "source"]
    assert first["scale"][1].startswith("The ranks called reduce with different options.")
    assert first["scale"][1].endswith("Give the options of a collective the same values on every rank.")
    assert "rank 1: reduce('sum'): data: float32[4, 3]" in first["call"][1]
    assert "rank 1: gather: data[1]: int64[*]" in first["dtype"][1]
    assert "rank 0: gather: tuple(*, *); 2 alike" in first["container"][1]
    assert "rank 1: gather: list(*, *); 2 alike" in first["container"][1]
    assert "rank 1: reduce('sum'): data: float32[2, 3]" in first["shape"][1]
    assert "data is a str" in first["no tensor"][1]
    assert "rank 0: called reduce('sum')" in first["no reduction"][1]
    assert "rank 1: ValueError: reduce(reduction='avg')" in first["no reduction"][1]
    assert "Choose one of 'sum', 'mean', 'max', 'none'." in second["no reduction"][1]
    assert "rank 0: called gather_object" in first["no list"][1]
    assert "rank 1: gather_object" in first["object"][1]
    assert "rank 1: broadcast_object(source=1)" in first["source"][1]


@ON_TWO
def both_wrong() -> str:
    world = World.current()
    with pytest.raises(TypeError) as caught:
        gather(["one", 2.0][world.rank], world)
    assert gather(torch.zeros(1), world).shape == (2,)
    return str(caught.value)


def test_each_rank_reports_its_own_mistake_when_all_make_one() -> None:
    first, second = ON_TWO.run(both_wrong)
    assert "data is a str" in first
    assert "data is a float" in second


def test_the_table_joins_ranks_that_agree_and_is_short() -> None:
    wide: list[Any] = [(f"data[{index}]", torch.float32, ["*", index]) for index in range(20)]
    good = describe("gather", "tuple(...)", wide)
    odd = describe("gather", "tuple(...)", [(path, torch.int64, sizes) for path, _, sizes in wide])
    text = str(mismatch([good, good, good, odd, good]))
    assert "rank 0, 1, 2, 4: gather: data[0]: float32[*, 0]" in text
    assert "data[7]: int64[*, 7] and 12 more\n" in text
    assert text.endswith(
        "Structure, dtypes and shapes must be the same on every rank; for gather, all but the first dimension."
    )
    assert "rank 0-2: " in str(mismatch([good, good, good, odd]))
    wider = describe("gather", "tuple(...)", [("data", torch.float32, ["*", 2, 3, 4])])
    other = describe("gather", "tuple(...)", [("data", torch.float32, ["*", 5, 3, 6])])
    assert str(mismatch([wider, other])).endswith("pad_across_processes(tensors, dim=1), then the same with dim=3.")
    assert "a call that stands under a condition" in str(mismatch([good, describe("reduce('sum')")]))


leaves = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple))


@given(specs=st.lists(leaves, max_size=5), data=st.data())
def test_any_tensors_survive_packing(specs: list[Any], data: st.DataObject) -> None:
    """The messages of two ranks are written, joined and read in one process."""
    counts = st.lists(st.integers(0, 4) | st.just(300), min_size=len(specs), max_size=len(specs))
    rows = [data.draw(counts), data.draw(counts)]
    description = describe("gather", "", [("", dtype, ["*", *sizes]) for dtype, sizes in specs])
    cpu = torch.device("cpu")
    letters = [Letter(description, specs, rows[rank], cpu) for rank in range(2)]
    assert letters[0].digest == letters[1].digest
    tensors = [
        [rows_of(rank, dtype, count, *sizes) for (dtype, sizes), count in zip(specs, rows[rank], strict=True)]
        for rank in range(2)
    ]
    capacity = channel_module.capacity_for(max(letter.size for letter in letters))
    frames = [channel_module._Frame(capacity, 2, cpu) for _ in range(2)]
    views = [frame.write(letter, given) for frame, letter, given in zip(frames, letters, tensors, strict=True)]
    frames[0].received.copy_(torch.cat([frame.sent for frame in frames]))
    parts = frames[0].parts(letters[0], [header[1:] for header in views[0].tolist()])
    for index in range(len(specs)):
        for rank in range(2):
            assert parts[index][rank].shape == tensors[rank][index].shape
            assert torch.equal(parts[index][rank], tensors[rank][index])


@given(st.integers(0, 1 << 40))
def test_capacities_are_at_most_an_eighth_larger_than_needed(need: int) -> None:
    capacity = channel_module.capacity_for(need)
    assert need <= capacity <= max(need * 9 // 8, need + channel_module.FRAME_STEP)
    assert capacity % channel_module.FRAME_STEP == 0


def test_bytes_travel_as_tensors() -> None:
    for content in (b"", b"abc"):
        assert bytes(to_bytes(from_bytes(bytearray(content)))) == content


def test_digests_do_not_depend_on_the_process() -> None:
    """Python's own hash differs between processes; ours is computed from the text."""
    letter = Letter(describe("gather"), [], [], torch.device("cpu"))
    assert letter.digest == channel_module._digest(json.dumps({"call": "gather", "structure": "", "leaves": []}))
    assert channel_module._digest("a") == int.from_bytes(bytes.fromhex("40f89e395b66422f"), "little", signed=True)


@ON_TWO
def maxima_with_nan() -> list[bool]:
    world = World.current()
    found = []
    for size in (4, 10**6):
        values = torch.ones(size)
        if world.rank == 1:
            values[1] = torch.nan
        largest = reduce_tree(values, world, "max")
        found += [bool(largest[1].isnan()), largest.isnan().sum().item() == 1]
    return found


@ON_TWO
def reduce_what_backends_lack() -> None:
    world, large = World.current(), 1 << 20
    for dtype in (torch.int16, torch.uint16, torch.uint32):
        for reduction in ("sum", "max"):
            total = reduce_tree(torch.full((large,), 3 + world.rank, dtype=dtype), world, reduction)
            assert (total.dtype, total[0].item(), total[-1].item()) == (dtype, *[7 if reduction == "sum" else 4] * 2)
    total = reduce_tree(torch.full((large,), 1.5).to(torch.float8_e4m3fn), world, "sum")
    assert (total.dtype, total[0].float()) == (torch.float8_e4m3fn, 3)


def test_dtypes_that_backends_cannot_reduce_travel_in_others() -> None:
    ON_TWO.run(reduce_what_backends_lack)


def test_the_maximum_of_a_nan_is_nan_in_small_tensors_and_in_large_ones():
    for found in ON_TWO.run(maxima_with_nan):
        assert all(found)

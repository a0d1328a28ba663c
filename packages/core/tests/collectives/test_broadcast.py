"""Tensors of one rank for all: small trees in one exchange, large ones straight into the results."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist
from together import Together

from accel_core.collectives.broadcast import PARCEL, broadcast
from accel_core.processes.channel import Channel
from accel_core.processes.world import World

Pair = namedtuple("Pair", "first second")

ON = {size: Together(size) for size in (2, 3)}

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


def tree_of(rank, count):
    """Every dtype, and every kind of tensor; `count` elements in some of them."""
    values = (torch.arange(count) + rank) % 100
    leaf = torch.full((count,), float(rank), requires_grad=True)
    return OrderedDict(
        dtypes=[values.to(dtype) for dtype in DTYPES],
        scalar=torch.tensor(rank),
        empty=torch.zeros(0, 3),
        pair=Pair(leaf, (leaf * 2,)),
        transposed=values.reshape(2, -1).t(),
        strided=values[::2],
        conjugate=torch.full((3,), rank + 1j).conj(),
        parameter=torch.nn.Parameter(torch.full((2, 2), float(rank))),
    )


def check_equal(got, expected):
    assert type(got) is OrderedDict
    assert type(got["pair"]) is Pair
    for key, leaves in expected.items():
        pairs = [(got[key], leaves)]
        if key == "dtypes":
            pairs = list(zip(got[key], leaves, strict=True))
        elif key == "pair":
            pairs = [(got[key].first, leaves.first), (got[key].second[0], leaves.second[0])]
        for one, other in pairs:
            assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, False)
            assert type(one) is torch.Tensor
            assert torch.equal(one.to(torch.complex128), other.detach().to(torch.complex128)), key


def give_to_all(counts):
    world = World.current()
    for count in counts:
        for source in range(world.size):
            mine = tree_of(world.rank, count)
            got = broadcast(mine, world, source)
            check_equal(got, tree_of(source, count))
            got["scalar"] += 5
            got["transposed"] += 5
            assert mine["scalar"].item() == world.rank, "the results are new tensors, on the source too"
            assert torch.equal(mine["transposed"], tree_of(world.rank, count)["transposed"])
    first = broadcast(torch.tensor([world.rank]), world)
    broadcast(torch.tensor([7]), world)
    assert first.tolist() == [0], "the result is no view of a buffer"
    with torch.inference_mode():
        assert broadcast(torch.full((400_000,), world.rank), world, 1).sum() == 400_000
    assert broadcast({}, world) == {}


for together in ON.values():
    together.add(give_to_all, (4, 50_000, 2_000_000))


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_tensors_of_the_source(size):
    """Any dtype, shape and layout in memory, small, packed together, and large."""
    ON[size].run(give_to_all, (4, 50_000, 2_000_000))


@ON[2]
def give_to_placeholders():
    world = World.current()
    for count in (3, 2_000_000):
        mine = torch.full((count,), world.rank, device="cpu" if world.rank == 1 else "meta")
        got = broadcast([mine], world, 1)[0]
        assert got.device == world.device
        assert got.sum() == count


def test_a_meta_tensor_is_enough_where_nothing_is_sent():
    ON[2].run(give_to_placeholders)


@ON[3]
def in_pairs():
    world = World.current()
    group = [world.subgroup([0, 1]), world.subgroup([2])][world.rank // 2]
    mine = torch.tensor(world.rank)
    return broadcast(mine, world, 1 if world.rank < 2 else 0, group).item()


def test_a_source_is_counted_within_its_group():
    assert ON[3].run(in_pairs) == [1, 1, 2]


@ON[2]
def calls_made():
    world = World.current()
    calls = []
    broadcast_one, exchange = dist.broadcast, Channel.exchange

    def counting(tensor, **options):
        calls.append(tensor.numel())
        return broadcast_one(tensor, **options)

    def exchanging(*arguments):
        calls.append("exchange")
        return exchange(*arguments)

    dist.broadcast, Channel.exchange = counting, exchanging
    try:
        broadcast([torch.zeros(3), torch.zeros(4)], world)
        small, calls[:] = list(calls), []
        broadcast(
            [torch.zeros(10), torch.zeros(PARCEL), torch.zeros(5), torch.zeros(0), torch.zeros(PARCEL // 4 - 5)], world
        )
    finally:
        dist.broadcast, Channel.exchange = broadcast_one, exchange
    return small, calls


def test_small_trees_take_one_collective_and_large_tensors_travel_alone():
    for small, large in ON[2].run(calls_made):
        assert small == ["exchange"]
        assert large == ["exchange", 4 * PARCEL, 60, PARCEL - 20]


@ON[2]
@ON[3]
def raise_everywhere():
    world = World.current()
    last = world.rank == world.size - 1
    big = torch.zeros(600, 600)
    calls = {
        "shape": lambda: broadcast(torch.zeros(3 if last else 2), world),
        "large shape": lambda: broadcast(torch.zeros(600_000 if last else 2), world),
        "dtype": lambda: broadcast(big.double() if last else big, world),
        "structure": lambda: broadcast([big] if last else (big,), world),
        "source": lambda: broadcast(big, world, int(last)),
        "no source": lambda: broadcast(big, world, world.size),
        "one has no source": lambda: broadcast(big, world, -1 if last else 0),
        "no tensor": lambda: broadcast("text" if last else big, world),
        "sparse": lambda: broadcast(big.to_sparse() if last else big, world),
        "meta source": lambda: broadcast([big.to("meta")], world),
        "small meta source": lambda: broadcast([torch.zeros(1, device="meta")], world),
    }
    outcomes = {}
    for name, call in calls.items():
        try:
            outcomes[name] = ("nothing", str(call()))
        except Exception as error:
            outcomes[name] = (type(error).__name__, str(error))
        assert broadcast(torch.tensor(world.rank), world).item() == 0  # and life goes on
    return outcomes


@pytest.mark.parametrize("size", [2, 3])
def test_what_does_not_fit_raises_on_every_rank(size):
    outcomes = ON[size].run(raise_everywhere)
    first, last = outcomes[0], outcomes[-1]
    wrong = "CollectiveMismatchError"
    for name in ("shape", "large shape", "dtype", "structure", "source"):
        assert all(each[name] == (wrong, first[name][1]) for each in outcomes), name
    assert f"rank {size - 1}: broadcast(from_process=0): data: float32[3]" in first["shape"][1]
    assert "broadcast with different options" in first["source"][1]
    for each in outcomes:
        text = f"broadcast(from_process={size}): the group has {size} ranks; choose one of 0 to {size - 1}."
        assert each["no source"] == ("ValueError", text)
    for name, own in {"one has no source": "ValueError", "no tensor": "TypeError", "sparse": "TypeError"}.items():
        assert [each[name][0] for each in outcomes] == [wrong] * (size - 1) + [own], name
        assert f"rank {size - 1}: {own}: {last[name][1]}" in first[name][1]
    assert "broadcast() takes tensors in nested tuples, lists and dicts; data is a str." in last["no tensor"][1]
    for name in ("meta source", "small meta source"):
        assert first[name][0] == "NotImplementedError"
        assert [each[name][0] for each in outcomes[1:]] == [wrong] * (size - 1)


def test_alone_the_tree_comes_back():
    world = World.current(cpu=True)
    tree = {"a": [torch.ones(2)], "b": torch.tensor(1)}
    assert broadcast(tree, world) is tree
    with pytest.raises(TypeError, match=r"broadcast\(\) takes tensors .*; data\['a'\] is a str"):
        broadcast({"a": "text"}, world)
    with pytest.raises(ValueError, match=r"broadcast\(from_process=1\): the group has 1 ranks; choose one of 0 to 0\."):
        broadcast(tree, world, 1)

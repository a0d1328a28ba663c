"""Padding across processes: every leaf, every dtype, one collective; and batches that are filled to be split."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from together import Together

from accel_core.collectives.padding import pad_across_processes, pad_input_tensors
from accel_core.collectives.reduce_gather import gather
from accel_core.processes.channel import Channel
from accel_core.processes.world import World

Pair = namedtuple("Pair", "first second")

ON = {size: Together(size) for size in (2, 3)}

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn),
]


def rows_of(rank, size, dtype=torch.float32):
    """`size` rows of two; a rank may have none."""
    return ((torch.arange(2 * size).reshape(size, 2) + rank) % 2 + 1).to(dtype)


@ON[2]
@ON[3]
def pad_many():
    world = World.current()
    sizes = [(3 * rank) % 4 for rank in range(world.size)]  # 0, 3, 2
    size, largest = sizes[world.rank], max(sizes)
    for dtype in DTYPES:
        mine = rows_of(world.rank, size, dtype)
        kept = mine.clone()
        for dim, tensor in ((0, mine), (-2, mine), (1, mine.t()), (-1, mine.t())):
            for first in (False, True):
                padded = pad_across_processes(tensor, world, dim, 1, first)
                assert (padded.dtype, padded.shape[dim]) == (dtype, largest)
                rows = (padded if dim in (0, -2) else padded.t()).to(torch.complex64)
                gap = largest - size
                values, filling = (rows[gap:], rows[:gap]) if first else (rows[:size], rows[size:])
                assert torch.equal(values, kept.to(torch.complex64))
                assert torch.equal(filling, torch.ones(gap, 2, dtype=torch.complex64))
        assert torch.equal(mine.to(torch.complex64), kept.to(torch.complex64))


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_are_padded_to_the_largest_rank(size):
    """Along any dimension, before or behind, for every dtype."""
    ON[size].run(pad_many)


@ON[2]
@ON[3]
def pad_nested():
    world = World.current()
    rank, last = world.rank, world.size - 1
    tree = {
        "pair": Pair(torch.full((rank + 1,), rank), [torch.full((rank + 1, 3 - rank), rank)]),
        "scalar": torch.tensor(rank),
        "flat": torch.full((2,), rank),
    }
    padded = pad_across_processes(tree, world, pad_index=-100)
    assert type(padded["pair"]) is Pair
    assert padded["pair"].first.tolist() == [rank] * (rank + 1) + [-100] * (last - rank)
    assert padded["pair"].second[0].shape == (world.size, 3 - rank), "other dimensions may differ"
    assert padded["scalar"] is tree["scalar"]
    assert padded["flat"] is tree["flat"], "what is as large as any stays itself"
    both = pad_across_processes(padded, world, 1)
    assert both["pair"].second[0].shape == (world.size, 3)
    assert both["pair"].first is padded["pair"].first, "there is no second dimension"
    assert gather(both, world)["pair"].second[0].shape == (world.size**2, 3)
    assert pad_across_processes({}, world) == {}
    assert pad_across_processes([torch.tensor(rank)], world, 3)[0].item() == rank
    for value in (float("nan"), float("inf"), 0.1, 2**30):
        padded = pad_across_processes(torch.zeros(rank, dtype=torch.bfloat16), world, pad_index=value)
        assert padded.isnan().sum() == (last - rank if value != value else 0)
        assert padded[:rank].tolist() == [0] * rank
        assert torch.allclose(padded[rank:], torch.tensor(value, dtype=torch.bfloat16), equal_nan=True)
    leaf = torch.ones(rank + 1, requires_grad=True)
    pad_across_processes(leaf * 3, world).sum().backward()
    assert leaf.grad.tolist() == [3.0] * (rank + 1)
    with torch.inference_mode():
        assert pad_across_processes(torch.ones(rank), world).shape == (last,)


@pytest.mark.parametrize("size", [2, 3])
def test_nested_structures_are_really_padded(size):
    ON[size].run(pad_nested)


@ON[3]
def in_groups():
    world = World.current()
    groups = [world.subgroup([0, 1]), world.subgroup([2])]
    return len(pad_across_processes(torch.zeros(world.rank), world, group=groups[world.rank // 2]))


def test_a_group_pads_by_itself():
    assert ON[3].run(in_groups) == [1, 1, 2]


@ON[2]
def exchanges():
    world = World.current()
    counts, exchange = [], Channel.exchange

    def counting(channel, letter, tensors):
        counts.append(letter.size)
        return exchange(channel, letter, tensors)

    Channel.exchange = counting
    try:
        pad_across_processes([torch.zeros(1000 * (world.rank + 1), 5) for _ in range(20)], world)
    finally:
        Channel.exchange = exchange
    return counts


def test_one_collective_carries_all_sizes_and_no_values():
    for (size,) in ON[2].run(exchanges):
        assert size < 500


@ON[2]
@ON[3]
def raise_everywhere():
    world = World.current()
    last = world.rank == world.size - 1
    x = torch.zeros(2 + world.rank, 2)
    calls = {
        "dims": lambda: pad_across_processes(x[0] if last else x, world),
        "dims out of reach": lambda: pad_across_processes(torch.zeros((2,) * (1 + last)), world, 2),
        "dtype": lambda: pad_across_processes(x.long() if last else x, world),
        "structure": lambda: pad_across_processes({"a": x} if last else {"b": x}, world),
        "option": lambda: pad_across_processes(x, world, pad_index=int(last)),
        "no tensor": lambda: pad_across_processes(["text"] if last else [x], world),
        "value": lambda: pad_across_processes([x, torch.zeros(2, dtype=torch.uint8)], world, 0, -100),
        "no number": lambda: pad_across_processes(x, world, pad_index="0" if last else 0),
        "no dim": lambda: pad_across_processes(x, world, dim=(0, 1) if last else 0),
    }
    outcomes = {}
    for name, call in calls.items():
        try:
            outcomes[name] = ("nothing", str(call()))
        except Exception as error:
            outcomes[name] = (type(error).__name__, str(error))
        assert len(pad_across_processes(torch.zeros(world.rank), world)) == world.size - 1  # and life goes on
    return outcomes


@pytest.mark.parametrize("size", [2, 3])
def test_what_does_not_fit_raises_on_every_rank(size):
    """Also where a leaf does not have the dimension."""
    outcomes = ON[size].run(raise_everywhere)
    first, last = outcomes[0], outcomes[-1]
    wrong = "CollectiveMismatchError"
    for name in ("dims", "dims out of reach", "dtype", "structure", "option"):
        assert all(each[name] == (wrong, first[name][1]) for each in outcomes), name
    table = "pad_across_processes(dim=0, pad_index=0, pad_first=False): data: float32"
    assert f"rank {size - 1}: {table}[*]" in first["dims"][1]
    assert f": {table}[*, *]" in first["dims"][1]
    assert first["dims"][1].endswith("structure, dtypes and numbers of dimensions must be the same on every rank.")
    assert "pad_across_processes with different options" in first["option"][1]
    for each in outcomes:
        assert each["value"][0] == "ValueError"
        assert "(pad_index=-100): uint8 cannot hold this value. Pass one that every tensor can" in each["value"][1]
    for name in ("no tensor", "no number", "no dim"):
        assert [each[name][0] for each in outcomes] == [wrong] * (size - 1) + ["TypeError"]
        assert f"rank {size - 1}: TypeError: {last[name][1]}" in first[name][1]
    assert "data[0] is a str" in last["no tensor"][1]


@pytest.mark.parametrize(
    "value, dtype",
    [
        *((1.5, torch.int64), (-1, torch.uint8), (2, torch.bool), (float("nan"), torch.int64), (2**70, torch.int64)),
        *((1e6, torch.float16), (1e6, torch.float8_e4m3fn), (float("inf"), torch.float8_e4m3fn), (1j, torch.float32)),
        (10**40, torch.float32),
    ],
)
def test_a_value_that_a_dtype_would_change_is_refused(value, dtype):
    """torch cuts, wraps and saturates most of these in silence."""
    with pytest.raises(ValueError, match=r"pad_index=.* cannot hold this value\. Pass one that every tensor can hold"):
        pad_across_processes(torch.zeros(2).to(dtype), World.current(cpu=True), pad_index=value)


def test_alone_the_tree_comes_back_and_mistakes_are_seen():
    world = World.current(cpu=True)
    tree = {"a": [torch.ones(2, requires_grad=True)], "b": torch.tensor(1)}
    assert pad_across_processes(tree, world, 1, 5, True) is tree
    assert pad_across_processes(torch.zeros(()), world, pad_index=0.5).shape == ()
    assert pad_across_processes(torch.zeros((), dtype=torch.int64), world, pad_index=0.5).dtype == torch.int64
    with pytest.raises(TypeError, match=r"pad_across_processes\(\) takes tensors .*; data\['a'\] is a str"):
        pad_across_processes({"a": "text"}, world)
    for wrong in ({"dim": "0"}, {"pad_index": None}):
        with pytest.raises(TypeError):
            pad_across_processes(tree, world, **wrong)


def test_a_batch_is_filled_with_its_last_row_until_it_can_be_split():
    batch = {"x": torch.arange(6).reshape(3, 2), "weights": torch.ones(5), "name": "a"}
    filled = pad_input_tensors(batch, 3, 4)
    assert filled["x"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    assert filled["weights"] is batch["weights"]
    assert filled["name"] == "a"
    assert pad_input_tensors(batch, 3, 3) is batch
    assert pad_input_tensors(torch.ones(2, 5), 5, 4, dim=-1).shape == (2, 8)
    assert pad_input_tensors((torch.ones(1),), 1, 3)[0].shape == (3,)
    assert pad_input_tensors(torch.ones(0), 0, 3).shape == (0,)


def test_a_batch_size_that_no_tensor_has_is_refused():
    with pytest.raises(
        ValueError, match=r"batch_size=4, dim=0\): no tensor has that many rows; the shapes are \[\[3, 2\]\]"
    ):
        pad_input_tensors([torch.ones(3, 2), "text"], 4, 2)

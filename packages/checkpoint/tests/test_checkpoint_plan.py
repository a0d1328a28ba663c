"""Who writes what of a checkpoint, and what is read for a box: with plain tensors in place of ranks and files."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_checkpoint import flat_range
from accel_checkpoint.plan import Claim, Copy, StoredBox, StoredBoxes, Task, plan
from accel_core import CheckpointError
from accel_core.api.layouts import Box, Elementwise, Opaque, Partial, Piece, Replicated

WHOLE = Box((0, 0), (4, 3))
TOP, BOTTOM = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))


def tensor(*boxes, shape=(4, 3), dtype="torch.float32"):
    return Claim("elementwise", shape, dtype, boxes, nbytes=4 * sum(box.numel for box in boxes))


def opaque(part="whole", signature="Codes"):
    return Claim("opaque", signature=signature, part=part)


REPLICATED = Claim("replicated", (), "torch.float32", nbytes=4)
TERM = Claim("partial", (4, 3), "torch.float32", nbytes=48)


# Layouts: names and shapes, a number of ranks → for each rank the boxes of each name.


def cut(shape, dim, edges):
    """The parts of a tensor between the edges along one dim."""
    for start, stop in zip([0, *edges], [*edges, shape[dim]], strict=True):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, stop - start
        yield Box(tuple(offsets), tuple(sizes))


def chunks(shape, dim, world):
    """Equal parts, the last ones shorter or empty, as torch cuts them."""
    each = -(-shape[dim] // world)
    return cut(shape, dim, [min(each * number, shape[dim]) for number in range(1, world)])


def along(dim):
    def layout(shapes, world, draw):
        return each_name(shapes, world, lambda shape: chunks(shape, dim % len(shape), world))

    return layout


def each_name(shapes, world, boxes_of):
    """One box per rank; what has no dims is on all."""
    found = {name: list(boxes_of(shape)) if shape else [Box((), ())] * world for name, shape in shapes.items()}
    return [{name: [boxes[rank]] for name, boxes in found.items()} for rank in range(world)]


def uneven(shapes, world, draw):
    edges = lambda shape: sorted(draw.randint(0, shape[0]) for _ in range(world - 1))
    return each_name(shapes, world, lambda shape: cut(shape, 0, edges(shape)))


def everywhere(shapes, world, draw):
    return [{name: [Box.whole(shape)] for name, shape in shapes.items()} for _ in range(world)]


def grid(shapes, world, draw):
    """Cut in two dims; each tile is on some ranks, and some ranks have nothing."""
    ranks = [{name: [] for name in shapes} for _ in range(world)]
    for name, shape in shapes.items():
        bands = list(chunks(shape, 0, 2)) if shape else [Box((), ())]
        for band in bands:
            for tile in chunks(band.sizes, len(shape) - 1, 2) if shape else bands:
                place = Box(tuple(a + b for a, b in zip(tile.offsets, band.offsets, strict=True)), tile.sizes)
                for rank in draw.sample(range(world), draw.randint(1, world)):
                    ranks[rank][name].append(place)
    return ranks


def flat(shapes, world, draw):
    """One buffer of all parameters, cut where it happens to be."""
    total = sum(map(math.prod, shapes.values()))
    edges = [0, *sorted(draw.randint(0, total) for _ in range(world - 1)), total]
    ranks = [{} for _ in range(world)]
    begin = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        for rank in range(world):
            start, stop = (min(max(edge - begin, 0), size) for edge in edges[rank : rank + 2])
            ranks[rank][name] = flat_range(shape, start, stop)
        begin += size
    return ranks


LAYOUTS = [along(0), along(1), along(-1), uneven, everywhere, grid, flat]
model_shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4)


@given(
    shapes=model_shapes,
    saved=st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 5)),
    wanted=st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 5)),
    draw=st.randoms(use_true_random=False),
)
def test_what_some_ranks_save_in_one_layout_others_load_in_any_other(shapes, saved, wanted, draw):
    shapes = {f"p{number}": shape for number, shape in enumerate(shapes)}
    values = {name: torch.arange(math.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    files = save(saved[0](shapes, saved[1], draw), values)
    for boxes in wanted[0](shapes, wanted[1], draw):
        for name, box in [(name, box) for name, each in boxes.items() for box in each]:
            assert torch.equal(load(name, box, files), values[name][box.slices])


def save(layout, values):
    """What is in the files of all ranks: file → key → name, box and data."""
    descriptions = [
        {name: Claim.of(elementwise(values[name], boxes)) for name, boxes in rank.items()} for rank in layout
    ]
    files = {}
    for rank, tasks in enumerate(plan(descriptions)):
        assert all(task.box in layout[rank][task.name] for task in tasks)  # written from what the rank has
        files[f"rank-{rank}"] = {
            f"{task.name} {task.box}": (task.name, task.box, values[task.name][task.box.slices].clone())
            for task in tasks
        }
    return files


def elementwise(value, boxes):
    return Elementwise(tuple(value.shape), value.dtype, tuple(Piece(box, value[box.slices]) for box in boxes))


def load(name, box, files):
    stored = [
        StoredBox(place, file, key)
        for file, content in files.items()
        for key, (saved, place, _) in content.items()
        if saved == name
    ]
    result = torch.full(box.sizes, -1)
    for copy in StoredBoxes(name, stored).copies(box):
        data = files[copy.stored.file][copy.stored.key][2]
        result[copy.target.slices] = data[copy.source.slices]
    return result


def test_a_claim_says_what_an_entry_has_and_not_its_data():
    value = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert Claim.of(elementwise(value, [TOP, BOTTOM])) == Claim(
        "elementwise", (4, 3), "torch.bfloat16", (TOP, BOTTOM), nbytes=24
    )
    assert Claim.of(elementwise(value, [])) == Claim("elementwise", (4, 3), "torch.bfloat16")
    assert Claim.of(Replicated(value)) == Claim("replicated", (4, 3), "torch.bfloat16", nbytes=24)
    assert Claim.of(Partial(value)) == Claim("partial", (4, 3), "torch.bfloat16", nbytes=24)
    assert Claim.of(Opaque([value], "list", "left")) == Claim("opaque", signature="list", part="left")


def test_equal_boxes_are_written_once_and_the_bytes_are_balanced():
    draw = random.Random(0)
    names = {f"p{number}": tensor(Box((0,), (size,)), shape=(size,)) for number, size in enumerate([400, 300, 7, 0, 1])}
    names |= {f"q{number}": tensor(Box((0,), (size,)), shape=(size,)) for number, size in enumerate([50] * 40)}
    for world in (1, 2, 3, 4):
        shuffled = dict(draw.sample([*names.items()], len(names)))
        tasks = plan([shuffled] * world)
        assert sorted(task.name for each in tasks for task in each) == sorted(
            names.keys() - {"p3"}
        )  # it has no element
        loads = [sum(names[task.name].nbytes for task in each) for each in tasks]
        assert max(loads) - min(loads) <= 4 * 50


def test_boxes_that_one_rank_has_count_before_the_choice_of_others():
    alone, shared = Box((0,), (100,)), Box((0,), (60,))
    first = {"alone": tensor(alone, shape=(100,)), "shared": tensor(shared, shape=(60,))}
    assert plan([first, {"shared": first["shared"]}]) == [
        [Task("alone", alone, "whole")],
        [Task("shared", shared, "whole")],
    ]


def test_the_same_descriptions_give_the_same_plan():
    descriptions = [{f"p{n}": tensor(TOP, BOTTOM) for n in range(9)} | {"codes": opaque(f"{r % 2}")} for r in range(4)]
    assert plan(pickle.loads(pickle.dumps(descriptions))) == plan(descriptions)


def test_empty_boxes_and_boxes_that_a_rank_presents_twice_count_once():
    descriptions = [{"w": tensor(TOP, TOP, Box((4, 0), (0, 3)))}, {"w": tensor(BOTTOM)}, {"w": tensor()}, {}]
    assert plan(descriptions) == [[Task("w", TOP, "whole")], [Task("w", BOTTOM, "whole")], [], []]


def test_a_replicated_tensor_is_that_of_the_lowest_rank_that_has_it():
    assert plan([{}, {"step": REPLICATED}, {"step": REPLICATED}]) == [[], [Task("step", None, "whole")], []]


def test_of_a_partial_tensor_each_rank_writes_its_term():
    assert plan([{"g": TERM}, {"g": TERM}]) == [[Task("g", None, "rank 0")], [Task("g", None, "rank 1")]]


def test_of_an_opaque_value_each_part_is_written_once_by_ranks_with_little_to_do():
    left, right = {"codes": opaque("left")}, {"codes": opaque("right")}
    first, *others = plan([{**left, "step": REPLICATED}, left, right, right])
    assert first == [Task("step", None, "whole")]
    assert others == [[Task("codes", None, "left")], [Task("codes", None, "right")], []]


def test_values_of_no_known_size_are_spread_too():
    tasks = plan([{f"extra{number}": opaque() for number in range(6)}] * 3)
    assert [len(each) for each in tasks] == [2, 2, 2]


def test_the_members_write_all_of_the_state_that_they_share_with_others():
    names = {"w": tensor(WHOLE), "v": tensor(WHOLE), "step": REPLICATED, "codes": opaque()}
    tasks = plan([names] * 4, members=[3, 2])
    assert tasks[:2] == [[], []]
    assert sorted(task.name for each in tasks for task in each) == ["codes", "step", "v", "w"]
    assert Task("step", None, "whole") in tasks[2]


@pytest.mark.parametrize(
    ("claims", "flaw"),
    [
        ([tensor(TOP), tensor()], "w: [2:4, 0:3] is missing (shape (4, 3)): [0:2, 0:3] on rank 0; nothing on rank 1\n"),
        ([tensor(TOP), None, tensor(TOP)], "[0:2, 0:3] on ranks 0, 2; nothing on rank 1\n"),
        ([tensor(WHOLE), tensor(TOP)], "w: [0:2, 0:3] is there more than once (shape (4, 3)): [0:4, 0:3] on rank 0"),
        ([tensor(Box((0, 0), (5, 3)))], "w: [0:5, 0:3] is out of bounds (shape (4, 3))"),
        (
            [tensor(TOP), tensor(BOTTOM, dtype="torch.bfloat16")],
            "w: the ranks differ: elementwise (4, 3) torch.float32 on rank 0; elementwise (4, 3) torch.bfloat16 on rank 1\n",
        ),
        (
            [REPLICATED, opaque(), REPLICATED],
            "w: the ranks differ: replicated () torch.float32 on ranks 0, 2; opaque on rank 1\n",
        ),
        ([tensor(TOP), tensor(BOTTOM, shape=(5, 3))], "(4, 3) torch.float32 on rank 0; elementwise (5, 3)"),
        ([TERM, None, TERM, None], "w: the terms of ranks 1, 3 are missing\n"),
        (
            [opaque("a"), opaque("b"), opaque("a", "Scales")],
            "w: the ranks differ about the part 'a': Codes on rank 0; Scales on rank 2\n",
        ),
    ],
)
def test_what_is_not_presented_as_a_whole_is_refused_with_what_each_rank_has(claims, flaw):
    descriptions = [{} if claim is None else {"w": claim, "fine": opaque()} for claim in claims]
    with pytest.raises(CheckpointError) as refused:
        plan(descriptions)
    text = str(refused.value)
    assert flaw in text
    assert text.startswith(
        "The state of all ranks was to be saved, but together they do not present each element exactly"
    )
    assert ": 1 of 2 names.\n" in text
    assert text.endswith("correct the model_state or the optimizer_state of the strategy.")


@pytest.mark.parametrize(
    ("claim", "others", "flaw"),
    [
        (tensor(TOP), tensor(BOTTOM), "w: [2:4, 0:3] is missing (shape (4, 3)): [0:2, 0:3] on ranks 2, 3"),
        (None, tensor(WHOLE), "w: [0:4, 0:3] is missing (shape (4, 3)): nothing on ranks 2, 3"),
        (None, REPLICATED, "w: it is only on ranks 0, 1\n"),
        (TERM, TERM, "w: the terms of ranks 0, 1 are missing"),
        (opaque("right"), opaque("left"), "w: the part 'left' is only on ranks 0, 1\n"),
    ],
)
def test_a_node_that_does_not_hold_all_of_the_state_is_refused(claim, others, flaw):
    descriptions = [{"w": others}] * 2 + [{} if claim is None else {"w": claim}] * 2
    plan(descriptions)  # together the nodes hold it
    with pytest.raises(CheckpointError) as refused:
        plan(descriptions, members=[2, 3])
    text = str(refused.value)
    assert flaw in text
    assert text.startswith(
        "Every node was to save all of the state, but this one (ranks 2, 3) does not hold it: 1 of 1 n"
    )
    assert text.endswith("Use ProjectConfiguration(save_on_each_node=False), with a folder that all nodes share.")


def test_long_lists_in_messages_end_with_a_count():
    names = {f"w{number}": tensor(*(Box((row, 0), (1, 1)) for row in range(4))) for number in range(11)}
    names["many"] = replace(names["w0"], boxes=tuple(Box((0, column), (1, 1)) for column in range(10)), shape=(1, 12))
    with pytest.raises(CheckpointError) as refused:
        plan([{"many": names.pop("many"), **names}] * 20)
    text = str(refused.value)
    assert "[0:1, 7:8] and 2 more on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more\n" in text
    assert text.count("w6:") == 1
    assert "w7" not in text
    assert "\n  and 4 more\nGive all ranks" in text


def test_only_boxes_that_have_something_are_read_in_order():
    rows = [StoredBox(Box((row, 0), (2, 3)), f"file-{row}", "w") for row in (4, 0, 2)]
    assert StoredBoxes("w", rows).copies(Box((1, 1), (2, 2))) == [
        Copy(rows[1], source=Box((1, 1), (1, 2)), target=Box((0, 0), (1, 2))),
        Copy(rows[2], source=Box((0, 1), (1, 2)), target=Box((1, 0), (1, 2))),
    ]
    assert StoredBoxes("w", rows).copies(Box((1, 1), (0, 2))) == []


class Watched(Box):
    """A box that counts how often it is looked at."""

    looks = 0

    def intersection(self, other):
        Watched.looks += 1
        return super().intersection(other)


@pytest.mark.parametrize("turned", [False, True])
def test_a_lookup_among_many_boxes_looks_at_few_of_them(turned):
    order = (lambda *numbers: numbers[::-1]) if turned else (lambda *numbers: numbers)
    rows = [StoredBox(Watched(order(row, 0), order(1, 3)), "file", f"w{row}") for row in range(10_000)]
    boxes, before = StoredBoxes("w", rows), Watched.looks
    assert [copy.stored.key for copy in boxes.copies(Box(order(5000, 0), order(3, 3)))] == ["w5000", "w5001", "w5002"]
    assert Watched.looks - before < 50


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([], "has 0 boxes of it, and [1:3, 0:3] is missing. Load"),
        ([TOP], "has 1 boxes of it, and [2:3, 0:3] is missing. Load"),
        ([TOP, BOTTOM, Box((2, 1), (1, 1))], "has 3 boxes of it, and [2:3, 1:2] is there more than once. Load"),
        ([TOP, Box((2,), (2,))], "has 2 boxes of it, some of another number of dims (1, 2). Load"),
    ],
)
def test_a_box_that_the_checkpoint_does_not_have_exactly_once_is_refused(boxes, why):
    stored = StoredBoxes("model.weight", [StoredBox(box, "file", "key") for box in boxes])
    with pytest.raises(CheckpointError) as refused:
        stored.copies(Box((1, 0), (2, 3)))
    text = str(refused.value)
    assert why in text
    assert text.startswith("[1:3, 0:3] of 'model.weight' is to be loaded, but the checkpoint ")
    assert text.endswith("Load another checkpoint.")

"""Messages from the rank that reads the data to the others, on real ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from accel_core import World
from accel_data.batch_codec import KEPT_STRUCTURES
from accel_data.batch_scatter import MEMORY, BatchScatter
from accel_testing.ranks import run_ranks


class Unreadable:
    """It can be pickled, and not unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def batches_for(rank, step):
    """Content that differs by rank and step: ragged, of many dtypes, with and without tensors, or nothing at all."""
    draw = random.Random(1000 * rank + step)
    generator = torch.Generator().manual_seed(1000 * rank + step)

    def tensor(*sizes):
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
        return torch.randn(sizes, generator=generator).to(dtype)

    makers = [
        lambda: {
            "x": tensor(draw.randint(0, 4), 3),
            "names": [str(i) for i in range(draw.randint(0, 3))],
            "none": None,
        },
        lambda: [tensor(draw.randint(0, 50)) for _ in range(3)],
        lambda: (tensor(draw.choice([1, 10, 3000]), 8), tensor()),
        lambda: {f"column {draw.randint(0, 200)}": tensor(2)},
        lambda: "text",
        lambda: None,
    ]
    return [(draw.choice(makers)(), [rank, step, i]) for i in range(draw.choice([0, 1, 2, 8]))]


def as_lists(node):
    if isinstance(node, torch.Tensor):
        return node.dtype, node.shape, node.float().tolist()
    if isinstance(node, dict):
        return {key: as_lists(child) for key, child in node.items()}
    return [as_lists(child) for child in node] if isinstance(node, (list, tuple)) else node


def everything_arrives(steps, with_subgroup):
    world = World.current(cpu=True)
    group = world.subgroup([1, 2]) if with_subgroup else None
    if with_subgroup and world.rank == 0:
        return 0
    scatter = BatchScatter(world, group)
    for step in range(steps):
        if scatter.rank == 0:
            scatter.post(5, step, [step, -1], [[], *[batches_for(rank, step) for rank in range(1, scatter.size)]])
        else:
            words, items = scatter.receive(5, step)
            assert words == [step, -1]
            assert as_lists(items) == as_lists(batches_for(scatter.rank, step)), step
            assert [type(batch) for batch, _ in items] == [type(batch) for batch, _ in batches_for(scatter.rank, step)]
    return scatter.size


def test_each_rank_gets_its_own_batches_whatever_they_are():
    assert run_ranks(everything_arrives, 3, 120, False) == [3, 3, 3]


def test_rank_zero_of_a_group_posts_to_its_members_only():
    assert run_ranks(everything_arrives, 3, 10, True) == [0, 2, 2]


def collectives_per_message():
    world = World.current(cpu=True)
    scatter = BatchScatter(world)
    scatter_of_torch, calls = dist.scatter, []

    def counting(tensor, *args, **kwargs):
        calls.append(len(tensor))
        return scatter_of_torch(tensor, *args, **kwargs)

    def message(step, content):
        calls.clear()
        if world.rank == 0:
            scatter.post(0, step, [], [[], [(content, [])] * 8])
        else:
            ((batch, _), *others) = scatter.receive(0, step)[1]
            assert len(others) == 7
            assert as_lists(batch) == as_lists(content)
        return tuple(calls)

    dist.scatter = counting
    try:
        steady = [message(i, {"x": torch.arange(800 + i % 3), "y": torch.arange(8)}) for i in range(12)]
        grown = [message(i, {"x": torch.arange(8000.0)}) for i in range(3)]
        shrunk = [message(i, {"x": torch.arange(8)}) for i in range(2 * MEMORY)]
        empty = [message(i, {"x": torch.arange(2), "name": "a" * i}) for i in range(4)]
    finally:
        dist.scatter = scatter_of_torch
    return steady, grown, shrunk, empty


def test_a_message_is_one_collective_unless_it_grows_and_its_size_follows_what_is_sent():
    (steady, grown, shrunk, empty), other = run_ranks(collectives_per_message, 2)
    assert other == (steady, grown, shrunk, empty)
    assert [len(calls) for calls in steady] == [2, *[1] * 11]
    assert [len(calls) for calls in grown] == [2, 1, 1]
    assert [len(calls) for calls in shrunk + empty] == [1] * (2 * MEMORY + 4)
    assert grown[-1] > steady[-1]
    assert [calls[0] for calls in shrunk] == [grown[-1][0]] * MEMORY + [4096] * MEMORY


def failures():
    """Each message fails in its own way, and the next one arrives all the same. Returns the errors of this rank."""
    world = World.current(cpu=True)
    scatter = BatchScatter(world)
    errors = []

    def works(step):
        content = {"x": torch.arange(3) + step, "name": str(step)}
        if world.rank == 0:
            scatter.post(1, step, [], [[], *[[(content, [])]] * 2])
        else:
            ((batch, _),) = scatter.receive(1, step)[1]
            assert as_lists(batch) == as_lists(content)

    def fails(step, *batches):
        try:
            if world.rank == 0:
                scatter.post(1, step, [], [[], *[[(batch, [])] for batch in batches]])
            else:
                scatter.receive(1, step)
        except Exception as error:
            errors.append((type(error), str(error)))

    def post_error(error):
        try:
            if world.rank == 0:
                scatter.post_error(error)
            else:
                scatter.receive(1, 2)
        except RuntimeError as raised:
            errors.append((type(raised), str(raised)))

    works(0)
    fails(1, {"new": torch.zeros(3)}, {"x": torch.zeros(1), "f": [lambda: 1]})
    works(2)
    post_error(KeyError("missing sample"))
    works(3)
    post_error(OSError("very long " * 10_000))
    works(4)
    if world.rank > 0:
        try:
            scatter.receive(2, 0)
        except RuntimeError as error:
            errors.append((type(error), str(error)))
    else:
        scatter.post(1, 5, [], [[], *[[({"another": torch.zeros(1)}, [])]] * 2])
    works(6)
    fails(7, {"fresh": torch.ones(1), "u": Unreadable()}, {"fresh": torch.ones(1), "u": Unreadable()})
    works(8)
    for i in range(KEPT_STRUCTURES + 2):
        fails(i, {f"column {i}": torch.zeros(1)}, {f"column {i}": torch.zeros(1)})
    return errors


def test_an_error_on_the_reading_rank_is_raised_on_all_and_the_mailbox_goes_on():
    sender, *receivers = run_ranks(failures, 3)
    ((kind, text),) = sender
    assert kind is TypeError
    assert "batch['f'][0] is a builtins.function that cannot be pickled" in text
    for errors in receivers:
        assert [kind for kind, _ in errors] == [RuntimeError] * 5
        unsendable, missing, long, apart, unreadable = [text for _, text in errors]
        assert (
            f"asked for from rank 0, which reads the data for the others, but it raised TypeError: {text[:40]}"
            in unsendable
        )
        assert "Traceback (most recent call last)" in unsendable
        assert "it raised KeyError: 'missing sample'" in missing
        assert "dispatch_batches=False" in missing
        assert long.count("very long") >= 10_000
        assert "The ranks left the loop at different batches: this rank asked for message 0 of iteration 2" in apart
        assert "sent message 5 of iteration 1" in apart
        assert "cannot be unpickled here: ValueError: invalid literal" in unreadable


def batches_received_in_inference_mode():
    world = World.current(cpu=True)
    scatter = BatchScatter(world)
    batch = torch.ones(3, requires_grad=True)
    for step in range(2):
        with torch.inference_mode(step == 0):
            if world.rank == 0:
                scatter.post(0, step, [], [[], [(batch, [])]])
                continue
            ((batch, _),) = scatter.receive(0, step)[1]
        assert not batch.is_inference()
        assert not batch.requires_grad
    return True


def test_batches_that_arrive_in_inference_mode_can_be_trained_on_afterwards():
    assert all(run_ranks(batches_received_in_inference_mode, 2))


def test_a_mailbox_of_one_rank_sends_nothing():
    scatter = BatchScatter(World.current(cpu=True))
    scatter.post(0, 0, [], [[("anything", [])]])
    scatter.post_error(ValueError("for nobody"))
    assert scatter.size == 1


@pytest.mark.parametrize("call", [lambda box: box.receive(0, 0), lambda box: box.post(0, 0, [], [])])
def test_a_call_that_does_not_fit_the_rank_is_a_mistake_of_the_caller(call):
    with pytest.raises(AssertionError, match="the others receive|one part per rank"):
        call(BatchScatter(World.current(cpu=True)))

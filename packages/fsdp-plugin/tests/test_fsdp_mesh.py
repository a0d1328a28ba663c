"""Meshes: the arrangement of processes, its groups, and what the core is told of it."""

import gc
import re
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist

from accel_core import World
from accel_fsdp import FSDP
from accel_fsdp.mesh import Meshes, Sizes
from accel_testing import run_ranks

TIMEOUT = timedelta(seconds=77)


def ranks_of(group):
    return None if group is None else dist.get_process_group_ranks(group)


def arranged(world, **sizes):
    """One arrangement, as plain data."""
    meshes = Meshes.build(world, **sizes)
    layout = meshes.layout()
    # Strategies come and go: the next one with this arrangement finds the same groups.
    again = Meshes.build(world, **sizes)
    assert again.fsdp.get_all_groups() == meshes.fsdp.get_all_groups()
    every = [mesh for mesh in (meshes.fsdp, meshes.tensor, meshes.context) if mesh is not None]
    groups = [*(group for mesh in every for group in mesh.get_all_groups()), meshes.data_group, meshes.gradient_group]
    summed = [dist_sum(mesh, world.rank) for mesh in every]
    return {
        "fsdp": dict(zip(meshes.fsdp.mesh_dim_names, map(ranks_of, meshes.fsdp.get_all_groups()), strict=True)),
        "tensor": None if meshes.tensor is None else ranks_of(meshes.tensor.get_group()),
        "context": None if meshes.context is None else ranks_of(meshes.context.get_group()),
        "one root": meshes.tensor is None or root_of(meshes.fsdp) is root_of(meshes.tensor),
        "shard": (layout.shard.index, layout.shard.count),
        "data": ranks_of(layout.data_group),
        "gradient": ranks_of(layout.gradient_group),
        "timeouts": {read_timeout(group) for group in groups if group is not None},
        "described": meshes.describe(),
        "sums": summed,
    }


def root_of(mesh):
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.9 knows it there

    return _mesh_resources.get_root_mesh(mesh)


def dist_sum(mesh, rank):
    import torch

    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return total.item()


def read_timeout(group):
    import torch

    return group._get_backend(torch.device("cpu")).options._timeout


def every_arrangement(arrangements):
    world = World.current(cpu=True, timeout=TIMEOUT)
    found = [arranged(world, **sizes) for sizes in arrangements]
    with pytest.raises(ValueError) as caught:
        Meshes.build(world, replicate=2, tensor=3)
    kept = weakref.ref(Meshes.build(world, replicate=2).root)
    gc.collect()
    return found, str(caught.value), kept() is None


@pytest.fixture(scope="module")
def four():
    arrangements = [
        {},
        {"replicate": 2},
        {"tensor": 2},
        {"context": 2},
        {"replicate": 2, "tensor": 2},
        {"context": 2, "tensor": 2},
        {"replicate": 4},
    ]
    return run_ranks(every_arrangement, 4, arrangements)


def of(four, rank, number, *keys):
    found = four[rank][0][number]
    return tuple(found[key] for key in keys)


def test_all_processes_are_shards_where_nothing_else_is_asked_for(four):
    for rank in range(4):
        assert of(four, rank, 0, "fsdp", "shard", "data", "tensor") == ({"shard": [0, 1, 2, 3]}, (rank, 4), None, None)
    assert of(four, 0, 0, "described") == ("shard 4 = 4 processes",)


def test_shards_are_neighbours_and_replicas_far_apart(four):
    assert of(four, 3, 1, "fsdp", "shard", "data") == ({"replicate": [1, 3], "shard": [2, 3]}, (3, 4), None)
    assert of(four, 3, 1, "described") == ("replicate 2 × shard 2 = 4 processes",)
    assert of(four, 2, 6, "fsdp") == ({"replicate": [0, 1, 2, 3], "shard": [2]},)


def test_tensor_peers_are_neighbours_and_read_the_same_data(four):
    for rank in range(4):
        assert of(four, rank, 2, "tensor", "shard") == ([rank // 2 * 2, rank // 2 * 2 + 1], (rank // 2, 2))
        assert of(four, rank, 2, "fsdp", "data") == ({"shard": [rank % 2, rank % 2 + 2]}, [rank % 2, rank % 2 + 2])
    assert all(of(four, rank, number, "one root") == (True,) for rank in range(4) for number in range(7))


def test_context_peers_read_the_same_data_and_share_gradients_and_shards(four):
    for rank in range(4):
        assert of(four, rank, 3, "context", "shard") == ([rank // 2 * 2, rank // 2 * 2 + 1], (rank // 2, 2))
        assert of(four, rank, 3, "fsdp", "data") == ({"shard": [0, 1, 2, 3]}, [rank % 2, rank % 2 + 2])
        assert of(four, rank, 3, "gradient") == ([0, 1, 2, 3],)
    assert of(four, 0, 3, "described") == ("shard 2 × context 2 = 4 processes",)
    assert of(four, 0, 2, "gradient") == (None,)


def test_three_dimensions_are_ordered_from_the_outside_in(four):
    assert of(four, 2, 4, "fsdp", "tensor", "shard") == ({"replicate": [0, 2], "shard": [2]}, [2, 3], (1, 2))
    assert of(four, 2, 5, "context", "tensor", "shard") == ([0, 2], [2, 3], (0, 1))
    assert of(four, 2, 5, "fsdp", "data", "gradient") == ({"shard": [0, 2]}, [2], [0, 2])


def test_every_group_has_the_timeout_of_the_world_and_works(four):
    for found, _, _ in four:
        assert all(each["timeouts"] == {TIMEOUT} for each in found)
    assert of(four, 1, 2, "sums") == ([1.0 + 3.0, 0.0 + 1.0],)


def test_numbers_that_do_not_divide_the_processes_are_refused_with_the_formula_on_every_rank(four):
    for _, message, _ in four:
        assert "replicate(2) * context_parallel(1) * tensor_parallel(3) = 6 does not divide the 4 processes" in message
        assert "whose product is one of 1, 2, 4" in message


def test_meshes_die_with_who_asked_for_them(four):
    assert all(died for _, _, died in four)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, -1, -1), (1, 1, 2)])
def test_one_process_is_not_divided(numbers):
    with pytest.raises(ValueError, match="does not divide the 1 process of this run"):
        Sizes.of(1, *numbers)


def alone():
    world = World.current(cpu=True, timeout=TIMEOUT)
    found = arranged(world)
    return found["fsdp"], found["shard"], found["data"], found["timeouts"], found["described"], found["sums"]


def test_one_process_is_a_mesh_of_one():
    assert run_ranks(alone, 1) == [({"shard": [0]}, (0, 1), None, {TIMEOUT}, "shard 1 = 1 process", [0.0])]


def test_a_number_of_shards_that_does_not_multiply_to_the_world_is_refused_with_the_formula():
    message = re.escape(
        "replicate(2) * shard(3) * context_parallel(1) * tensor_parallel(1) = 6 != 4, the number of processes"
    )
    with pytest.raises(ValueError, match=message):
        Sizes.of(4, 2, 1, 1, shard=3)
    assert Sizes.of(4, 2, 1, 1, shard=2) == Sizes.of(4, 2, 1, 1)
    with pytest.raises(ValueError, match=r"FSDP\(shard=0\): expected how many processes"):
        FSDP(shard=0)

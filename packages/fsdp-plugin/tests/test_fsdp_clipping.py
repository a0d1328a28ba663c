"""The norm over parts is the norm of the whole, whatever the parts lie on."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_core import World
from accel_fsdp.clipping import clip, total_norm
from accel_testing import run_ranks

NORMS = (1.0, 2.0, 3.5, math.inf)
LAYOUTS = ("shards", "replicas of shards", "replicas", "columns", "fewer rows than ranks", "plain")
MAX_NORM = 0.5


def whole_gradients():
    """One gradient for each layout, in their order."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (3, 4), (4,), (2, 6), (1, 2), (3,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def laid_out():
    """Parameters whose gradients are those of `whole_gradients`, on three meshes and on none."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = World.current(cpu=True)
    line = DeviceMesh.from_group(world.subgroup([0, 1]), "cpu")
    alone = [world.subgroup([rank]) for rank in (0, 1)]
    grid = DeviceMesh.from_group(
        [alone[world.rank], world.subgroup([0, 1])],
        "cpu",
        mesh=torch.tensor([[0, 1]]),
        mesh_dim_names=("replicate", "shard"),
    )
    places = [
        (line, [Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        (line, [Replicate()]),
        (grid, [Replicate(), Shard(1)]),
        (line, [Shard(0)]),
    ]
    found = []
    for number, gradient in enumerate(whole_gradients()):
        value = distribute_tensor(gradient, *places[number]) if number < len(places) else gradient
        parameter = nn.Parameter(torch.zeros_like(value))
        parameter.grad = value.clone()
        found.append(parameter)
    return found


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


class WithoutDoubles(TorchDispatchMode):
    """Refuses double precision, as Intel Arc, MPS and some NPUs do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(result, "dtype", None) is torch.float64:
            raise RuntimeError("Required aspect fp64 is not supported on the device")
        return result


def without_doubles():
    parameters = laid_out()
    vars(World.current()).pop("widest", None)  # asked once in a world
    try:
        with WithoutDoubles():
            return total_norm([parameter.grad for parameter in parameters], 3.5)
    finally:
        vars(World.current()).pop("widest", None)


def where_powers_are_summed():
    """The kind of device of what is reduced, where the world's is not that of the gradients."""
    reduced, patch = [], pytest.MonkeyPatch()

    def noted(tensor, *_, **__):
        reduced.append(tensor.device.type)
        raise InterruptedError

    gradient = laid_out()[0].grad
    patch.setattr(World, "current", lambda: SimpleNamespace(device=torch.device("meta"), widest=torch.float64))
    patch.setattr(dist, "all_reduce", noted)
    with pytest.raises(InterruptedError):
        total_norm([gradient], 2.0)
    patch.undo()
    return reduced


def some_are_complex(parameters):
    """The same parameters, but every other one and its gradient are complex."""
    found = []
    for number, parameter in enumerate(parameters):
        turned = parameter.grad * (3 + 4j) if number % 2 == 0 else parameter.grad
        found.append(nn.Parameter(torch.zeros_like(turned)))
        found[-1].grad = turned
    return found


def on_two_ranks():
    facts = {}
    for norm_type in NORMS:
        parameters = some_are_complex(laid_out())
        norm = clip(parameters, MAX_NORM, norm_type)
        facts["complex", norm_type] = norm, [whole(parameter.grad) for parameter in parameters]
    for norm_type in NORMS:
        parameters = laid_out()
        norm = clip(parameters, MAX_NORM, norm_type)
        facts[norm_type] = norm, [whole(parameter.grad) for parameter in parameters]
    parameters = laid_out()
    alone = {name: total_norm([parameters[number].grad], 2.0) for number, name in enumerate(LAYOUTS)}
    parameters[0].grad = None
    without = clip([parameters[0], parameters[2]], math.inf, 2.0)
    half = [parameter.grad.bfloat16() for parameter in parameters[1:]]
    parameters = laid_out()
    far = clip(parameters, 1e6, 2.0)
    narrow, devices = without_doubles(), where_powers_are_summed()
    dist.barrier()
    return {
        "narrow": narrow,
        "devices": devices,
        "clipped": facts,
        "alone": alone,
        "without": without,
        "half": total_norm(half, 2.0),
        "below": (far, [whole(parameter.grad) for parameter in parameters]),
    }


@pytest.fixture(scope="module")
def facts():
    return run_ranks(on_two_ranks, 2)


def norm_of(gradients, norm_type=2.0):
    return nn.utils.get_total_norm(gradients, norm_type)


@pytest.mark.parametrize("norm_type", NORMS)
def test_mixed_gradients_are_clipped_by_the_norm_of_the_whole(facts, norm_type):
    expected = whole_gradients()
    reference = [nn.Parameter(torch.zeros_like(gradient)) for gradient in expected]
    for parameter, gradient in zip(reference, expected, strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(reference, MAX_NORM, norm_type)
    for found, gradients in (rank["clipped"][norm_type] for rank in facts):
        torch.testing.assert_close(found, norm)
        for gradient, parameter in zip(gradients, reference, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("norm_type", NORMS)
def test_complex_gradients_count_by_their_magnitudes_beside_real_ones(facts, norm_type):
    reference = []
    for gradient in whole_gradients():
        reference.append(nn.Parameter(torch.zeros_like(gradient)))
        reference[-1].grad = gradient
    reference = some_are_complex(reference)
    norm = nn.utils.clip_grad_norm_(reference, MAX_NORM, norm_type)
    for found, gradients in (rank["clipped"]["complex", norm_type] for rank in facts):
        torch.testing.assert_close(found, norm)
        for gradient, parameter in zip(gradients, reference, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_devices_without_double_precision_find_the_norm_in_single_precision(facts):
    for rank in facts:
        torch.testing.assert_close(rank["narrow"], norm_of(whole_gradients(), 3.5))


def test_norms_of_parts_in_the_memory_of_the_host_are_reduced_on_the_device_of_the_world(facts):
    for rank in facts:
        assert rank["devices"] == ["meta"]


@pytest.mark.parametrize(("number", "layout"), list(enumerate(LAYOUTS)))
def test_each_layout_counts_every_element_once(facts, number, layout):
    for rank in facts:
        torch.testing.assert_close(rank["alone"][layout], norm_of([whole_gradients()[number]]))


def test_the_norm_is_a_plain_number_in_single_precision_at_least(facts):
    expected = norm_of(whole_gradients()[1:])
    for rank in facts:
        assert type(rank["half"]) is torch.Tensor
        assert rank["half"].dim() == 0
        assert rank["half"].dtype is torch.float32
        torch.testing.assert_close(rank["half"], expected, rtol=4e-3, atol=0)


def test_a_parameter_without_a_gradient_does_not_count(facts):
    for rank in facts:
        torch.testing.assert_close(rank["without"], norm_of([whole_gradients()[2]]))


def test_a_norm_below_the_limit_changes_nothing(facts):
    for rank in facts:
        norm, gradients = rank["below"]
        torch.testing.assert_close(norm, norm_of(whole_gradients()))
        assert all(map(torch.equal, gradients, whole_gradients()))


def test_no_gradients_have_the_norm_zero():
    assert clip([nn.Parameter(torch.ones(2))], 1.0, 2.0) == 0
    assert total_norm(iter([]), 2.0) == 0


def test_gradients_that_are_not_finite_give_a_norm_that_is_not():
    assert torch.isnan(total_norm([torch.tensor([1.0, math.nan])], 2.0))
    assert torch.isinf(total_norm([torch.tensor([1.0, math.inf])], 2.0))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf, math.nan])
def test_a_norm_that_is_no_sum_of_powers_is_refused(norm_type):
    with pytest.raises(ValueError, match="Leave norm_type out for the Euclidean norm"):
        total_norm([torch.ones(2)], norm_type)

"""Activation checkpointing: forwards run again in the backward, and nothing else changes."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from accel_core import World
from accel_core.api.strategy import compile_calls
from accel_fsdp.activation_checkpointing import checkpoint_units
from accel_testing import run_ranks


class Block(nn.Module):
    forwards = 0

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.dtypes = []

    def forward(self, x, scale=1.0, debug=False):
        Block.forwards += 1
        hidden = self.first(x) * scale
        self.dtypes.append(hidden.dtype)
        return x + self.second(self.drop(hidden.tanh())) * (2 if debug else 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=torch.tensor(0.5), debug=True)  # torch has an option of that name, too
        return x


def pair():
    torch.manual_seed(5)
    plain = Model()
    checkpointed = copy.deepcopy(plain)
    checkpoint_units(list(checkpointed.blocks))
    return plain, checkpointed, torch.randn(3, 4, requires_grad=True)


def gradients(model, x, context=None):
    """The loss, gradients by name, and how many forwards of blocks there were before the backward, and in it."""
    torch.manual_seed(7)
    Block.forwards = 0
    loss = model(x).square().sum()
    before = Block.forwards
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss, found, (before, Block.forwards - before)


def test_forwards_run_again_in_the_backward_with_the_same_random_numbers_and_gradients():
    plain, checkpointed, x = pair()
    loss, expected, counts = gradients(plain, x)
    again, found, counts_again = gradients(checkpointed, x)
    assert (counts, counts_again) == ((2, 0), (2, 2))
    assert torch.equal(loss, again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_autocast_is_the_same_when_a_forward_runs_again():
    _, checkpointed, x = pair()
    with torch.autocast("cpu", torch.bfloat16):
        loss = checkpointed(x).square().sum()
    loss.backward()
    assert [block.dtypes for block in checkpointed.blocks] == [[torch.bfloat16] * 2] * 2


def test_names_state_and_looks_are_unchanged_and_copies_are_checkpointed_too():
    plain, checkpointed, x = pair()
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    assert repr(checkpointed) == repr(plain)
    twin = copy.deepcopy(checkpointed)
    assert gradients(twin, x)[2] == (2, 2)
    assert all(parameter.grad is None for parameter in checkpointed.parameters())


def test_without_gradients_a_forward_runs_once_and_keeps_nothing():
    _, checkpointed, x = pair()
    Block.forwards = 0
    with torch.no_grad():
        assert checkpointed(x).grad_fn is None
    assert Block.forwards == 2


def test_units_inside_others_and_units_given_twice_are_checkpointed_once():
    _, checkpointed, x = pair()
    first = checkpointed.blocks[0]
    checkpoint_units([first.first, [first, first], checkpointed.blocks[1]])
    assert gradients(checkpointed, x)[2] == (2, 2)
    assert type(first.first) is nn.Linear


def kept(model, x):
    """How many numbers wait for the backward, parameters aside, and the gradients."""
    parameters, sizes = {parameter.data_ptr() for parameter in model.parameters()}, []

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().sum()
    loss.backward()
    return sum(sizes), [parameter.grad for parameter in model.parameters()]


def test_a_compiled_unit_keeps_its_inputs_only(monkeypatch):
    # torch's compiler shows its progress by tqdm, where that is installed, which leaves a thread that watches bars.
    with contextlib.suppress(ImportError):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch.manual_seed(5)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    model, x = copy.deepcopy(plain), torch.randn(3, 4, requires_grad=True)
    checkpoint_units(list(model))
    compile_calls(model, {"backend": "aot_eager", "use_regional_compilation": True})
    numbers, expected = kept(plain, x)
    fewer, found = kept(model, x)
    assert fewer == 2 * x.numel() + x.numel() < numbers  # the input of each unit, and that of the loss
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))


def test_no_units_are_refused():
    with pytest.raises(ValueError, match=r"activation_checkpointing=True\) was asked for, but the model has no units"):
        checkpoint_units([])


def test_a_forward_that_was_set_on_the_object_is_refused_before_anything_changes():
    model = Model()
    model.blocks[1].forward = lambda x: x
    with pytest.raises(ValueError, match="a Block among the units has a forward that was set on the object"):
        checkpoint_units(list(model.blocks))
    assert type(model.blocks[0]) is Block


def sharded(nested):
    """Forwards of blocks, calls of a hook, and whether gradients of a sharded model are those of a whole one."""
    from torch.distributed.fsdp import fully_shard

    from accel_fsdp.mesh import Meshes

    mesh = Meshes.build(World.current(cpu=True)).fsdp
    plain, model, x = pair()
    calls = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append("hook"))
        if nested:
            fully_shard(block.first, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _, expected, _ = gradients(plain, x)
    _, found, counts = gradients(model, x)
    whole = {name: gradient.full_tensor() for name, gradient in found.items()}
    return counts, len(calls), all(torch.allclose(whole[name], expected[name], atol=1e-6) for name in expected)


def both():
    return sharded(nested=False), sharded(nested=True)


def test_sharded_units_run_again_with_gathered_parameters_and_hooks_run_once():
    once = ((2, 2), 2, True)
    assert run_ranks(both, 2) == [(once, once)] * 2

"""The strategy "dispatch": models are built, spread and trained in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_big_model import Dispatch, has_offloaded_params, init_empty_weights, load_checkpoint_and_dispatch
from accel_checkpoint import write_weights
from accel_core import Accelerator, NotInstalledError, Precision, PrecisionPolicy, TorchDynamoPlugin, WorldError
from accel_core.api.component import how_to_install
from accel_core.api.launcher import find


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.norm(self.linear(x))


class Half(Precision):
    policy = PrecisionPolicy(param=torch.bfloat16, input=torch.bfloat16)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(4)))


X = torch.ones(2, 8)
BYTES = 4 * (64 + 8 + 8 + 8)  # of a block
HALF = {"cpu": 3 * BYTES}


@pytest.fixture
def weights(tmp_path):
    write_weights(net().state_dict(), tmp_path / "weights")
    return tmp_path / "weights"


def trained(accelerator, model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = model(X).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_model_is_built_without_memory_and_filled_where_it_goes(weights):
    accelerator = Accelerator(strategy=Dispatch(max_memory=HALF, no_split_module_classes=["Block"]), cpu=True)
    seen = []

    def factory():
        model = net()
        seen.append(model[0].linear.weight.device.type)
        return model

    model = accelerator.prepare(accelerator.build_model(factory, weights))
    assert seen == ["meta"]
    assert model.hf_device_map == {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"}
    assert model[2].linear.weight.is_meta
    for _ in range(2):
        assert torch.equal(model(X), net()(X))
    with pytest.raises(RuntimeError, match=r"backward\(\) reached a weight .* that is offloaded.*'fsdp'"):
        accelerator.backward(model(X).sum())
    assert "Sequential: 2 on cpu, 2 on disk" in str(accelerator.explain())


def test_what_is_on_disk_may_be_written_to_a_folder(weights, tmp_path):
    strategy = Dispatch(
        max_memory=HALF, offload_folder=tmp_path / "offloaded", no_split_module_classes="Block", dtype=torch.bfloat16
    )
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = accelerator.prepare_model(accelerator.build_model(net, weights), evaluation_mode=True)
    assert model.hf_device_map == {"": "cpu"}  # in half the bytes
    strategy = Dispatch({"0": "cpu", "1": "disk", "2": "disk", "3": "cpu"}, offload_folder=tmp_path / "offloaded")
    accelerator = Accelerator(strategy=strategy, cpu=True)
    for built in (accelerator.build_model(net, weights), accelerator.build_model(net)):
        assert torch.equal(accelerator.prepare(built)(X), net()(X))
        assert (tmp_path / "offloaded" / "1.linear.weight.dat").is_file()
    with pytest.raises(ValueError, match=r"on 'disk', and nothing says where there"):
        Accelerator(strategy=Dispatch({"": "disk"}), cpu=True).build_model(net)


@pytest.mark.parametrize("device_map", ["auto", {"0": "cpu", "1": "cpu:0", "2": "cpu", "3": "cpu:0"}])
def test_a_model_in_memory_trains_as_in_one_process(device_map):
    """Parameters that go to another device are replaced, in the optimizer too."""
    spread = Accelerator(strategy=Dispatch(device_map, force_hooks=True), cpu=True)
    model = net()
    before = [*model.parameters()]
    losses = trained(spread, model)
    assert hasattr(model, "_hf_hook")
    assert losses == trained(Accelerator(strategy="single", cpu=True), net())
    assert losses[2] < losses[0]
    kept = [new is old for new, old in zip(model.parameters(), before, strict=True)]
    assert kept == ([True] * 16 if device_map == "auto" else ([True] * 4 + [False] * 4) * 2)


@pytest.mark.parametrize(("place", "hooked"), [("cpu", False), ("cpu:0", True)])
def test_one_place_brings_inputs_that_come_from_another_device(place, hooked, weights):
    model = Accelerator(strategy=Dispatch({"": place}), cpu=True).build_model(net, weights)
    assert hasattr(model, "_hf_hook") is hooked
    assert torch.equal(model(X), net()(X))


def test_a_model_in_memory_is_placed_by_the_sizes_that_it_has(tmp_path):
    """`dtype` is that of weights which are read."""
    halves = Dispatch(max_memory=HALF, no_split_module_classes=["Block"], dtype=torch.bfloat16, offload_folder=tmp_path)
    model = Accelerator(strategy=halves, cpu=True).build_model(net)
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(model(X), net()(X))


def test_a_dispatched_model_stays_where_it_is(weights):
    with init_empty_weights():
        model = net()
    places = {"0": "cpu", "1": "disk", "2": "cpu", "3": "cpu"}
    model = load_checkpoint_and_dispatch(model, weights, device_map=places)
    prepared = Accelerator(strategy="dispatch", cpu=True).prepare_model(model, evaluation_mode=True)
    assert prepared.hf_device_map == places
    assert [has_offloaded_params(block.linear) for block in prepared] == [False, True, False, False]
    assert torch.equal(prepared(X), net()(X))


def test_weights_in_memory_are_cast(weights):
    accelerator = Accelerator(strategy=Dispatch(force_hooks=True), mixed_precision=Half(), cpu=True)
    model = accelerator.prepare(net())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = net().bfloat16()(X.bfloat16())
    assert torch.equal(model(X).bfloat16(), expected)
    strategy = Dispatch({"0": "disk", "1": "cpu", "2": "cpu", "3": "cpu"}, dtype=torch.bfloat16)
    accelerator = Accelerator(strategy=strategy, mixed_precision=Half(), cpu=True)
    model = accelerator.prepare_model(accelerator.build_model(net, weights), evaluation_mode=True)
    assert torch.equal(model(X).bfloat16(), expected)
    strategy = Dispatch({"0": "disk", "1": "cpu", "2": "cpu", "3": "cpu"})
    accelerator = Accelerator(strategy=strategy, mixed_precision=Half(), cpu=True)
    model = accelerator.build_model(net, weights)
    with pytest.raises(ValueError, match=r"parameters in torch.bfloat16, but 4 of Sequential, '0.linear.weight'"):
        accelerator.prepare(model)


def test_options_come_from_the_environment(weights, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DISPATCH__MAX_MEMORY", f'{{"cpu": {HALF["cpu"]}}}')
    monkeypatch.setenv("ACCELERATE_DISPATCH__NO_SPLIT_MODULE_CLASSES", "Block")
    model = Accelerator(strategy="dispatch", cpu=True).build_model(net, weights)
    assert model.hf_device_map == {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"}


def test_places_by_number_may_be_text():
    strategy = Dispatch({"0": "1", "1": "cpu"}, {"0": "1GiB", "cpu": "2GiB"})
    assert (strategy._device_map, strategy._max_memory) == ({"0": 1, "1": "cpu"}, {0: "1GiB", "cpu": "2GiB"})


def test_a_model_names_what_is_not_to_be_split(weights):
    class Named(nn.Sequential):
        _no_split_modules = ("Block",)

    def factory():
        return Named(*net())

    model = Accelerator(strategy=Dispatch(max_memory=HALF), cpu=True).build_model(factory, weights)
    assert {*model.hf_device_map} == {"0", "1", "2", "3"}


def test_a_larger_world_is_refused_with_what_shards():
    with pytest.raises(
        WorldError, match=r"the launcher \(torchrun\) started 2. Start one process.*'fsdp', 'deepspeed'"
    ):
        Dispatch().layout(SimpleNamespace(size=2, source="torchrun"))


def test_a_model_without_weights_is_refused():
    with init_empty_weights():
        model = net()
    with pytest.raises(ValueError, match=r"without weights: '0.linear.weight' is on the meta device. Fill it: acc"):
        Accelerator(strategy="dispatch", cpu=True).prepare(model)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_a_model_or_its_equal_blocks_are_one_graph(by_blocks):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plugin = TorchDynamoPlugin(backend=backend, fullgraph=True, use_regional_compilation=by_blocks)
    model = Accelerator(strategy="dispatch", dynamo_plugin=plugin, cpu=True).prepare(net())
    model(
        X.clone().requires_grad_()
    ).sum().backward()  # so that the input of the first block is like those of the others
    torch._dynamo.reset()
    assert len(graphs) == 1


def test_compiled_calls(weights):
    accelerator = Accelerator(strategy=Dispatch(force_hooks=True), dynamo_backend="eager", cpu=True)
    assert torch.allclose(accelerator.prepare(net())(X), net()(X))
    accelerator = Accelerator(strategy=Dispatch({"": "disk"}), dynamo_backend="eager", cpu=True)
    with pytest.raises(ValueError, match=r"compiled whose '0.linear' weights are offloaded.*Leave dynamo_backend= out"):
        accelerator.prepare(accelerator.build_model(net, weights))


def test_the_core_names_the_package():
    with pytest.raises(NotInstalledError, match=how_to_install("accel-big-model")):
        find("accel.strategies", "dispatch", [])

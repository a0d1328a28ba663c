"""Models run where a map has put them, with the results of one in memory."""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_models import IDS, Net, loaded, seeded
from torch import nn

from accel_big_model import (
    AlignDevicesHook,
    ModelHook,
    OffloadedWeightsLoader,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    offload_state_dict,
    remove_hook_from_module,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
    weights,
)
from accel_checkpoint import write_weights
from accel_core import CheckpointError


def net() -> Net:
    return seeded(Net)


@pytest.fixture
def files(tmp_path):
    """The weights of a net, in several files of safetensors with an index."""
    model = net()
    write_weights(model.state_dict(), tmp_path, max_shard_size=600)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


MAPS = [
    {"": "disk"},
    {"embedding": "cpu", "blocks": "disk", "norm": "cpu", "head": "cpu"},
    {
        "embedding": "cpu",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "blocks.2.0": "disk",
        "blocks.2.1": "cpu",
        "norm": "disk",
        "head": "cpu",
    },
]


@pytest.mark.parametrize("places", MAPS)
def test_a_model_that_is_read_from_its_files_gives_the_same_bits(files, places):
    expected = net()(IDS)
    model = loaded(net, files, device_map=places)
    for _ in range(3):  # the first pass learns the order, the others fetch ahead
        with torch.no_grad():
            assert torch.equal(model(IDS), expected)
    assert model.hf_device_map == places


def test_weights_on_disk_have_no_memory_between_calls(files):
    model = loaded(net, files, device_map=MAPS[1])
    model(IDS)
    assert {parameter.device.type for parameter in model.blocks.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in model.norm.parameters()} == {"cpu"}
    assert model.head.weight is model.embedding.weight


def test_everything_in_one_place_needs_no_hook(files):
    model = loaded(net, files, device_map={"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert torch.equal(model(IDS), net()(IDS))
    assert model.head.weight is model.embedding.weight


def test_a_dtype_is_that_of_all_floating_weights(files):
    model = loaded(net, files, device_map=MAPS[1], dtype=torch.bfloat16)
    assert torch.equal(model(IDS), net().bfloat16()(IDS))


def test_auto_places_by_the_limits(files):
    model = loaded(net, files, device_map="auto", max_memory={"cpu": 1300})
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(IDS), net()(IDS))


def test_a_model_in_memory_is_written_to_the_folder(tmp_path):
    model = dispatch_model(net(), MAPS[1], offload_dir=tmp_path)
    assert torch.equal(model(IDS), net()(IDS))
    assert (tmp_path / "blocks.0.0.weight.dat").stat().st_size == 8 * 8 * 4
    again = dispatch_model(net(), MAPS[1], offload_dir=tmp_path)  # which has an index now
    assert torch.equal(again(IDS), net()(IDS))


def test_to_raises_with_what_to_do(tmp_path):
    model = dispatch_model(net(), MAPS[1], offload_dir=tmp_path)
    with pytest.raises(
        RuntimeError,
        match=r"to\(\) was called on a Net that is spread over several places.*Build the model anew",
    ):
        model.to("cpu")


@pytest.mark.parametrize("move", [lambda model: model.to("cpu", torch.float64), nn.Module.half])
def test_moving_a_model_that_is_offloaded_as_a_whole_says_what_to_do(move, tmp_path):
    with pytest.raises(
        RuntimeError, match="which is offloaded.*build it anew, in another dtype or by another device_map"
    ):
        move(disk_offload(net(), tmp_path))


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_model_that_is_offloaded_as_a_whole_runs_and_comes_back(offload, tmp_path):
    model = net()
    model = cpu_offload(model) if offload == "cpu" else disk_offload(model, tmp_path)
    assert torch.equal(model(IDS), net()(IDS))
    assert model.embedding.weight.device.type == "meta"
    assert has_offloaded_params(model.blocks[0][0])
    remove_hook_from_submodules(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), net().state_dict().values(), strict=True))
    assert torch.equal(model(IDS), net()(IDS))


def test_keywords_may_stay_where_they_are():
    seen = {}

    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x, kept=None):
            seen.update(x=x.device.type, kept=kept.device.type)
            return x

    module = add_hook_to_module(Look(), AlignDevicesHook("meta", skip_keys="kept"))
    module(torch.ones(1), kept=torch.ones(1))
    assert seen == {"x": "meta", "kept": "cpu"}


def test_a_chain_of_models_is_brought_one_after_the_other():
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, last = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    second(first(torch.ones(1, 2)))
    last.offload()
    last.remove()
    assert not hasattr(second, "_hf_hook")


def test_layers_are_kept_in_a_small_dtype():
    model = net()
    attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_pattern=["norm", "embedding", "head"]
    )
    assert model.blocks[0][0].weight.dtype == torch.bfloat16
    assert model.embedding.weight.dtype == torch.float32
    expected = net()
    for block in expected.blocks:
        block[0].to(torch.bfloat16).to(torch.float32)
    assert torch.equal(model(IDS), expected(IDS))
    assert model.blocks[0][0].weight.dtype == torch.bfloat16


def test_a_copy_of_an_offloaded_model_runs_by_itself(files):
    with init_empty_weights():
        model = Net().eval()
    for offloaded in (cpu_offload(net()), load_checkpoint_and_dispatch(model, files, device_map=MAPS[1])):
        other = copy.deepcopy(offloaded)
        assert torch.equal(other(IDS), net()(IDS))
        assert torch.equal(offloaded(IDS), net()(IDS))


def test_a_copy_reads_what_the_original_reads(files):
    """Other weights have been saved under the same names by then."""
    model = loaded(net, files, device_map=MAPS[1])
    write_weights({name: value + 1 for name, value in net().state_dict().items()}, files)
    other = copy.deepcopy(model)
    assert torch.equal(other(IDS), net()(IDS))
    assert torch.equal(model(IDS), net()(IDS))


def test_a_process_that_is_forked_runs_the_model(files):
    write_weights({"weight": torch.ones(2, 1 << 20)}, files)
    store = weights.StoredWeights(files)
    assert store.lend("weight").sum() == 2 << 20  # by two threads
    child = multiprocessing.get_context("fork").Process(target=store.lend, args=("weight",))
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0


class Noted(ModelHook):
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def __getattribute__(self, name):
        if name in ("init_hook", "pre_forward", "post_forward", "detach_hook"):
            self.notes.append((self.name, name))
        return super().__getattribute__(name)


def test_hooks_act_around_the_forward_in_their_order():
    notes = []
    module = nn.Linear(2, 2)
    signature = inspect.signature(module.forward)
    add_hook_to_module(module, Noted("a", notes))
    add_hook_to_module(module, Noted("b", notes), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    notes.clear()
    module(torch.ones(1, 2))
    assert notes == [("a", "pre_forward"), ("b", "pre_forward"), ("a", "post_forward"), ("b", "post_forward")]
    assert (inspect.signature(module.forward), module.forward.__name__) == (signature, "forward")
    remove_hook_from_module(module)
    assert not {"_hf_hook", "_old_forward", "forward"} & set(vars(module))
    assert notes[4:] == [("a", "detach_hook"), ("b", "detach_hook")]


def test_a_module_with_two_more_hooks_is_offloaded_still(tmp_path):
    model = disk_offload(net(), tmp_path)
    for hook in (ModelHook(), SequentialHook(ModelHook(), SequentialHook(ModelHook()))):
        add_hook_to_module(model.head, hook, append=True)
    assert has_offloaded_params(model.head)
    with pytest.raises(ValueError, match="This Linear is dispatched already"):
        cpu_offload(model.head)
    with align_module_device(model.head):
        assert torch.equal(model.head.weight, net().head.weight)
    expected, state = net().state_dict(), get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_hook_changes_inputs_and_outputs_and_forbids_gradients():
    class Double(ModelHook):
        no_grad = True

        def pre_forward(self, module, *args, **kwargs):
            return (args[0] * 2,), kwargs

        def post_forward(self, module, output):
            return output + 1

    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected = module(2 * x) + 1
    add_hook_to_module(module, Double())
    assert torch.equal(module(x), expected)
    assert not module(x).requires_grad


def test_a_graph_module_takes_hooks():
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    expected = module(torch.ones(1, 2))
    add_hook_to_module(module, ModelHook())
    assert torch.equal(module(torch.ones(1, 2)), expected)
    remove_hook_from_module(module)
    assert torch.equal(module(torch.ones(1, 2)), expected)


def test_a_copy_of_a_hooked_module_has_its_own_weights():
    module = add_hook_to_module(nn.Linear(2, 2), ModelHook())
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert other(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]


def test_a_library_that_calls_both_parts_of_a_hook_leaves_no_weights_behind():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):  # uses the weights of its child without calling it, as models of transformers do
            hook = self.linear._hf_hook
            hook.pre_forward(self.linear)
            x = nn.functional.linear(x, self.linear.weight, self.linear.bias)
            hook.post_forward(self.linear, ())
            return x

    model, x = Fused(), torch.ones(1, 2)
    expected = model.linear(x).detach()
    model = cpu_offload(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert model.linear.weight.device.type == "meta"


def test_weights_that_a_library_merges_into_a_hook_are_those_that_compute():
    model = cpu_offload(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
    with torch.no_grad():
        model(torch.ones(1, 2))
        for layer in model:
            layer._hf_hook.pre_forward(layer)
            layer._hf_hook.weights_map = {"weight": torch.eye(2) * 3}
            layer._hf_hook.post_forward(layer, torch.tensor([]))
        assert [layer.weight.device.type for layer in model] == ["meta", "meta"]
        assert model(torch.ones(1, 2)).tolist() == [[9.0, 9.0]]


def test_weights_can_be_looked_at_where_they_compute():
    model = cpu_offload(net())
    layer = model.blocks[0][0]
    with align_module_device(layer):
        assert torch.equal(layer.weight, net().blocks[0][0].weight)
    assert layer.weight.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_folders_of_offloaded_weights_give_what_was_written(tmp_path, dtype):
    given = {"a.b": torch.arange(6).reshape(2, 3).to(dtype), "c": torch.tensor(1).to(dtype)}
    offload_state_dict(tmp_path, given)
    found = OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(found) == ["a.b", "c"]
    assert all(
        torch.equal(found[name].float(), value.float()) and found[name].dtype == dtype for name, value in given.items()
    )


def test_a_file_that_became_shorter_is_named(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(4)})
    (tmp_path / "a.dat").write_bytes(b"12345678")
    with pytest.raises(ValueError, match=r"a.dat has 8 bytes of the 16"):
        OffloadedWeightsLoader(save_folder=tmp_path)["a"]


class TestWhatIsWrong:
    def test_nothing_says_where_the_disk_is(self):
        with pytest.raises(
            ValueError, match=r"on 'disk', and nothing says where.*offload_dir=.*load_checkpoint_and_dispatch"
        ):
            dispatch_model(net(), MAPS[1])

    def test_files_that_lack_tensors_or_have_other_shapes(self, tmp_path):
        state = net().state_dict()
        del state["norm.bias"]
        state["norm.weight"] = torch.ones(7)
        state["other"] = torch.ones(1)
        write_weights(state, tmp_path)
        model = Net()
        before = model.norm.weight.clone()
        with pytest.raises(
            CheckpointError,
            match=r"1 missing: norm.bias.*1 unknown to the model: other.*norm.weight: float32\[7\] in the file, float32\[8\]",
        ):
            load_checkpoint_and_dispatch(model, tmp_path, device_map=MAPS[1])
        assert torch.equal(model.norm.weight, before)

    def test_a_folder_without_weights(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            load_checkpoint_and_dispatch(net(), tmp_path, device_map="auto")

    def test_a_dtype_may_be_a_name_and_has_to_be_one_of_weights(self, files):
        model = load_checkpoint_and_dispatch(net(), files, device_map={"": "cpu"}, dtype="bfloat16")
        assert model.head.weight.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="dtype='bf16' is no floating dtype. Pass one such as"):
            load_checkpoint_and_dispatch(net(), files, device_map={"": "cpu"}, dtype="bf16")

    def test_a_model_without_weights_is_not_run(self):
        with init_empty_weights():
            model = Net()
        with pytest.raises(ValueError, match=r"embedding.weight has no value. Fill the model: load_checkpoint_and"):
            dispatch_model(model, {"": "cpu"})

    def test_a_map_by_an_unknown_name(self, files):
        with pytest.raises(
            ValueError,
            match=r"device_map='fastest' is none of auto, .*, sequential, and no map. A map such as {'': 'cpu'}",
        ):
            load_checkpoint_and_dispatch(net(), files, device_map="fastest")
        with pytest.raises(ValueError, match=r"device_map=device\(type='cpu'\) is none of auto"):
            load_checkpoint_and_dispatch(net(), files, device_map=torch.device("cpu"))

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="it is about a machine without one")
    def test_an_accelerator_that_is_not_there(self, files):
        with pytest.raises(
            ValueError, match=r"Place 0 is an accelerator, and there is none here: leave it out of max_mem"
        ):
            load_checkpoint_and_dispatch(net(), files, device_map="auto", max_memory={0: "1GiB", "cpu": "1GiB"})

    def test_a_file_that_is_cut_short_while_the_model_runs(self, files):
        with init_empty_weights():
            model = Net().eval()
        model = load_checkpoint_and_dispatch(model, files, device_map={"": "disk"})
        model(IDS)
        for path in files.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(CheckpointError, match="safetensors"):
            model(IDS)

    def test_a_store_of_nothing_and_a_file_in_no_folder(self):
        with pytest.raises(ValueError, match=r"given no weights: pass state_dict=, save_folder= or index="):
            OffloadedWeightsLoader()
        with pytest.raises(ValueError, match=r"'a' is a file in a folder that is not known: pass save_folder="):
            OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [1]}})["a"]

    def test_weights_without_a_value_are_not_written(self, tmp_path):
        with init_empty_weights():
            model = Net()
        with pytest.raises(ValueError, match=r"is to be written to .*, and has no value. Load the weights first"):
            dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)

    def test_a_tensor_without_a_value_or_of_another_shape(self):
        with init_empty_weights():
            model = Net()
        with pytest.raises(ValueError, match=r"head.weight is on the meta device and has no value"):
            set_module_tensor_to_device(model, "head.weight", "cpu")
        with pytest.raises(ValueError, match=r"head.weight has shape \(11, 8\), and value= has \(3,\)"):
            set_module_tensor_to_device(model, "head.weight", "cpu", value=torch.ones(3))
        with pytest.raises(ValueError, match=r"Linear has no parameter or buffer 'wait'"):
            set_module_tensor_to_device(model, "head.wait", "cpu")
        with pytest.raises(ValueError, match=r"Net has no 'tail.weight'"):
            set_module_tensor_to_device(model, "tail.weight", "cpu")


class Masked(nn.Module):
    """Layers beside buffers that are not saved: its own, and one of a module without weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.angles = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1]), persistent=False)
        self.angles.register_buffer("inverse", torch.arange(4.0), persistent=False)
        self.angles.forward = lambda x: x + self.angles.inverse

    def forward(self, x):
        return self.last(self.angles(self.first(x) * self.mask))


@pytest.mark.parametrize("places", [
    {"first": "disk", "last": "disk"}, {"first": "cpu", "last": "disk"}, {"first": "cpu", "last": "cpu"},
])  # fmt: skip
def test_a_map_need_not_name_buffers_that_are_not_saved(places, tmp_path):
    torch.manual_seed(0)
    expected, x = Masked(), torch.randn(2, 4)
    write_weights(expected.state_dict(), tmp_path / "files")
    filled = load_checkpoint_and_dispatch(Masked(), tmp_path / "files", device_map=places)
    model = dispatch_model(copy.deepcopy(expected), places, offload_dir=tmp_path / "away")
    for each in (filled, model):
        assert each.hf_device_map == places
        assert torch.equal(each(x), expected(x))


def test_a_map_need_not_name_buffers_that_are_not_saved_of_a_module_of_two_names(tmp_path):
    expected, x = Masked(), torch.randn(2, 4)
    expected.again = expected.angles
    model = dispatch_model(
        copy.deepcopy(expected), {"first": "disk", "last": "cpu", "angles": "cpu"}, offload_dir=tmp_path
    )
    assert torch.equal(model(x), expected(x))


class Borrowing(nn.Module):
    """Computes with a weight of a submodule that it does not call."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, ids):
        return nn.functional.linear(self.linear(self.embedding(ids)), self.embedding.weight) * self.scale


class TestWeightsThatAreNotHere:
    def test_computing_with_one_raises_with_what_to_do(self):
        model = cpu_offload(Borrowing())
        with pytest.raises(RuntimeError, match=r"'embedding.weight', which is offloaded.*preload_module_classes="):
            model(IDS[:1])

    def test_a_class_that_borrows_weights_has_them_all(self, tmp_path):
        torch.manual_seed(1)
        expected = Borrowing()
        model = dispatch_model(
            copy.deepcopy(expected), {"": "disk"}, offload_dir=tmp_path, preload_module_classes=["Borrowing"]
        )
        for _ in range(2):
            assert torch.equal(model(IDS[:1]), expected(IDS[:1]))

    def test_tied_weights_of_such_a_class_come_under_every_name(self, files):
        with init_empty_weights():
            model = Net().eval()
        model = load_checkpoint_and_dispatch(model, files, device_map={"": "disk"}, preload_module_classes=["Net"])
        assert torch.equal(model(IDS), net()(IDS))

    def test_a_root_with_a_parameter_of_its_own_goes_to_disk(self, tmp_path):
        class Root(nn.Linear):
            pass

        expected = Root(3, 3)
        model = dispatch_model(copy.deepcopy(expected), {"": "disk"}, offload_dir=tmp_path)
        assert torch.equal(model(torch.ones(1, 3)), expected(torch.ones(1, 3)))
        with align_module_device(model):
            assert torch.equal(model.weight, expected.weight)

    def test_an_index_of_a_folder_is_used(self, tmp_path):
        model = net()
        dispatch_model(copy.deepcopy(model), {"": "disk"}, offload_dir=tmp_path)
        index = json.loads((tmp_path / "index.json").read_text())
        again = dispatch_model(copy.deepcopy(model), {"": "disk"}, offload_dir=tmp_path, offload_index=index)
        assert torch.equal(again(IDS), model(IDS))

    def test_an_error_in_a_forward_takes_the_weights_away(self):
        model = cpu_offload(nn.Linear(3, 3))
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 4))
        assert model.weight.device.type == "meta"
        assert model(torch.ones(1, 3)).shape == (1, 3)

    def test_a_second_thread_is_refused(self):
        entered, leave = threading.Event(), threading.Event()

        class Slow(nn.Linear):
            def forward(self, x):
                entered.set()
                assert leave.wait(20)
                return super().forward(x)

        model = cpu_offload(Slow(2, 2))
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(model, torch.ones(1, 2))
            assert entered.wait(20)
            with pytest.raises(RuntimeError, match="called by two threads at once"):
                model(torch.ones(1, 2))
            leave.set()
            assert first.result().shape == (1, 2)

    def test_tied_weights_of_two_values_are_refused(self, tmp_path):
        state = net().state_dict()
        write_weights({**state, "head.weight": state["head.weight"] + 1}, tmp_path)
        with pytest.raises(
            CheckpointError,
            match=r"head.weight: tied to embedding.weight in the model, but of another value in the file",
        ):
            load_checkpoint_and_dispatch(net(), tmp_path, device_map={"": "disk"})

    def test_a_backward_into_one_raises_with_what_to_do(self):
        model = cpu_offload(nn.Linear(3, 3))
        with pytest.raises(
            RuntimeError, match=r"backward\(\) reached a weight.*Freeze it by requires_grad_\(False\).*'fsdp'"
        ):
            model(torch.ones(1, 3)).sum().backward()
        frozen = cpu_offload(nn.Linear(3, 3).requires_grad_(False))
        x = torch.ones(1, 3, requires_grad=True)
        frozen(x).sum().backward()
        assert x.grad is not None


class Filtering(nn.Module):
    """Reads the buffer of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.bank = nn.Module()
        self.bank.register_buffer("filters", torch.ones(4, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.mm(self.linear(x), self.bank.filters)


def test_buffers_that_are_away_are_not_computed_with(tmp_path):
    model = disk_offload(Filtering(), tmp_path, offload_buffers=True)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"mm\(\) was given the weight 'bank\.filters', which is offloaded"):
            each(torch.ones(2, 4))
        assert each.state_dict()["bank.filters"].shape == (4, 4)
    remove_hook_from_submodules(model)
    assert torch.equal(model.bank.filters, torch.ones(4, 4))


class Rooted(nn.Module):
    """Has weights beside modules, which a map places by themselves."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4))
        self.second = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("third", torch.randn(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x @ self.first @ self.second @ self.third)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Rooted()
        self.own = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.part(x @ self.own)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("others", ["cpu", "disk"])
@pytest.mark.parametrize("from_files", [True, False])
def test_weights_beside_modules_are_on_disk_by_themselves(tmp_path, others, buffers, from_files):
    torch.manual_seed(0)
    expected, x = Twice(), torch.randn(2, 4)
    places = {"part.first": "disk", "part.second": "cpu", "part.third": "disk", "part.inner": others, "own": "disk"}
    if from_files:
        write_weights(expected.state_dict(), tmp_path)
        with init_empty_weights():
            model = Twice()
        model = load_checkpoint_and_dispatch(model, tmp_path, device_map=places, offload_buffers=buffers)
    else:
        model = dispatch_model(copy.deepcopy(expected), places, offload_dir=tmp_path, offload_buffers=buffers)
    assert model.own.is_meta
    assert model.part.first.is_meta
    for each in (model, model, copy.deepcopy(model)):
        assert torch.equal(each(x), expected(x))
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("offload", [
    disk_offload,
    lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
])  # fmt: skip
def test_a_folder_of_another_model_of_the_same_shapes_is_refused(offload, tmp_path):
    offload(net(), tmp_path)
    changed = net()
    with torch.no_grad():
        changed.norm.weight[0] += 1
    with pytest.raises(ValueError, match=r"has other values of norm.weight than this Net.*Pass an empty folder"):
        offload(changed, tmp_path)
    assert torch.equal(offload(net(), tmp_path)(IDS), net()(IDS))


def test_a_file_that_was_replaced_before_it_is_opened_is_refused(tmp_path):
    write_weights(net().state_dict(), tmp_path)
    file = str(tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Net().eval()
    index = {name: {"safetensors_file": file, "weight_name": name} for name in net().state_dict()}
    model = dispatch_model(model, {"": "disk"}, offload_index={**index, "head.weight": index["embedding.weight"]})
    write_weights({name: value + 1 for name, value in net().state_dict().items()}, tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors was written to while a model reads its weights"):
        model(IDS)


def test_a_forward_that_writes_to_an_offloaded_buffer_is_refused(tmp_path):
    x = torch.randn(4, 3)
    model = disk_offload(nn.BatchNorm1d(3), tmp_path / "all", offload_buffers=True)
    with pytest.raises(RuntimeError, match=r"BatchNorm1d wrote to its buffer num_batches_tracked, which is offloaded"):
        model(x)
    assert torch.equal(model.eval()(x), nn.BatchNorm1d(3).eval()(x))
    expected = nn.BatchNorm1d(3)
    expected(x)
    for kept in (
        disk_offload(nn.BatchNorm1d(3), tmp_path / "some"),
        cpu_offload(nn.BatchNorm1d(3), offload_buffers=True),
    ):
        kept(x)  # the second one has its buffers in main memory, where they are written to
        assert torch.equal(kept.eval()(x), expected.eval()(x))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_weights_without_elements_keep_their_shapes_where_one_is_offloaded():
    model = nn.Sequential(nn.Linear(2, 0, bias=False), nn.Linear(0, 3, bias=False))
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    cpu_offload(model[1])
    assert {name: value.shape for name, value in get_state_dict_offloaded_model(model).items()} == shapes


class Counting(nn.Module):
    """Replaces a buffer in each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.weight + self.calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(("module", "x", "message"), [
    (lambda: nn.Embedding(4, 3, max_norm=0.1), torch.tensor([1]), "Embedding wrote to its parameter weight, .* Give the module"),
    (Counting, torch.ones(2), "Counting replaced its buffer calls, .* Leave offload_buffers= out"),
    (lambda: nn.BatchNorm1d(3), torch.randn(4, 3), r"BatchNorm1d wrote to its buffer .*or call eval\(\)"),
])  # fmt: skip
def test_what_a_forward_writes_to_offloaded_weights_is_not_lost_in_silence(module, x, message, mode, tmp_path):
    model = disk_offload(module(), tmp_path / "disk", offload_buffers=True)
    with mode(), pytest.raises(RuntimeError, match=message):
        model(x)
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))


def test_what_a_forward_writes_stays_where_there_is_memory_for_it(tmp_path):
    torch.manual_seed(0)
    model, ids = nn.Embedding(4, 3, max_norm=0.1), torch.tensor([1])
    expected = copy.deepcopy(model)
    model = cpu_offload(model)
    for _ in range(2):
        assert torch.equal(model(ids), expected(ids))
    assert torch.equal(get_state_dict_offloaded_model(model)["weight"], expected.weight)
    counting = disk_offload(Counting(), tmp_path)  # its buffer stays
    counting(torch.ones(2))
    counting(torch.ones(2))
    assert counting.calls.tolist() == [2.0, 2.0]


def test_changing_a_weight_that_goes_away_again_raises(tmp_path):
    model = disk_offload(nn.Linear(2, 2), tmp_path)
    lost = pytest.raises(RuntimeError, match="Linear wrote to its parameter weight")
    with lost, torch.no_grad(), align_module_device(model):
        model.weight.zero_()
    assert model.weight.is_meta


@pytest.mark.parametrize("offload", [cpu_offload, lambda model: model])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_an_offloaded_model_says_what_to_do(offload, fullgraph):
    torch._dynamo.reset()
    model, x = offload(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), torch.ones(1, 2)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    if has_offloaded_params(model[0]):
        with pytest.raises(
            Exception, match=r"weights are offloaded was to be compiled.*or leave torch.compile\(\) out"
        ):
            compiled(x)
        torch._dynamo.reset()
    assert (compiled if offload is not cpu_offload else model)(x).shape == (1, 2)

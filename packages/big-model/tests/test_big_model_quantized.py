"""Linear layers are quantised while a model is loaded, by bitsandbytes and by torchao."""

from __future__ import annotations

import copy
import re
import sys

import pytest
import torch
from torch import nn

from accel_big_model import BnbQuantizationConfig, align_module_device, init_empty_weights, load_and_quantize_model
from accel_checkpoint import write_weights
from accel_core import Accelerator, CheckpointError, NotInstalledError
from accel_core.api.component import how_to_install


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 16, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


IDS = torch.arange(16)


def net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


@pytest.fixture
def weights(tmp_path):
    write_weights(net().state_dict(), tmp_path)
    return tmp_path


def nbytes(tensor: torch.Tensor) -> int:
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is not None and hasattr(tensor, "qdata"):
        return sum(nbytes(getattr(tensor, name)) for name in inner()[0])
    return tensor.numel() * tensor.element_size()


def size(model: nn.Module) -> int:
    return sum(nbytes(parameter) for parameter in model.parameters())


def error(model: nn.Module, expected: torch.Tensor) -> float:
    with torch.no_grad():
        return ((model(IDS).float() - expected).norm() / expected.norm()).item()


def int8():
    return pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig(version=2)  # the only one of later torchao


class TestBitsandbytes:
    @pytest.fixture(autouse=True)
    def installed(self):
        self.nn = pytest.importorskip("bitsandbytes").nn

    @pytest.mark.parametrize(("form", "most", "part"), [
        ({"load_in_8bit": True}, 0.03, 0.3),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"}, 0.2, 0.2),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, 0.2, 0.2),
    ])  # fmt: skip
    @pytest.mark.parametrize("in_memory", [False, True])
    def test_linear_layers_are_replaced(self, form, most, part, in_memory, weights):
        config = BnbQuantizationConfig(**form, torch_dtype=torch.float32)
        if in_memory:
            model = load_and_quantize_model(net(), config)
        else:
            model = load_and_quantize_model(
                empty(), weights_location=weights, bnb_quantization_config=config, device_map={"": "cpu"}
            )
        kind = self.nn.Linear8bitLt if config.load_in_8bit else self.nn.Linear4bit
        layers = [layer for block in model.blocks for layer in (block[0], block[2])]
        assert all(type(layer) is kind and layer.weight.dtype in (torch.int8, torch.uint8) for layer in layers)
        assert not any(parameter.requires_grad for layer in layers for parameter in layer.parameters())
        assert type(model.head) is nn.Linear  # of all heads, usually
        assert model.embedding.weight.dtype == torch.float32
        expected = net()
        assert 0 < error(model, expected(IDS)) < most
        assert size(model.blocks) < part * size(expected.blocks)
        assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (config.load_in_8bit, config.load_in_4bit)
        assert model.hf_device_map == {"": "cpu"}

    def test_other_weights_are_float16_but_for_those_to_keep(self, weights):
        config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["1"], keep_in_fp32_modules=["norm", "blocks.0"])
        model = load_and_quantize_model(empty(), config, weights)
        assert model.embedding.weight.dtype == torch.float16
        assert model.norm.weight.dtype == model.blocks[0][0].weight.dtype == torch.float32
        assert model.blocks[1][0].weight.dtype == torch.float16
        assert model.blocks[2][0].weight.dtype == model.head.weight.dtype == torch.int8

    def test_what_is_offloaded_is_not_quantised(self, weights):
        config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32)
        places = {
            "embedding": "cpu",
            "blocks.0": "cpu",
            "blocks.1": "disk",
            "blocks.2": "cpu",
            "norm": "cpu",
            "head": "cpu",
        }
        with pytest.raises(
            ValueError, match="layers of bitsandbytes keep the weights .* Leave it out: .* Or use torchao"
        ):
            load_and_quantize_model(empty(), config, weights, device_map=places, offload_folder=weights / "folder")
        model = load_and_quantize_model(empty(), config, weights, device_map=places)
        assert type(model.blocks[1][0]) is nn.Linear
        assert model.blocks[1][0].weight.is_meta
        assert type(model.blocks[2][0]) is self.nn.Linear8bitLt
        for _ in range(2):
            assert error(model, net()(IDS)) < 0.03

    def test_sizes_of_quantised_weights_are_planned_with(self, weights):
        config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32)
        limits = {"cpu": int(0.45 * size(net()))}
        model = load_and_quantize_model(empty(), config, weights, device_map="auto", max_memory=limits)
        assert model.hf_device_map == {"": "cpu"}
        with pytest.raises(
            ValueError, match=r"device_map='auto' would offload .*blocks.*Give max_memory= larger limits"
        ):
            load_and_quantize_model(
                empty(), config, weights, device_map="auto", max_memory={"cpu": int(0.25 * size(net()))}
            )


class TestTorchao:
    def test_a_llama_in_a_quarter_of_the_memory(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            max_position_embeddings=64,
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        model.save_pretrained(tmp_path)
        ids = torch.randint(0, 64, (2, 9))
        expected = model(ids).logits
        with init_empty_weights():
            other = transformers.LlamaForCausalLM(config).eval()
        other = load_and_quantize_model(other, int8(), tmp_path, device_map={"": "cpu"}, skip_modules=[])
        linear = {name: module for name, module in other.named_modules() if type(module) is nn.Linear}
        assert len(linear) == 4 * 7 + 1
        assert {type(module.weight).__name__ for module in linear.values()} == {"Int8Tensor"}
        with torch.no_grad():
            found = other(ids).logits
        assert 0 < ((found - expected).norm() / expected.norm()).item() < 0.03
        before = sum(nbytes(module.weight) for name, module in model.named_modules() if name in linear)
        after = sum(nbytes(module.weight) for module in linear.values())
        assert 0.25 <= after / before < 0.3

    def test_a_model_with_its_weights(self):
        model = load_and_quantize_model(net(), int8(), device_map={"": "cpu"})
        assert {type(block[0].weight).__name__ for block in model.blocks} == {"Int8Tensor"}
        assert error(model, net()(IDS)) < 0.03

    def test_a_copy_of_one_computes_the_same(self, weights):
        model = load_and_quantize_model(empty(), int8(), weights, device_map={"": "cpu"})
        assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))

    @pytest.mark.parametrize("places", [{"": "disk"}, {"blocks.1": "disk", "": "cpu"}])
    def test_quantised_weights_are_written_and_read_for_each_call(self, places, weights, tmp_path):
        if "blocks.1" in places:
            places = {**dict.fromkeys(("embedding", "blocks.0", "blocks.2", "norm", "head"), "cpu"), "blocks.1": "disk"}
        folder = tmp_path / "quantised"
        expected = load_and_quantize_model(empty(), int8(), weights, device_map={"": "cpu"})
        model = load_and_quantize_model(empty(), int8(), weights, device_map=places, offload_folder=folder)
        written = [path.name for path in folder.glob("blocks.1.*.dat")]
        assert len(written) > 2
        assert sum(path.stat().st_size for path in folder.glob("blocks.1.*")) < 0.3 * size(net().blocks[1])
        with torch.no_grad():
            for each in (model, model, copy.deepcopy(model)):
                assert torch.equal(each(IDS), expected(IDS))
        assert model.blocks[1][0].weight.is_meta
        assert model.blocks[1][0].bias.is_meta
        with align_module_device(model.blocks[1][0]):
            assert type(model.blocks[1][0].weight).__name__ == "Int8Tensor"
        accelerator = Accelerator(cpu=True)
        with pytest.raises((CheckpointError, ValueError), match="Int8Tensor"):  # offloaded, or here
            accelerator.save_model(model, tmp_path / "saved")
        with pytest.raises(ValueError, match="has weights already, and quantised ones are written anew: pass an empty"):
            load_and_quantize_model(empty(), int8(), weights, device_map=places, offload_folder=folder)

    def test_a_limit_of_memory_offloads_quantised_weights(self, weights, tmp_path):
        options = {"device_map": "auto", "max_memory": {"cpu": int(0.25 * size(net()))}}
        with pytest.raises(ValueError, match=r"device_map='auto' would offload .*with torchao, an offload_folder="):
            load_and_quantize_model(empty(), int8(), weights, **options)
        model = load_and_quantize_model(empty(), int8(), weights, **options, offload_folder=tmp_path / "quantised")
        assert set(model.hf_device_map.values()) == {"cpu", "disk"}
        assert 0 < error(model, net()(IDS)) < 0.03

    def test_a_folder_without_use_is_refused(self, weights, tmp_path):
        with pytest.raises(ValueError, match="the map has no layer to quantise on 'disk': leave it out"):
            load_and_quantize_model(empty(), int8(), weights, offload_folder=tmp_path / "quantised")

    def test_layers_that_torchao_leaves_are_not_left_in_silence(self, weights):
        config = pytest.importorskip("torchao.quantization").Int4WeightOnlyConfig(group_size=128)
        with pytest.raises(ValueError, match="torchao left a linear layer of 64 to 128 features as it is"):
            load_and_quantize_model(empty(), config, weights)

    def test_tied_heads_are_left_out(self, weights):
        model = net()
        model.head.weight = model.embedding.weight
        model = load_and_quantize_model(model, int8())
        assert model.head.weight is model.embedding.weight
        assert type(model.head.weight) is nn.Parameter


def bnb(**options):
    return BnbQuantizationConfig(**{"load_in_8bit": True, **options})


def test_weights_that_are_not_quantised_have_the_dtype_of_products():
    assert BnbQuantizationConfig(load_in_8bit=True).torch_dtype == torch.float16
    assert BnbQuantizationConfig(load_in_4bit=True).torch_dtype == torch.float16
    assert BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").torch_dtype == torch.bfloat16


@pytest.mark.parametrize("options, message", [
    ({"load_in_8bit": False}, r"load_in_8bit=False, load_in_4bit=False\): set one of them"),
    ({"load_in_4bit": True}, r"load_in_8bit=True, load_in_4bit=True\): set one of them"),
    ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4' is neither 'fp4' nor 'nf4'"),
    ({"bnb_4bit_compute_dtype": "fp64x"}, "bnb_4bit_compute_dtype='fp64x' is none of 'fp32', 'fp16', 'bf16'"),
    ({"torch_dtype": torch.int8}, "torch_dtype=torch.int8 is none of"),
])  # fmt: skip
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bnb(**options)


def test_configurations_of_others_are_refused():
    with pytest.raises(TypeError, match="quantization_config= is a dict: pass a BnbQuantizationConfig, or options of"):
        load_and_quantize_model(net(), {"load_in_8bit": True})


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    with pytest.raises(
        NotInstalledError, match=rf"needs bitsandbytes, .* {re.escape(how_to_install('accel-big-model[bitsandbytes]'))}"
    ):
        load_and_quantize_model(net(), bnb())


def test_models_that_cannot_be_quantised_are_refused(weights):
    with pytest.raises(ValueError, match="Net is on the meta device and has no weights: pass weights_location="):
        load_and_quantize_model(empty(), int8())
    with pytest.raises(ValueError, match=r"Sequential has no linear layer to quantise: 0 in all, .* skipped are 0"):
        load_and_quantize_model(nn.Sequential(nn.LayerNorm(3)), int8())
    with pytest.raises(
        ValueError, match="A model that has its weights is quantised where it computes: pass weights_loc"
    ):
        load_and_quantize_model(net(), int8(), device_map={"": "disk"})


def test_files_that_do_not_fit_change_nothing(weights):
    model = empty()
    model.other = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="2 missing: other.weight, other.bias"):
        load_and_quantize_model(model, int8(), weights)
    assert model.head.weight.is_meta

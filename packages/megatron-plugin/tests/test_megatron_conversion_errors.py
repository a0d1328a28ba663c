"""What cannot be converted is refused by its name, on every rank, before anything is changed."""

from __future__ import annotations

import json
from pathlib import Path

import conversion_models
import pytest
import torch
import transformers
from conversion_models import LLAMA3, Sizes
from safetensors.torch import load_file, save_file

from accel_core import PluginError
from accel_megatron import find_family
from accel_megatron.conversion.settings import settings_of
from accel_testing import run_ranks

LLAMA = conversion_models.CONFIGS["llama"]


@pytest.fixture(scope="module", autouse=True)
def transformers_loaded():
    conversion_models.load_transformers()


def message_of(function, *arguments, **settings):
    try:
        function(*arguments, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def read_all(folders: list[Path]):
    """On each rank of a pipeline: the error of reading each folder."""
    from accel_megatron import from_transformers

    conversion_models.start(Sizes(pipeline=2))
    found = [message_of(from_transformers, folder) for folder in folders]
    conversion_models.end()
    return found


@pytest.fixture
def changed_copy(tmp_path):
    """Makes a folder with a Llama model whose tensors were changed by a function of them."""
    source = conversion_models.make("llama", tmp_path)

    def make(name, change):
        target = tmp_path / name
        target.mkdir()
        (target / "config.json").write_text((source / "config.json").read_text())
        tensors = {key: each for part in source.glob("*.safetensors") for key, each in load_file(part).items()}
        change(tensors)
        save_file(tensors, target / "model.safetensors")
        return target

    return make


def test_files_that_do_not_fit_are_refused_on_every_rank_with_all_that_is_wrong(changed_copy, tmp_path):
    last, first = "model.layers.3.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"

    def wrong(tensors):
        del tensors[last]
        tensors[first] = torch.zeros(4, 4)
        tensors["model.layers.4.input_layernorm.weight"] = torch.zeros(32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # older files have it

    ranks = run_ranks(read_all, 2, [changed_copy("wrong", wrong), tmp_path / "nowhere"])
    for [(kind, text), (kind_of_nothing, text_of_nothing)] in ranks:
        assert kind == "CheckpointError"
        assert f"missing in the file (1): {last}" in text
        assert f"different (1): {first}: float32[4, 4] in the file, float32[48, 32] in the model" in text
        assert "not in the model (1): model.layers.4.input_layernorm.weight" in text
        assert kind_of_nothing in ("FileNotFoundError", "OSError")
        assert "nowhere', which should be a folder" in text_of_nothing
        assert "snapshot_download of huggingface_hub" in text_of_nothing


def test_gpt2_files_without_a_prefix_are_read(tmp_path):
    [(logits, expected)] = run_ranks(
        read_without_prefix, 1, conversion_models.make("gpt2", tmp_path), tmp_path / "bare"
    )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def read_without_prefix(source: Path, bare: Path):
    from accel_megatron import from_transformers

    bare.mkdir()
    tensors = {key: each for part in source.glob("*.safetensors") for key, each in load_file(part).items()}
    named = {key.removeprefix("transformer."): each for key, each in tensors.items()}
    save_file(named | {"h.0.attn.bias": torch.zeros(1, 1, 4, 4)}, bare / "model.safetensors")
    (bare / "config.json").write_text((source / "config.json").read_text())
    conversion_models.start(Sizes())
    logits = conversion_models._through(from_transformers(bare).eval())
    conversion_models.end()
    return logits.detach(), conversion_models.load(source)(conversion_models.TOKENS).logits.detach()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "['rope_type']='yarn' (it may be 'default', 'linear', 'llama3')"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 8.0}}, "['high_freq_factor']=8.0 (for the type 'llama3' Megatron-core has 4.0)"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "['partial_rotary_factor']=0.5 (of the type 'default' Megatron-core has no such number)"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "(it should have 'rope_type' and 'rope_theta', as in transformers 5)"),
        ({"attention_bias": True}, "attention_bias=True (it may be False)"),
        ({"mlp_bias": True}, "mlp_bias=True (it may be False)"),
        ({"hidden_act": "relu"}, "hidden_act='relu' (it may be 'silu')"),
        ({"attention_multiplier": 0.5}, "attention_multiplier=0.5 (not in the table)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} (not in the table)"),
    ],
)  # fmt: skip
def test_fields_that_would_change_numbers_are_refused_by_name(changes, said):
    with pytest.raises(
        ValueError, match="A llama model was to be converted, but some of its configuration has no equivalent"
    ) as error:
        settings_of(find_family("llama"), LLAMA().to_dict() | changes)
    assert said in str(error.value)


def test_windows_and_dropouts_that_differ_are_refused_and_all_at_once():
    given = conversion_models.CONFIGS["qwen2"]().to_dict()
    with pytest.raises(ValueError, match="no equivalent") as error:
        settings_of(
            find_family("qwen2"), given | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
        )
    assert "sliding_window=8 (it may be None)" in str(error.value)
    assert "layer_types=['full_attention', 'sliding_attention'] (it may be 'full_attention')" in str(error.value)
    given = conversion_models.CONFIGS["gpt2"]().to_dict()
    with pytest.raises(
        ValueError,
        match=r"resid_pdrop=0.1 \(and embd_pdrop=0.2: both are hidden_dropout, which has one value\)|embd_pdrop",
    ):
        settings_of(find_family("gpt2"), given | {"embd_pdrop": 0.2})


def test_a_field_that_the_table_does_not_know_can_be_ignored_and_one_that_it_knows_cannot():
    family, given = find_family("llama"), LLAMA().to_dict() | {"my_note": "hello"}
    assert settings_of(family, given, ignore=["my_note"])["hidden_size"] == 32
    with pytest.raises(ValueError, match="mlp_bias=True"):
        settings_of(family, given | {"mlp_bias": True}, ignore=["my_note", "mlp_bias"])


PUBLISHED = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0", "use_cache": True, "vocab_size": 128256,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
        "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
        "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True}}, "vocab_size": 50257,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_older_versions_wrote_them_are_taken(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | {"model_type": name}))
    settings = settings_of(find_family(name), transformers.AutoConfig.from_pretrained(tmp_path).to_dict())
    assert settings["vocab_size"] == PUBLISHED[name]["vocab_size"]
    assert settings.get("rotary_base") == PUBLISHED[name].get("rope_theta")
    assert settings.get("rope_scaling_factor") == {"llama": 8.0}.get(name)


def test_a_family_without_a_table_is_refused_with_those_known():
    with pytest.raises(PluginError, match="the families known are gpt2, llama, mixtral, qwen2, qwen3. Write its table"):
        find_family("t5")


def misuse(folder: Path):
    """On each rank: errors of models and configurations that do not belong together."""
    from accel_megatron import from_transformers, to_transformers
    from accel_megatron.conversion.building import build_model

    found = {"too early": message_of(from_transformers, LLAMA())}
    conversion_models.start(Sizes(tensor=2))
    model, config = from_transformers(LLAMA()), LLAMA()
    found["unknown"] = message_of(from_transformers, LLAMA(), colour="red")
    family = find_family("llama")
    bare = build_model(settings_of(family, config.to_dict()))
    found["no configuration"] = message_of(to_transformers, bare, folder)
    config.rms_norm_eps = 1e-4
    found["other epsilon"] = message_of(to_transformers, model, folder, config=config)
    config = LLAMA()
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    found["other rotation"] = message_of(to_transformers, model, folder, config=config)
    found["other scale"] = message_of(to_transformers, from_transformers(LLAMA(), softmax_scale=0.5), folder)
    found["biases"] = message_of(from_transformers, LLAMA(), add_qkv_bias=True)
    found["rows"] = message_of(to_transformers, with_a_bias(model), folder)
    (folder / "file").write_text("")
    found["disk"] = message_of(to_transformers, from_transformers(LLAMA()), folder / "file")
    found["pass it"] = message_of(to_transformers, bare, folder / "good", config=LLAMA())
    conversion_models.end()
    return found


def with_a_bias(model):
    model.decoder.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    return model


def test_models_and_configurations_that_do_not_belong_together_are_refused_on_every_rank(tmp_path):
    for found in run_ranks(misuse, 2, tmp_path):
        assert "Accelerator(strategy=Megatron(...)) first" in found["too early"][1]
        assert found["unknown"][0] == "TypeError"
        assert "neither TransformerConfig nor GPTModel of Megatron-core has that" in found["unknown"][1]
        assert "not built by from_transformers(), and has none. Pass it" in found["no configuration"][1]
        assert "the model has layernorm_epsilon=0.001 instead of 0.0001" in found["other epsilon"][1]
        assert "other frequencies of rotary embeddings than {'rotary_base': 10000.0" in found["other rotation"][1]
        assert "the model has softmax_scale=0.5 instead of None" in found["other scale"][1]
        assert "its table has no row for 4 parameters of this GPTModel: decoder.layers.0.self" in found["biases"][1]
        assert "its table has no row for 1 parameters of this GPTModel: decoder.extra" in found["rows"][1]
        assert found["disk"][0] in ("NotADirectoryError", "OSError", "FileExistsError")
        assert found["pass it"] is None
    assert json.loads((tmp_path / "good/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# Third parties.


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Installs a distribution that offers tables, by lines of its entry points."""

    def install(name, *lines):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("\n".join(["[accel_megatron.families]", *lines]))
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_third_parties_families_compute_the_same(offered, tmp_path):
    offered("their-families", "phi3 = their_families:PHI3", "granitemoe = their_families:GRANITE_MOE")
    folders = {name: conversion_models.make(name, tmp_path) for name in ("phi3", "granitemoe")}
    cases = [("phi3", Sizes(tensor=2)), ("granitemoe", Sizes(experts=2)), ("granitemoe", Sizes(tensor=2))]
    tasks = [(folders[name], tmp_path / f"{number}", sizes) for number, (name, sizes) in enumerate(cases)]
    ranks = run_ranks(conversion_models.convert, 2, tasks)
    for number, (name, sizes) in enumerate(cases):
        found = [results[number] for results in ranks][: sizes.tensor]
        logits = torch.cat([each.logits for each in found], -1)[..., : conversion_models.VOCABULARY]
        old, new = conversion_models.load(folders[name]), conversion_models.load(tmp_path / f"{number}")
        torch.testing.assert_close(logits, old(conversion_models.TOKENS).logits.detach(), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(value, new.state_dict()[key]) for key, value in old.state_dict().items())
        assert all(each.read_again for each in found)


def test_two_tables_of_a_family_are_refused(offered):
    offered("their-families", "llama = their_families:PHI3")
    with pytest.raises(
        PluginError, match="several distributions say how: accel_megatron.* of accel-megatron .*, their_fam"
    ):
        find_family("llama")


def test_what_is_no_table_is_refused(offered):
    offered("their-families", "phi3 = their_families:NO_FAMILY", "olmo = their_families:PHI3")
    with pytest.raises(PluginError, match=r"The entry point 'phi3' .*, their_families:NO_FAMILY of .* it is a str\."):
        find_family("phi3")
    with pytest.raises(
        PluginError, match=r"The entry point 'olmo' .*, their_families:PHI3 of .* it is one of 'phi3'\."
    ):
        find_family("olmo")

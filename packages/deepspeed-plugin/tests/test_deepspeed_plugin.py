"""The options of DeepSpeed under their older names, and what libraries read of them."""

import inspect
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from accel_deepspeed import DeepSpeedPlugin, HfDeepSpeedConfig, get_active_deepspeed_plugin
from accel_deepspeed.configuration import Configuration
from accel_deepspeed.older_names import OlderAttributes


class DeepSpeed(OlderAttributes):
    """Reads its options as the strategy does."""

    def __init__(self, config=None, moe_leaf_modules=(), **options):
        self.configuration = Configuration.read(config, **options)
        self.moe_leaf_modules = moe_leaf_modules


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    module = ModuleType("accel_deepspeed.strategy")
    module.DeepSpeed = DeepSpeed
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_it_has_the_options_of_its_older_name_in_their_order():
    names = list(inspect.signature(DeepSpeedPlugin.__new__).parameters)[1:]
    assert names == [
        "hf_ds_config",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "is_train_batch_min",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "transformer_moe_cls_names",
        "enable_msamp",
        "msamp_opt_level",
    ]


def test_it_gives_the_strategy():
    strategy = DeepSpeedPlugin()
    assert type(strategy) is DeepSpeed
    assert isinstance(strategy, DeepSpeedPlugin)
    assert not isinstance(object(), DeepSpeedPlugin)
    assert strategy.configuration == Configuration.read()


def test_options_are_translated():
    strategy = DeepSpeedPlugin(
        zero_stage=3,
        gradient_clipping=1.0,
        gradient_accumulation_steps=4,
        offload_optimizer_device="nvme",
        offload_param_device="nvme",
        offload_optimizer_nvme_path="/a",
        offload_param_nvme_path="/b",
        transformer_moe_cls_names="Mixtral, Qwen,",
        zero3_init_flag=False,
        zero3_save_16bit_model=True,
        enable_msamp=False,
    )
    assert (strategy.zero_stage, strategy.gradient_clipping) == (3, 1.0)
    assert (strategy.offload_optimizer_device, strategy.offload_param_device) == ("nvme", "nvme")
    assert strategy.get_value("zero_optimization.offload_optimizer.nvme_path") == "/a"
    assert strategy.get_value("zero_optimization.offload_param.nvme_path") == "/b"
    assert strategy.get_value("gradient_accumulation_steps") == 4
    assert strategy.moe_leaf_modules == ("Mixtral", "Qwen")
    assert not strategy.zero3_init_flag
    assert not strategy.is_zero3_init_enabled()


def test_a_file_or_a_dictionary_may_be_given_and_is_not_changed(tmp_path):
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "auto"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for given in (config, path, str(path)):
        strategy = DeepSpeedPlugin(hf_ds_config=given, gradient_accumulation_steps=2)
        assert strategy.zero_stage == 1
        assert strategy.configuration.values["gradient_accumulation_steps"] == 2
    assert config["gradient_accumulation_steps"] == "auto"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero3_init_flag": True}, r"zero3_init_flag=True.* Write model = accelerator\.build_model\(factory\)"),
        ({"enable_msamp": True}, r"MS-AMP, which is not offered. Write Accelerator\(mixed_precision='fp8'\)"),
        ({"msamp_opt_level": "O1"}, "MS-AMP, which is not offered"),
        (
            {"hf_ds_config": {"gradient_accumulation_steps": 3}, "gradient_accumulation_steps": 2},
            r"DeepSpeedPlugin\(gradient_accumulation_steps=2\) was given, .* 'gradient_accumulation_steps' with 3. Keep one",
        ),
        (
            {
                "hf_ds_config": {"zero_optimization": {"offload_param": {"nvme_path": "/a"}}},
                "offload_param_nvme_path": "/b",
            },
            r"DeepSpeedPlugin\(offload_param_nvme_path='/b'\) was given, .* 'nvme_path' with '/a'. Keep one",
        ),
        (
            {"hf_ds_config": {"zero_optimization": {"stage": 2}}, "zero_stage": 3},
            "zero_stage=3 was given, but .* 'zero_optimization.stage' with 2",
        ),
    ],
)
def test_what_is_not_offered_or_contradicts_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DeepSpeedPlugin(**options)


def test_what_has_no_effect_is_said():
    with pytest.warns(UserWarning, match=r"zero3_save_16bit_model=False\) has no effect: .* Leave it out"):
        DeepSpeedPlugin(zero3_save_16bit_model=False)


NESTED = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False},
}


def test_a_configuration_is_asked_by_dotted_keys():
    config = HfDeepSpeedConfig(NESTED)
    assert config.config == NESTED
    assert config.config is not NESTED
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("optimizer.params.lr", 0.5) == 0.5
    assert config.get_value("zero_optimization.stage.deeper") is None
    assert config.find_config_node("bf16.enabled") == ({"enabled": "auto"}, "enabled")
    assert config.find_config_node("optimizer.params.lr") == (None, "lr")
    assert config.is_auto("bf16.enabled")
    assert config.is_false("fp16.enabled")
    assert not config.is_false("fp16.nothing")
    assert not config.is_true("fp16.enabled")
    assert config.is_true("zero_optimization.stage")
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (False, True, True)
    assert HfDeepSpeedConfig({"zero_optimization": {"stage": 2}}).is_zero2()
    assert not HfDeepSpeedConfig({"zero_optimization": {"stage": 2}}).is_offload()


def test_a_part_of_a_configuration_is_deleted():
    config = HfDeepSpeedConfig(HfDeepSpeedConfig(NESTED))
    config.del_config_sub_tree("zero_optimization.offload_param")
    config.del_config_sub_tree("optimizer.params")
    assert config.config["zero_optimization"] == {"stage": 3}
    with pytest.raises(ValueError, match="no 'optimizer.params' to delete: it has zero_optimization, bf16, fp16"):
        config.del_config_sub_tree("optimizer.params", must_exist=True)


def test_what_a_library_fills_in_later_holds_for_models_prepared_afterwards():
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": "auto"}, "train_batch_size": "auto"})
    strategy = DeepSpeedPlugin(hf_ds_config=config)
    assert strategy.hf_ds_config is config
    assert strategy.is_auto("train_batch_size")
    config.config["train_batch_size"] = 16
    config.config["zero_optimization"]["stage"] = 1
    assert strategy.current_configuration().values["train_batch_size"] == 16
    assert strategy.zero_stage == 1
    config.config["zero_optimisation"] = {}
    with pytest.raises(ValueError, match="mean 'zero_optimization'"):
        strategy.current_configuration()


def test_another_configuration_may_be_set():
    strategy = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
    first = strategy.current_configuration()
    assert first == Configuration.read(zero_stage=2, gradient_clipping=1.0)
    assert strategy.deepspeed_config["gradient_clipping"] == 1.0
    newer = HfDeepSpeedConfig(strategy.hf_ds_config.config | {"steps_per_print": 5})
    strategy.hf_ds_config = newer
    strategy.deepspeed_config = newer.config
    assert strategy.hf_ds_config is newer
    assert strategy.configuration.values["steps_per_print"] == 5
    strategy.deepspeed_config = {"steps_per_print": 6}
    assert strategy.get_value("steps_per_print") == strategy.configuration.values["steps_per_print"] == 6
    assert strategy.zero_stage == 2


@pytest.mark.parametrize("options", [
    {"hf_ds_config": {"zero_optimization": {"stage": 2}, "gradient_clipping": 0}}, {"gradient_clipping": 0},
])  # fmt: skip
def test_a_norm_of_zero_is_left_at_that_and_is_no_value_to_fill_in(options):
    strategy = DeepSpeedPlugin(**options)
    assert strategy.get_value("gradient_clipping") == 0
    assert not strategy.is_auto("gradient_clipping")
    assert strategy.current_configuration().clipping == 0
    assert DeepSpeedPlugin(zero_stage=2).is_auto("gradient_clipping")


def test_sections_of_optimizer_and_scheduler_are_seen_under_older_names():
    section = {"type": "AdamW", "params": {"lr": "auto"}}
    strategy = DeepSpeedPlugin(
        {"zero_optimization": {"stage": 2}, "optimizer": section, "scheduler": {"type": "WarmupLR"}}
    )
    assert strategy.is_auto("optimizer.params.lr")
    assert strategy.current_configuration().optimizer == section
    assert strategy.get_value("scheduler.type") == "WarmupLR"


def test_the_active_plugin_is_the_strategy_of_a_run_under_deepspeed():
    strategy = DeepSpeedPlugin()
    assert get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=strategy)) is strategy
    with pytest.raises(
        ValueError, match=r"a SimpleNamespace of a run without DeepSpeed. Write Accelerator\(strategy='deepspeed'"
    ):
        get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=None))

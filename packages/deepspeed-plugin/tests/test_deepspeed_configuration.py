"""Reading a DeepSpeed configuration: what is taken, what is compared with the arguments beside it, what is refused."""

import copy
import json
import subprocess
import sys

import pytest

from accel_deepspeed.configuration import Configuration, hidden_size_of
from accel_deepspeed.configuration_keys import REFUSED
from accel_deepspeed.older_names import HfDeepSpeedConfig

read = Configuration.read


def with_zero(**keys):
    return {"zero_optimization": {"stage": 2, **keys}}


def test_nothing_given_is_stage_2_without_clipping_or_offload():
    found = read()
    assert (found.stage, found.clipping, found.offload_optimizer, found.offload_param) == (2, None, "none", "none")
    assert found.optimizer is found.scheduler is None
    assert found.values == {"zero_optimization": {"stage": 2}}


def test_a_dictionary_a_file_and_an_object_that_holds_one_are_read_alike(tmp_path):
    config = with_zero(reduce_bucket_size=1e6) | {"gradient_clipping": 0.5}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for given in (config, path, str(path), HfDeepSpeedConfig(config)):
        found = read(given)
        assert (found.stage, found.clipping) == (2, 0.5)
        assert found.values["zero_optimization"]["reduce_bucket_size"] == 1e6
    assert read(path).source == str(path)


def test_what_is_given_is_never_changed():
    config = with_zero(offload_optimizer={"device": "auto"}) | {"optimizer": {"type": "AdamW"}, "bfloat16": {}}
    before = copy.deepcopy(config)
    read(config, offload_optimizer="cpu")
    assert config == before


def test_reading_imports_neither_deepspeed_nor_another_library():
    script = (
        "import sys; from accel_deepspeed.configuration import Configuration\n"
        "from accel_deepspeed import DeepSpeedPlugin, DummyOptim, HfDeepSpeedConfig, configured_objects\n"
        "Configuration.read({'zero_optimization': {'stage': 3}, 'optimizer': {'type': 'Lion'}})\n"
        "assert not {'deepspeed', 'transformers', 'accelerate', 'pydantic'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"bf16": {"enabled": true},\n "fp16": {"enabled": false,}}',
            r"ds\.json, line 2, column 28: this is not JSON",
        ),
        ('{"bf16": {},\n "bf16": {}}', r"ds\.json has the key 'bf16' twice in one section. Keep one"),
        ("[1]", r"ds\.json holds a list, where an object of keys is expected"),
    ],
)
def test_a_broken_file_is_named_with_its_place(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_missing_file_and_what_is_no_configuration_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no such file \(looked for at .*none\.json\)\. Give the path of a JSON file"
    ):
        read(tmp_path / "none.json")
    with pytest.raises(TypeError, match="config=3 is a int: give a dictionary, or the path of a JSON file"):
        read(3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gradient_cliping": 1},
            "has 'gradient_cliping', but DeepSpeed's configuration has no key .* mean 'gradient_clipping'",
        ),
        (
            with_zero(overlap_com=True),
            "has 'zero_optimization.overlap_com', .* 'zero_optimization' has no key .* mean 'overlap_comm'",
        ),
        (
            with_zero(offload_optimizer={"pin_memry": True}),
            "'zero_optimization.offload_optimizer.pin_memry', .* mean 'pin_memory'",
        ),
        ({"timers": {"throughput": {"enable": True}}}, "'timers.throughput.enable', .* mean 'enabled'"),
        ({"zzz": 1}, "has no key 'zzz'. Known are activation_checkpointing, aio, bf16"),
        ({"optimizer": {"type": "AdamW", "param": {}}}, "'optimizer.param', .* mean 'params'"),
        (
            {"optimizer": {"type": "AdmW"}},
            "'optimizer.type' with 'AdmW', but nothing is called so. Did you mean 'AdamW'",
        ),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, "SGD has no such option. Did you mean 'momentum'"),
        (
            {"optimizer": {"type": "adamw", "params": {"zz": 1}}},
            "'optimizer.params.zz', but adamw has no such option. Known are",
        ),
        ({"scheduler": {"type": "WarmupLr"}}, "'scheduler.type' with 'WarmupLr', .* mean 'WarmupLR'"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "'scheduler.params.warmup_steps', but WarmupLR has no such option. Did you mean 'warmup_num_steps'",
        ),
    ],
)
def test_an_unknown_key_is_refused_at_every_depth_with_the_nearest_name(config, message):
    with pytest.raises(ValueError, match=message):
        read(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prescale_gradients": "false"}, "'prescale_gradients' with 'false', a str, .* Write true or false"),
        ({"gradient_clipping": "1.0"}, "'gradient_clipping' with '1.0', a str, .* Write a number"),
        ({"steps_per_print": True}, "'steps_per_print' with True, a bool"),
        ({"communication_data_type": 16}, "'communication_data_type' with 16, a int, .* Write a text"),
        (
            {"zero_optimization": True},
            r'\'zero_optimization\' with True, where a section of keys is expected: write {"stage": 1}',
        ),
        ({"bf16": True}, "'bf16' with True, where a section of keys is expected."),
        ({"optimizer": {"type": "SGD", "params": [1]}}, r"'optimizer.params' with \[1\], where a section of options"),
    ],
)
def test_a_value_that_deepspeed_would_misread_is_refused(config, message):
    with pytest.raises(TypeError, match=message):
        read(config)


@pytest.mark.parametrize("key", REFUSED)
def test_what_has_no_place_beside_a_loop_is_refused_with_what_to_do_and_taken_where_it_is_off(key):
    *sections, name = key.split(".")
    assert sections in ([], ["zero_optimization"])

    def having(value):
        return with_zero(**{name: value}) if sections else with_zero() | {name: value}

    for on in ({"enabled": True}, {"anything": 1}, True):
        with pytest.raises(ValueError, match=rf"has '{key}', which has no place here\. \S+"):
            read(having(on))
    for off in ({"enabled": False, "anything": 1}, {}, None, False):
        assert read(having(off)).values == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_allreduce_op": "sum"}, "'gradient_allreduce_op' with 'sum', .* multiply the loss for a sum"),
        (
            {"managed_gradient_accumulation": False},
            "'managed_gradient_accumulation' with False, .* accelerator.accumulate",
        ),
        ({"bf16": {}, "bfloat16": {}}, "'bf16' and its older name 'bfloat16'. Keep 'bf16'"),
        ({"optimizer": {"type": "Muon"}}, "'optimizer.type' with 'Muon', which is not offered. .* choose another"),
        ({"optimizer": {"type": "OneBitAdam"}}, 'which is not offered. DeepSpeed has removed it; choose "AdamW"'),
        ({"optimizer": {"params": {}}}, "'optimizer.type' with None. Write a name, such as \"AdamW\""),
        ({"scheduler": {"type": "auto"}}, "'scheduler.type' with 'auto'. Write a name, such as \"WarmupLR\""),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 2}}},
            "'optimizer.params.max_grad_norm', which clips nothing. Write \"gradient_clipping\": 2",
        ),
    ],
)
def test_other_refusals_say_what_to_write(config, message):
    with pytest.raises(ValueError, match=message):
        read(config)


def test_values_with_a_place_are_taken():
    assert read(with_zero() | {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True}).stage == 2
    assert read(with_zero() | {"bfloat16": {"enabled": "auto"}}).values["bf16"] == {"enabled": "auto"}


def test_the_stage_is_that_of_the_argument_or_of_the_configuration():
    assert read(zero_stage=3).stage == 3
    assert read({"zero_optimization": {"stage": "auto"}}).stage == 2
    assert read({"bf16": {}}, zero_stage=0).values["zero_optimization"] == {"stage": 0}
    assert read(with_zero(), zero_stage=2).stage == 2


@pytest.mark.parametrize(
    ("config", "stage", "message"),
    [
        (with_zero(), 3, "zero_stage=3 was given, but .* 'zero_optimization.stage' with 2. Keep one of them"),
        (None, 4, "zero_stage=4 was given; known are 0, 1, 2 and 3"),
        (None, True, "zero_stage=True was given"),
        ({"zero_optimization": {"stage": 5}}, None, "'zero_optimization.stage' with 5; known are 0, 1, 2 and 3"),
        ({"bf16": {}}, None, r'does not say which stage of ZeRO is meant. Write "zero_optimization": {"stage": 2}'),
    ],
)
def test_a_stage_that_contradicts_or_does_not_exist_is_refused(config, stage, message):
    with pytest.raises(ValueError, match=message):
        read(config, zero_stage=stage)


def test_clipping_is_remembered_and_not_left_to_deepspeed():
    assert read(with_zero() | {"gradient_clipping": 2}).clipping == 2.0
    assert read(with_zero() | {"gradient_clipping": 2}, gradient_clipping=2.0).clipping == 2.0
    assert read(with_zero() | {"gradient_clipping": "auto"}, gradient_clipping=1).clipping == 1.0
    assert read(with_zero() | {"gradient_clipping": 0}).clipping == 0
    assert read(gradient_clipping=0).clipping == 0
    assert read().clipping is None
    assert "gradient_clipping" not in read(with_zero() | {"gradient_clipping": 2}).values
    with pytest.raises(
        ValueError, match=r"gradient_clipping=1\.0 was given, but .* 'gradient_clipping' with 2. Keep one"
    ):
        read(with_zero() | {"gradient_clipping": 2}, gradient_clipping=1.0)
    with pytest.raises(ValueError, match="gradient_clipping is -1: expected the largest norm, above 0; or 0"):
        read(gradient_clipping=-1)


def test_sections_of_optimizer_and_scheduler_are_remembered_and_not_given_to_deepspeed():
    optimizer, scheduler = {"type": "AdamW", "params": {"lr": "auto"}}, {"type": "WarmupLR"}
    found = read(with_zero() | {"optimizer": optimizer, "scheduler": scheduler})
    assert (found.optimizer, found.scheduler) == (optimizer, scheduler)
    assert not {"optimizer", "scheduler"} & found.values.keys()


def test_another_dictionary_is_read_with_the_same_arguments():
    found = read(zero_stage=3, offload_optimizer="cpu").reread({"steps_per_print": 7})
    assert (found.stage, found.offload_optimizer, found.values["steps_per_print"]) == (3, "cpu", 7)


class Model:
    def __init__(self, **config):
        self.config = type("Config", (), config)()


def test_the_width_of_a_model_is_that_of_its_config():
    text = type("Text", (), {"hidden_size": 5})()
    assert hidden_size_of(Model(hidden_size=8)) == 8
    assert hidden_size_of(Model(hidden_sizes=[2, 9, 4])) == 9
    assert hidden_size_of(Model(text_config=text)) == 5
    assert hidden_size_of(Model(text_config=type("Text", (), {"hidden_sizes": (1, 3)})())) == 3
    assert hidden_size_of(Model()) is hidden_size_of(object()) is None

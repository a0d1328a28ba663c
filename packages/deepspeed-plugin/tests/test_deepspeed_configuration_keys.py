"""The tables of known keys against the installed DeepSpeed: a version with other keys makes these tests fail."""

import inspect
import logging
from collections.abc import Mapping

import pytest
import torch

from accel_core import PrecisionPolicy
from accel_deepspeed.configuration import Configuration
from accel_deepspeed.configuration_keys import KEYS, ONLY, REFUSED
from accel_deepspeed.configuration_offload import _OF_FILES
from accel_deepspeed.configuration_precision import _SCALER
from accel_deepspeed.configured_names import OPTIMIZERS, SCHEDULERS
from accel_deepspeed.configured_objects import optimizer_kind


class Recorder(dict):
    """A section that notes which keys are asked for, and gives sections that do the same."""

    def __init__(self, values, path, asked):
        super().__init__(values)
        self.path, self.asked = path, asked

    def __getitem__(self, key):
        self.asked.add((*self.path, key))
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add((*self.path, key))
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked.add((*self.path, key))
        return super().get(key, default)

    def keys(self):
        return self  # for `key in section.keys()`

    def __copy__(self):
        return Recorder(self, self.path, self.asked)


@pytest.fixture(scope="module")
def asked():
    """The keys that DeepSpeed asks for while it reads a configuration, as paths."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    found = set()
    read_as_they_are = ("activation_checkpointing", "aio", "data_types", "timers", "torch_autocast")
    sections = {name: Recorder({}, (name,), found) for name in read_as_they_are}
    sections["torch_autocast"].update(dtype="bf16", lower_precision_safe_modules=["torch.nn.Linear"])
    sections |= {name: Recorder({"type": "Adam", "params": {}}, (name,), found) for name in ("optimizer", "scheduler")}
    level = logger.level
    logger.setLevel(logging.ERROR)
    DeepSpeedConfig(Recorder({"train_batch_size": 1, **sections}, (), found))
    logger.setLevel(level)
    return found


OF_INITIALIZE = {"data_parallel_size", "sequence_parallel_size"}  # read by deepspeed.initialize, together


def test_the_keys_of_the_top_level_are_those_that_deepspeed_reads(asked):
    top = {path[0] for path in asked if len(path) == 1}
    ours = {*KEYS, *(name for name in REFUSED if "." not in name)}
    assert ours - OF_INITIALIZE == top
    assert ONLY.keys() <= KEYS.keys()


def test_the_keys_of_sections_that_deepspeed_reads_as_they_are(asked):
    sections = {path[0] for path in asked if len(path) == 2}
    assert sections == {
        "activation_checkpointing",
        "aio",
        "data_types",
        "optimizer",
        "scheduler",
        "timers",
        "torch_autocast",
    }
    for section in sections:
        assert {path[1] for path in asked if path[0] == section and len(path) == 2} == KEYS[section].keys()


def models():
    """The sections that pydantic checks, with their models."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def test_the_keys_of_checked_sections_are_the_fields_of_their_models():
    for path, model in models().items():
        section = KEYS
        for name in path.split("."):
            section = section[name]
        fields = {name for field, facts in model.model_fields.items() for name in (field, facts.alias or field)}
        refused = {name.removeprefix(f"{path}.") for name in REFUSED if name.startswith(f"{path}.")}
        removed = refused - fields
        assert {*section, *refused} - removed == fields, path
        assert all("removed" in REFUSED[f"{path}.{name}"] for name in removed)


def test_every_section_of_the_table_is_compared_with_deepspeed(asked):
    compared = {*models(), *(path[0] for path in asked if len(path) == 2)}

    def sections(table, path=()):
        for name, value in table.items():
            if isinstance(value, Mapping):
                yield ".".join((*path, name))
                yield from sections(value, (*path, name))

    assert set(sections(KEYS)) == compared


def test_what_deepspeed_has_removed_is_refused_here():
    from deepspeed.runtime import config

    assert config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= REFUSED.keys()
    assert {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS} <= REFUSED.keys()


def test_the_options_of_optimizers_are_those_of_the_classes():
    by_deepspeed = {"torch_adam", "adam_w_mode"}  # read beside the class, under names of their own
    for name, options in OPTIMIZERS.items():
        taken = set()
        for offloaded in (True, False):
            kind, _ = optimizer_kind(name, {}, offloaded, "cpu")
            taken |= set(inspect.signature(kind).parameters)
        if name.startswith("adam"):
            taken |= by_deepspeed | {"bias_correction"}
        assert options == taken - {"params", "model_params", "adamw_mode", "max_grad_norm"}, name


def test_the_names_of_optimizers_are_those_that_deepspeed_knows_beside_torchs():
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    for name in set(DEEPSPEED_OPTIMIZERS) - OPTIMIZERS.keys():
        with pytest.raises(ValueError, match="which is not offered"):
            Configuration.read({"optimizer": {"type": name}}, zero_stage=2)
    assert OPTIMIZERS.keys() <= set(DEEPSPEED_OPTIMIZERS)


def test_the_schedules_and_their_options_are_deepspeeds():
    from deepspeed.runtime import lr_schedules

    assert SCHEDULERS.keys() == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, options in SCHEDULERS.items():
        assert options == set(inspect.signature(getattr(lr_schedules, name)).parameters) - {"optimizer"}


def test_the_defaults_of_loss_scaling_are_deepspeeds():
    fields = models()["fp16"].model_fields
    assert {name: fields[name].default for name in _SCALER} == _SCALER


def test_the_defaults_of_files_for_optimizer_state_are_deepspeeds():
    fields = models()["zero_optimization.offload_optimizer"].model_fields
    assert {name: fields[name].default for name in _OF_FILES} == _OF_FILES
    assert fields.keys() - _OF_FILES.keys() == {"device", "nvme_path", "pin_memory", "ratio"}  # which have an effect


def test_a_completed_configuration_is_one_that_deepspeed_takes():
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "train_batch_size": "auto",
    }
    found = Configuration.read(config).resolved(
        world_size=1, policy=PrecisionPolicy(compute=torch.bfloat16), hidden_size=16
    )
    level = logger.level
    logger.setLevel(logging.ERROR)
    taken = DeepSpeedConfig(found)
    logger.setLevel(level)
    assert taken.gradient_clipping == 0.0
    assert taken.zero_config.reduce_bucket_size == 256
    assert taken.bfloat16_config.enabled
    assert not taken.bfloat16_config.check_grad_overflow
    assert (taken.train_batch_size, taken.gradient_accumulation_steps, taken.optimizer_name) == (1, 1, None)

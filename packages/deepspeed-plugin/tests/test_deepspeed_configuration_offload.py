"""Where a configuration offloads to: devices, stages, folders."""

import os

import pytest

from accel_core import PrecisionPolicy
from accel_deepspeed.configuration import Configuration

read = Configuration.read


def configured(stage=3, **sections):
    return {"zero_optimization": {"stage": stage, **sections}}


def zero_of(*args, **options):
    return read(*args, **options).values["zero_optimization"]


def test_arguments_and_sections_ask_for_the_same():
    assert zero_of(zero_stage=2, offload_optimizer="cpu") == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert zero_of(configured(offload_param={"device": "cpu", "pin_memory": False})) == {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    assert zero_of(configured(offload_param={"device": "auto", "nvme_path": "auto"}), offload_param="cpu") == {
        "stage": 3,
        "offload_param": {"device": "cpu"},
    }
    assert read(configured(offload_optimizer={"device": "cpu"})).offload_optimizer == "cpu"


def test_none_leaves_parts_where_they_are():
    assert zero_of(configured(offload_optimizer={"device": "none", "nvme_path": None}, offload_param=None)) == {
        "stage": 3
    }
    assert zero_of(configured(offload_optimizer={"device": "auto"})) == {"stage": 3}


def test_a_folder_goes_to_what_is_offloaded_to_nvme(tmp_path):
    zero = zero_of(zero_stage=3, offload_optimizer="nvme", offload_param="cpu", offload_folder=tmp_path)
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path)}
    assert zero["offload_param"] == {"device": "cpu"}
    assert (
        zero_of(configured(offload_param={"device": "nvme", "nvme_path": "/a"}))["offload_param"]["nvme_path"] == "/a"
    )


def test_options_of_deepspeeds_own_files_are_taken_where_it_has_them_or_they_change_nothing():
    tuned = {"buffer_count": 7, "pipeline_write": True}
    for section in ({"device": "cpu", **tuned}, {"device": "nvme", "nvme_path": "/a", "buffer_count": 4}):
        assert zero_of(configured(offload_optimizer=section))["offload_optimizer"] == section
    section = {"device": "nvme", "nvme_path": "/a", "buffer_count": 7}
    assert zero_of(configured(offload_param=section))["offload_param"] == section


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (None, {"offload_optimizer": "disk"}, "offload_optimizer='disk' was given; known are 'none', 'cpu', 'nvme'"),
        (
            configured(offload_param={"device": "gpu"}),
            {},
            "'zero_optimization.offload_param.device' with 'gpu'; known are",
        ),
        (
            configured(offload_param={"device": "nvme"}),
            {"offload_param": "cpu"},
            "offload_param='cpu' was given, but .* 'zero_optimization.offload_param.device' with 'nvme'. Keep one",
        ),
        (
            None,
            {"offload_param": "cpu"},
            "offload_param to 'cpu' .* ZeRO stage 2, .* zero_stage=3; or leave offload_param out",
        ),
        (None, {"offload_optimizer": "nvme"}, "offload_optimizer to 'nvme' was asked for with ZeRO stage 2"),
        (None, {"offload_optimizer": "cpu", "zero_stage": 0}, "ZeRO stage 0, .* It takes zero_stage=1 or higher"),
        (
            None,
            {"offload_param": "nvme", "zero_stage": 3},
            "'nvme' was asked for without a folder. Write offload_folder=",
        ),
        (
            None,
            {"offload_folder": "/a"},
            "offload_folder='/a' was given, but nothing is offloaded to NVMe: offload_optimizer to",
        ),
        (
            configured(
                offload_optimizer={"device": "nvme", "nvme_path": "/a", "buffer_count": 5, "pipeline_read": True}
            ),
            {},
            "'zero_optimization.offload_optimizer' with buffer_count 5, pipeline_read True, .* memory-mapped files, .* Take",
        ),
        (
            configured(offload_optimizer={"device": "auto", "super_offload": True}),
            {"offload_optimizer": "nvme", "offload_folder": "/a"},
            "'zero_optimization.offload_optimizer' with super_offload True, which DeepSpeed's own offloading reads",
        ),
        (
            configured(offload_param={"device": "nvme", "nvme_path": "/a"}),
            {"offload_folder": "/b"},
            "offload_folder='/b' was given, but .* 'zero_optimization.offload_param.nvme_path' with '/a'. Keep one",
        ),
    ],
)
def test_contradictions_and_what_deepspeed_would_ignore_are_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        read(config, **options)


def complete(folder):
    configuration = read(zero_stage=3, offload_param="nvme", offload_folder=folder)
    return configuration.resolved(world_size=1, policy=PrecisionPolicy())


def test_a_folder_that_can_be_made_is_taken_and_not_made(tmp_path):
    complete(tmp_path / "new" / "folder")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_deepspeed_starts(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"'offload_param' is to be kept in .*, but .*file' is not a folder on this machine"
    ):
        complete(tmp_path / "file" / "folder")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"is not writable on this machine. Give a folder .* offload_folder='...'"):
        complete(tmp_path)

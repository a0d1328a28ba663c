"""Completing a configuration when the run is known: batch sizes, dtypes, and sizes that follow from the model."""

import pickle

import pytest
import torch

from accel_core import PrecisionPolicy
from accel_deepspeed.configuration import Configuration
from accel_deepspeed.configuration_completion import accumulation_steps

FULL = PrecisionPolicy()
BF16 = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)
BF16_TRUE = PrecisionPolicy(param=torch.bfloat16, input=torch.bfloat16)
FP16 = PrecisionPolicy(compute=torch.float16)


def resolved(config=None, policy=FULL, zero_stage=None, world_size=2, **facts):
    configuration = Configuration.read(config, zero_stage=zero_stage)
    return configuration.resolved(world_size=world_size, policy=policy, **facts)


def with_stage(stage=2, /, **keys):
    return {"zero_optimization": {"stage": stage}, **keys}


def test_what_the_core_does_deepspeed_is_told_not_to():
    found = resolved(with_stage(gradient_clipping=1.0, train_micro_batch_size_per_gpu=8))
    assert found == {
        "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    assert resolved(with_stage(zero_force_ds_cpu_optimizer=True))["zero_force_ds_cpu_optimizer"] is True


def test_the_norm_that_nobody_reads_is_not_computed_where_deepspeed_offers_that():
    def computed(stage, **keys):
        return resolved({"zero_optimization": {"stage": stage, **keys}})["zero_optimization"].get(
            "compute_grad_norm", True
        )

    assert [computed(stage) for stage in range(4)] == [True, False, False, True]
    assert computed(2, offload_optimizer={"device": "cpu"})
    assert computed(2, compute_grad_norm=True)


def test_the_configuration_stays_as_it_was_read():
    configuration = pickle.loads(pickle.dumps(Configuration.read(with_stage(bf16={"enabled": "auto"}))))
    for _ in range(2):
        found = configuration.resolved(world_size=1, policy=BF16)
        assert found["bf16"]["enabled"] is True
        found["zero_optimization"]["stage"] = 0
    assert configuration.values["bf16"] == {"enabled": "auto"}


@pytest.mark.parametrize(("keys", "micro", "steps"), [
    ({}, 1, None),
    ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, 1, None),
    ({"train_micro_batch_size_per_gpu": 4}, 4, None),
    ({"train_batch_size": 48, "gradient_accumulation_steps": "auto"}, 24, None),
    ({"train_batch_size": 48, "gradient_accumulation_steps": 3}, 8, 3),
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3}, 8, 3),
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": "auto"}, 8, 3),
    ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8}, 8, 1),
])  # fmt: skip
def test_batch_sizes_and_steps_follow_from_each_other(keys, micro, steps):
    found = resolved(with_stage(**keys))
    assert found["train_micro_batch_size_per_gpu"] == micro
    assert found["train_batch_size"] == 2 * micro
    assert found["gradient_accumulation_steps"] == 1
    assert accumulation_steps(keys, 2) == steps


@pytest.mark.parametrize(("keys", "message"), [
    (
        {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        r"48, but train_micro_batch_size_per_gpu\(4\) \* gradient_accumulation_steps\(3\) \* processes\(2\) = 24\. Change one",
    ),
    (
        {"train_batch_size": 50, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"},
        r"50, but train_micro_batch_size_per_gpu\(4\) \* gradient_accumulation_steps\(1\) \* processes\(2\) = 8\. Change one",
    ),
    ({"train_batch_size": 7}, r"7, but train_micro_batch_size_per_gpu\(\?\) .* processes\(2\) = no multiple"),
])  # fmt: skip
def test_numbers_that_contradict_each_other_are_refused_with_the_formula(keys, message):
    with pytest.raises(ValueError, match=message):
        resolved(with_stage(**keys))


def test_bf16_parameters_are_what_the_section_or_the_precision_asks_for():
    assert "bf16" not in resolved(policy=BF16)
    assert "bf16" not in resolved(with_stage(bf16={"enabled": False}), BF16)
    assert "bf16" not in resolved(with_stage(bf16={"enabled": "auto"}), FULL)
    assert "bf16" not in resolved(with_stage(0, bf16={"enabled": "auto"}), BF16)
    on = {"enabled": True, "check_grad_overflow": False}
    assert resolved(with_stage(bf16={"enabled": "auto"}), BF16)["bf16"] == on
    assert resolved(with_stage(bf16={"enabled": True}), BF16)["bf16"] == on
    assert resolved(policy=BF16_TRUE)["bf16"] == on
    assert resolved(parameter_dtype=torch.bfloat16)["bf16"] == on
    kept = with_stage(bf16={"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True})
    assert resolved(kept, BF16)["bf16"] == kept["bf16"]


@pytest.mark.parametrize(
    ("config", "policy", "message"),
    [
        (
            with_stage(bf16={"enabled": True}),
            FULL,
            "'bf16.enabled' with true, but the precision is: as it is. Write .*mixed_precision='bf16'",
        ),
        (with_stage(bf16={"enabled": False}), BF16_TRUE, 'with false, but parameters are in bfloat16 .* Write "auto"'),
        (
            with_stage(0, bf16={"enabled": True}),
            BF16,
            "ZeRO stage 0 .* first steps have a wrong size. Write zero_stage=1",
        ),
        (with_stage(0), BF16_TRUE, "ZeRO stage 0 was asked for with parameters in bfloat16"),
        (with_stage(fp16={"enabled": True}), FP16, "'fp16.enabled' with true, and gradients .*mixed_precision='fp16'"),
        (
            with_stage(),
            PrecisionPolicy(param=torch.float16),
            "Parameters are in float16 .*, and gradients of parameters",
        ),
        (
            with_stage(fp16={"enabled": "auto", "loss_scale_window": 500, "hysteresis": 4}),
            FP16,
            r"'fp16' with loss_scale_window 500, hysteresis 4, but the Accelerator scales losses. Write .*GradScalerKwargs",
        ),
        (
            with_stage(fp16={"enabled": "auto", "fp16_master_weights_and_grads": True}),
            FP16,
            "'fp16.fp16_master_weights_and_grads', but parameters stay as they are, .* Take it out",
        ),
        (
            with_stage(fp16={"enabled": "auto", "auto_cast": True}),
            FP16,
            "'fp16.auto_cast', but the Accelerator computes by autocast, .* Take it out",
        ),
        (
            with_stage(torch_autocast={"enabled": "auto", "lower_precision_safe_modules": ["torch.nn.Linear"]}),
            BF16,
            "'torch_autocast.lower_precision_safe_modules', but the Accelerator computes by autocast",
        ),
        (
            with_stage(torch_autocast={"enabled": True}),
            FULL,
            "'torch_autocast' with no dtype, but the precision is: as it is",
        ),
        (
            with_stage(torch_autocast={"enabled": True, "dtype": "float16"}),
            BF16,
            "'torch_autocast' with float16, but the precision is: compute bfloat16",
        ),
        (
            with_stage(torch_autocast={"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}),
            BF16,
            "'torch_autocast.lower_precision_safe_modules', but the Accelerator computes by autocast",
        ),
        (with_stage(communication_data_type="int8"), FULL, "with 'int8'; known are 'fp32', 'fp16', 'bf16'"),
        (
            with_stage(communication_data_type="fp32"),
            PrecisionPolicy(reduce=torch.bfloat16),
            r"'communication_data_type' with 'fp32', but gradients are to travel in torch\.bfloat16 by the precision",
        ),
        (with_stage(), PrecisionPolicy(reduce=torch.float64), r"travel in torch\.float64 .* only fp32, fp16, bf16"),
        (
            with_stage(1, bf16={"enabled": "auto"}, data_types={"grad_accum_dtype": "fp32"}),
            BF16,
            "'data_types.grad_accum_dtype' with 'fp32' at stage 1, .* Write zero_stage=2",
        ),
    ],
)
def test_dtypes_that_contradict_the_precision_are_refused(config, policy, message):
    with pytest.raises(ValueError, match=message):
        resolved(config, policy)


def test_what_the_core_computes_in_deepspeed_does_not_hear_of():
    usual = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
    usual |= {"auto_cast": False, "fp16_master_weights_and_grads": False}
    for policy in (FULL, BF16, FP16):
        assert "fp16" not in resolved(with_stage(fp16=usual), policy)
    asked = {"auto_cast": True, "fp16_master_weights_and_grads": True, "loss_scale_window": 500}
    for section in ({"enabled": "auto", **asked}, {"enabled": False, **asked}, asked):
        assert "fp16" not in resolved(with_stage(fp16=section), BF16)  # it is off
    assert "torch_autocast" not in resolved(
        with_stage(torch_autocast={"enabled": True, "dtype": "torch.bfloat16"}), BF16
    )
    modules = {"lower_precision_safe_modules": ["torch.nn.Linear"]}
    for section in ({"enabled": "auto"}, {"enabled": "auto", **modules}, {"enabled": False, **modules}, modules):
        assert "torch_autocast" not in resolved(with_stage(torch_autocast=section), FULL)
    assert "torch_autocast" not in resolved(with_stage(torch_autocast={"enabled": "auto"}), BF16)


def test_gradients_travel_in_the_dtype_of_the_policy_or_of_the_configuration():
    reduced = PrecisionPolicy(reduce=torch.bfloat16)
    assert resolved(policy=reduced)["communication_data_type"] == "bf16"
    assert resolved(with_stage(communication_data_type="BF16"), reduced)["communication_data_type"] == "bf16"
    assert resolved(with_stage(communication_data_type="fp16"), FULL)["communication_data_type"] == "fp16"
    assert "communication_data_type" not in resolved(with_stage(communication_data_type="auto"), FULL)


SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def test_sizes_follow_from_the_width_of_the_model():
    config = {"zero_optimization": {"stage": 3, **dict.fromkeys(SIZES, "auto")}}
    zero = resolved(config, hidden_size=64)["zero_optimization"]
    assert [zero[name] for name in SIZES] == [4096, 3686, 640]
    config["zero_optimization"] |= {"stage": 2, "compute_grad_norm": True}
    found = resolved(config, hidden_size=64)["zero_optimization"]
    assert found == {"stage": 2, "compute_grad_norm": True, "reduce_bucket_size": 4096}


def test_sizes_stay_open_without_a_width_and_are_refused():
    with pytest.raises(
        ValueError, match='"auto" for reduce_bucket_size, .* neither hidden_size .* Write numbers of elements'
    ):
        resolved({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})


def test_an_auto_that_nothing_fills_in_is_refused_by_name():
    config = {"zero_optimization": {"stage": 3, "overlap_comm": "auto"}, "steps_per_print": "auto"}
    with pytest.raises(
        ValueError, match="\"auto\" for 'zero_optimization.overlap_comm', 'steps_per_print', which nothing"
    ):
        resolved(config)
    assert (
        resolved(with_stage(data_types={"keep_in_fp32_modules": "auto"}))["data_types"]["keep_in_fp32_modules"]
        == "auto"
    )

"""Precisions hold under FSDP as they do elsewhere: the same suite, on two ranks that hold parts of the parameters."""

from accel_core.testing import PrecisionSuite

PICKLED = {
    "test_a_model_without_the_casts_can_be_pickled": "a sharded model refuses to be copied, and says what to copy instead"
}


class TestBF16(PrecisionSuite):
    precision = "bf16"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 2e-2, 5e-2


class TestFP16(PrecisionSuite):
    precision = "fp16"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 1e-2, 2e-2


class TestBF16True(PrecisionSuite):
    precision = "bf16-true"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 5e-2, 5e-2


class TestFP8(PrecisionSuite):
    precision = "fp8"
    strategies = (("fsdp", 2),)
    lacks = PICKLED
    tolerance, gradient_tolerance = 5e-2, 0.2

"""Every precision of the package passes the suite that defines what a precision is."""

from accel_testing import PrecisionSuite


class TestBF16(PrecisionSuite):
    precision = "bf16"
    tolerance, gradient_tolerance = 2e-2, 5e-2


class TestFP16(PrecisionSuite):
    precision = "fp16"
    tolerance, gradient_tolerance = 1e-2, 2e-2


class TestBF16True(PrecisionSuite):
    precision = "bf16-true"
    strategies = (("ddp", 2),)
    tolerance, gradient_tolerance = 5e-2, 5e-2


class TestFP16True(PrecisionSuite):
    precision = "fp16-true"
    strategies = (("single", 1), ("ddp", 2))
    tolerance, gradient_tolerance = 2e-2, 5e-2


class TestTF32(PrecisionSuite):
    precision = "tf32"
    tolerance, gradient_tolerance = 1e-2, 2e-2


class TestFP8(PrecisionSuite):
    precision = "fp8"
    strategies = (("ddp", 2),)
    tolerance, gradient_tolerance = 5e-2, 0.2


class TestMXFP8(PrecisionSuite):
    precision = "mxfp8"
    strategies = (("single", 1), ("ddp", 2))
    tolerance, gradient_tolerance = 5e-2, 0.2

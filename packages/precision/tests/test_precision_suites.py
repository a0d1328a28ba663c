"""Every precision of the package passes the suite that defines what a precision is."""

from importlib.metadata import version

import pytest

from accel_testing import PrecisionSuite

with_mx = pytest.mark.skipif(
    tuple(map(int, version("torchao").split(".")[:2])) < (0, 18),
    reason="MXFP8 is in torchao from 0.18 on, which needs torch 2.11",
)


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


@with_mx
class TestMXFP8(PrecisionSuite):
    precision = "mxfp8"
    strategies = (("single", 1), ("ddp", 2))
    tolerance, gradient_tolerance = 5e-2, 0.2

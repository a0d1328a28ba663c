"""Hardware that cannot compute in a dtype is named, with what to choose instead."""

from __future__ import annotations

import pytest
import torch

from accel_precision import capability


@pytest.mark.parametrize(
    ("dtype", "has", "needs"),
    [
        (torch.bfloat16, (7, 5), "its compute capability is 7.5, and bfloat16 needs 8.0 (Ampere) or newer"),
        (torch.float16, (5, 0), "float16 needs 5.3"),
    ],
)
def test_an_older_device_falls_short_of_a_dtype(dtype: torch.dtype, has: tuple[int, int], needs: str) -> None:
    found = capability.shortfall(dtype, has)

    assert found is not None
    assert needs in found


@pytest.mark.parametrize(
    ("dtype", "has"),
    [(torch.bfloat16, (8, 0)), (torch.float16, (7, 0)), (torch.float32, (5, 0))],
)
def test_a_newer_device_does_not(dtype: torch.dtype, has: tuple[int, int]) -> None:
    assert capability.shortfall(dtype, has) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cpu_computes_in_both_half_precisions(dtype: torch.dtype) -> None:
    capability.require("BF16()", dtype, torch.device("cpu"))


def test_a_kind_of_device_without_mixed_precision_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"BF16\(\) computes in bfloat16, and meta cannot: .*'meta'. Choose mixed_pre"):
        capability.require("BF16()", torch.bfloat16, torch.device("meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: what one of them says of itself")
def test_a_cuda_device_is_asked_for_its_capability() -> None:
    newest = torch.cuda.get_device_capability()
    needs = capability.CUDA[torch.bfloat16]

    if newest >= needs.capability:
        capability.require("BF16()", torch.bfloat16, torch.device("cuda", 0))
    else:
        with pytest.raises(ValueError, match="bfloat16 needs"):
            capability.require("BF16()", torch.bfloat16, torch.device("cuda", 0))

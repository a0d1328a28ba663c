"""TF32 is torch's setting, for as long as somebody trains with it; full precision says where it would be faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_precision import TF32


@pytest.fixture(autouse=True)
def torch_is_told_nothing() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")
    TF32._in_use.clear()


def hints(accelerator: Accelerator) -> list[str]:
    return [detail.text for detail in accelerator.explain().details if detail.about == "hint"]


def test_products_are_in_tf32_until_the_last_training_ends() -> None:
    first, second = Accelerator(mixed_precision="tf32", cpu=True), Accelerator(mixed_precision=TF32(), cpu=True)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    first.end_training()
    assert torch.get_float32_matmul_precision() == "high"
    second.end_training()
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_torch_was_told_before_comes_back() -> None:
    torch.set_float32_matmul_precision("medium")
    Accelerator(mixed_precision="tf32", cpu=True).end_training()
    assert torch.get_float32_matmul_precision() == "medium"


def test_settings_of_torchs_newer_kind_do_not_stand_in_the_way() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    assert hints(Accelerator(cpu=True)) == []
    Accelerator(mixed_precision="tf32", cpu=True)
    assert torch.get_float32_matmul_precision() == "high"


def test_all_else_stays_in_full_precision() -> None:
    accelerator = Accelerator(mixed_precision="tf32", cpu=True)
    model = accelerator.prepare(nn.Linear(3, 2))
    output = model(torch.ones(1, 3))
    accelerator.backward(output.sum())
    assert output.dtype is model.weight.dtype is model.weight.grad.dtype is torch.float32


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose device multiplies in TF32; its module in torch stands in for it."""
    monkeypatch.setattr(torch.cpu, "is_tf32_supported", lambda: True, raising=False)


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(("options", "hinted"), [({}, True), ({"mixed_precision": "bf16"}, False)])
def test_full_precision_says_that_tf32_would_be_faster(options: dict[str, Any], hinted: bool) -> None:
    accelerator = Accelerator(cpu=True, **options)
    assert [("mixed_precision='tf32'" in hint) for hint in hints(accelerator)] == [True] * hinted
    torch.set_float32_matmul_precision("high")
    assert hints(accelerator) == []


def test_a_device_without_has_nothing_to_hint_at() -> None:
    assert hints(Accelerator(cpu=True)) == []


def products() -> str:
    accelerator = Accelerator(mixed_precision="tf32", cpu=True)
    return next(detail.text for detail in accelerator.explain().details if detail.about == "policy")


def test_explain_says_what_products_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products() == "float32, matrix products in float32: the device has no TF32"
    monkeypatch.setattr(torch.cpu, "is_tf32_supported", lambda: True, raising=False)
    assert products() == "float32, matrix products in TF32"

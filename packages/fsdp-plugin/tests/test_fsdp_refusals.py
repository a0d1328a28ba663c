"""What FSDP refuses at prepare: dtypes that cannot travel, and models that another strategy has cut in another way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, Precision, PrecisionPolicy
from accel_fsdp import FSDP
from accel_precision import BF16
from accel_testing import run_ranks


class Narrow(Precision):
    def __init__(self, **dtypes):
        self.policy = PrecisionPolicy(**dtypes)


def said(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "nothing"


def prepared(model, strategy, precision="no"):
    return Accelerator(strategy=strategy, mixed_precision=precision, cpu=True).prepare(model)


def attempts():
    model = prepared(nn.Linear(4, 4), FSDP())
    narrow = prepared(nn.Linear(4, 4), FSDP(), BF16(reduce_dtype=torch.bfloat16))
    return {
        "reduce": said(lambda: prepared(nn.Linear(4, 4), FSDP(), Narrow(reduce=torch.float8_e4m3fn))),
        "the same": said(lambda: prepared(model, FSDP())),
        "options": said(lambda: prepared(model, FSDP(reshard_after_forward=False))),
        "offload": said(lambda: prepared(model, FSDP(cpu_offload=True))),
        "dtype": said(lambda: prepared(model, FSDP(), "bf16-true")),
        "gathered": said(lambda: prepared(model, FSDP(), "bf16")),
        "reduced": said(lambda: prepared(model, FSDP(), Narrow(reduce=torch.bfloat16))),
        "the same dtypes": said(lambda: prepared(narrow, FSDP(), BF16(reduce_dtype=torch.bfloat16))),
        "gathered in full": said(lambda: prepared(narrow, FSDP(), "no")),
        "reduced in full": said(lambda: prepared(narrow, FSDP(), BF16(reduce_dtype=torch.float32))),
    }


@pytest.fixture(scope="module")
def found():
    return run_ranks(attempts, 1, timeout=60)[0]


def test_gradients_travel_in_dtypes_that_can_be_summed(found):
    assert "gradients that travel as torch.float8_e4m3fn, and FSDP sums them on the way" in found["reduce"]
    assert "Choose one of these as PrecisionPolicy(reduce=...)" in found["reduce"]


@pytest.mark.parametrize("case", ["the same", "the same dtypes"])
def test_a_model_that_was_cut_in_the_same_way_is_taken(found, case):
    assert found[case] == "nothing"


@pytest.mark.parametrize(
    "case", ["options", "offload", "dtype", "gathered", "reduced", "gathered in full", "reduced in full"]
)
def test_a_model_that_was_cut_in_another_way_is_refused(found, case):
    assert "given a Linear that another FSDP strategy has sharded, with other options or dtypes" in found[case]
    assert "build the model anew" in found[case]


def test_parameters_are_gathered_in_dtypes_of_their_kind():
    with pytest.raises(
        ValueError, match=r"FSDP\(gather_dtype=torch.float8_e5m2\): expected one of torch.float32, torch.bfloat16"
    ):
        FSDP(gather_dtype=torch.float8_e5m2)

"""The words of the older public names: texts that know their spelling, and a value for every strategy."""

from __future__ import annotations

import copy
import pickle
from enum import Enum

import pytest
import torch

from accel_core.base.vocabulary import (
    SEVERAL_PROCESSES,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
)

KINDS = [DistributedType, DynamoBackend, LoggerType, PrecisionType, RNGType]


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_is_its_text_however_it_is_used(kind: type[Enum]) -> None:
    for member in kind:
        assert isinstance(member, str)
        assert member == member.value == str(member) == f"{member}" == f"{member:s}"
        assert hash(member) == hash(member.value)
        assert kind(member.value) is member is pickle.loads(pickle.dumps(member))


def test_precisions_and_loggers_have_the_usual_values() -> None:
    assert [member.value for member in PrecisionType] == ["no", "fp8", "fp16", "bf16"]
    assert {"all", "comet_ml", "tensorboard", "wandb"} <= {member.value for member in LoggerType}


def test_compiler_backends_are_spelled_as_torch_does_and_capitals_are_taken() -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    assert {DynamoBackend.INDUCTOR, DynamoBackend.CUDAGRAPHS, DynamoBackend.AOT_EAGER} <= set(known)
    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    for unknown in ("nothing", 3):
        with pytest.raises(ValueError, match="is not a valid DynamoBackend"):
            DynamoBackend(unknown)


def test_names_and_values_of_distributed_types_are_alike() -> None:
    assert all(member.name == member.value for member in DistributedType)
    assert {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"} <= set(DistributedType)


def test_any_strategy_has_a_distributed_type_that_equals_its_name() -> None:
    hello = DistributedType("hello")
    assert isinstance(hello, DistributedType)
    assert hello == "hello" == hello.name == hello.value == f"{hello}"
    assert hello == DistributedType("hello") == pickle.loads(pickle.dumps(hello)) == copy.deepcopy(hello)
    assert {hello: 1}["hello"] == 1  # type: ignore[index]
    assert hello not in list(DistributedType)


@pytest.mark.parametrize("value", ["", None, 3])
def test_what_is_no_text_is_no_distributed_type(value: object) -> None:
    with pytest.raises(ValueError, match="is not a valid DistributedType"):
        DistributedType(value)


def test_the_older_name_of_xla_works_and_says_the_new_one() -> None:
    with pytest.warns(FutureWarning, match=r"DistributedType\.TPU.*Write DistributedType\.XLA") as warned:
        found = DistributedType.TPU
    assert found is DistributedType.XLA
    assert len(warned) == 1
    assert warned[0].filename == __file__
    with pytest.warns(FutureWarning, match=r"Write DistributedType\.XLA"):
        assert DistributedType("TPU") is DistributedType.XLA
    assert "TPU" not in [member.name for member in DistributedType]


def test_types_of_device_have_members() -> None:
    assert {DistributedType(word) for word in SEVERAL_PROCESSES.values()} <= set(DistributedType)
    assert DistributedType(SEVERAL_PROCESSES["cpu"]) is DistributedType.MULTI_CPU
    assert DistributedType(SEVERAL_PROCESSES["cuda"]) is DistributedType.MULTI_GPU

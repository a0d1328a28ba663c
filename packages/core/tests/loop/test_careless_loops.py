"""Loops and arguments that run, and do not do what they look like: each is one warning, or an error, with what to write."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from together import Together
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accel_core import DDP, Accelerator

ON_TWO = Together(2)
DATA = TensorDataset(torch.arange(8.0).view(8, 1))


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught]


def prepared(**options: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 1)).sum())
        optimizer.step()


def warned(loader: Any) -> list[str]:
    accelerator, model, optimizer = prepared()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(batch[0]).sum())
            optimizer.step()
    accelerator.free_memory()
    assert all(each.filename == __file__ for each in caught)
    return said(caught)


@ON_TWO
def read_by_two() -> dict[str, list[str]]:
    return {
        "all": warned(DataLoader(DATA, batch_size=2)),
        "shuffled": warned(DataLoader(DATA, batch_size=2, shuffle=True)),
        "shared out": warned(DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA))),
        "no loader": warned([(torch.ones(2, 1),)]),
    }


def test_a_loader_that_was_not_prepared_is_told_in_a_larger_world_and_one_that_is_shared_out_is_not() -> None:
    for facts in ON_TWO.run(read_by_two):
        for name in ("all", "shuffled"):
            (text,) = facts[name]
            assert "2 data-parallel ranks train on a loader over a TensorDataset that was not prepared" in text
            assert "Loop over what accelerator.prepare(loader) returns" in text
        assert facts["shared out"] == facts["no loader"] == []
    assert warned(DataLoader(DATA, batch_size=2)) == []


def test_steps_outside_of_accumulate_are_told_once_and_accumulation_by_hand_is_not() -> None:
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
    with pytest.warns(
        UserWarning, match=r"after one backward, outside of accumulate\(\): every batch is a step"
    ) as caught:
        train(accelerator, model, optimizer)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 1)).sum())
        accelerator.backward(model(torch.ones(2, 1)).sum())
        optimizer.step()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 1)).sum())
        optimizer.step()


def test_a_loader_without_a_batch_is_told() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.warns(
        UserWarning, match=r"has no batch on this rank, so loops over it do nothing.*take a smaller batch"
    ):
        accelerator.prepare(DataLoader(DATA, batch_size=16, drop_last=True))


@pytest.mark.parametrize("given", ["bf16", DDP()])
def test_what_is_given_in_the_place_of_device_placement_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"device_placement=.*: expected True or False\."):
        Accelerator(given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ACCELERATE_MIXED_PRECISON", "ACCELERATE_MIXED_PRECISION"),
        ("ACCELERATE_LOG_WTIH", "ACCELERATE_LOG_WITH"),
        ("ACCELERATE_mixed_precision", "ACCELERATE_MIXED_PRECISION"),
    ],
)
def test_a_misspelt_variable_is_told_with_the_name_of_the_option(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "bf16")
    with pytest.warns(UserWarning, match=rf"{name} is set, and nothing reads it\. Type {meant} if that was") as caught:
        Accelerator(cpu=True)
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize(
    "name", ["ACCELERATE_USE_XPU", "ACCELERATE_CONFIG_FILE", "ACCELERATE_DYNAMO_MODE", "THEIR_LOG"]
)
def test_variables_of_others_are_nobody_s_business(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    Accelerator(cpu=True)

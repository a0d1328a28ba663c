"""States of a process are one, may be assigned, and are forgotten when that is asked for."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState, is_initialized


def test_all_objects_share_what_is_assigned():
    PartialState().fancy = 3
    assert PartialState().fancy == 3
    assert copy.deepcopy(PartialState()).fancy == 3
    assert isinstance(pickle.loads(pickle.dumps(PartialState())), PartialState)
    PartialState().process_index = 5
    assert not PartialState().is_main_process


def test_what_is_gone_after_a_reset_says_so():
    state = PartialState()
    PartialState._reset_state()
    with pytest.raises(AttributeError, match=r"`PartialState` object has no attribute `num_processes`.*_reset_state"):
        state.num_processes
    with pytest.raises(AttributeError, match=r"'PartialState' object has no attribute 'other'"):
        state.other
    assert not state.initialized
    assert PartialState().num_processes == 1


def test_there_is_no_set_up_before_an_accelerator():
    with pytest.raises(ValueError, match="before there is an Accelerator"):
        AcceleratorState()
    assert not is_initialized()
    Accelerator(mixed_precision="bf16")
    assert is_initialized()
    assert AcceleratorState().mixed_precision == "bf16"


def test_a_second_accelerator_has_the_set_up_of_the_first():
    Accelerator(mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16"
    with pytest.raises(ValueError, match="'no' was asked for, but the state of this process is made already"):
        Accelerator(mixed_precision="no")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(mixed_precision="no").mixed_precision == "no"


def test_gradients_are_held_back_while_that_is_assigned():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for closes, expected in ((False, 1.0), (True, -1.0)):
        GradientState()._set_sync_gradients(closes)
        assert accelerator.sync_gradients is closes
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.item() == expected


def test_the_state_of_gradients_is_that_of_the_newest_accelerator():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    assert GradientState().num_steps == 3
    accelerator.gradient_accumulation_steps = 5
    assert GradientState().num_steps == 5
    del accelerator
    GradientState._reset_state()
    assert GradientState().sync_gradients
    assert GradientState().num_steps == 1


def test_states_print_what_scripts_look_for():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    lines = repr(accelerator.state).splitlines()
    assert lines[:5] == [
        "Distributed environment: DistributedType.NO", "Num processes: 1", "Process index: 0", "Local process index: 0", "Device: cpu"
    ]  # fmt: skip
    assert lines[-1] == "Mixed precision type: bf16"
    assert repr(PartialState()).splitlines() == lines[:5]

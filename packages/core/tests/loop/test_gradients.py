"""Strategies that keep gradients, run windows or step in a way of their own train as one process does."""

from __future__ import annotations

import pytest
import torch
from gradient_strategies import Engine, InABuffer, InParts, RunsWindows
from torch import nn

from accel_core import Accelerator, NonFiniteError, hookimpl
from accel_core.base.errors import CheckpointError
from accel_core.contract.tensor_layouts import Elementwise
from accel_core.loop.gradients import Gradients
from accel_testing import CheckpointSuite, StrategySuite


class TestRunsWindows(StrategySuite):
    strategy = RunsWindows
    worlds = (2,)


class TestInABuffer(StrategySuite):
    strategy = InABuffer
    worlds = (2,)


class TestInParts(StrategySuite):
    strategy = InParts


class TestCheckpointsInABuffer(CheckpointSuite):
    strategy = InABuffer
    worlds = (2,)


class TestEngine(StrategySuite):
    strategy = Engine
    worlds = (2,)


class TestCheckpointsOfAnEngine(CheckpointSuite):
    strategy = Engine


def summed(output, batch):
    return output.pow(2).sum(), len(batch)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_follows_a_window_that_the_strategy_runs_by_itself(steps):
    accelerator = Accelerator(strategy=RunsWindows(), cpu=True, gradient_accumulation_steps=steps)
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.forward_backward(model, [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])], summed)
    optimizer.step()
    torch.testing.assert_close(accelerator.unwrap_model(model).weight.detach(), torch.tensor([[-0.2, 0.4]]))


X = torch.tensor([[3.0, 4.0]])


def prepared(strategy, **options):
    accelerator = Accelerator(strategy=strategy, cpu=True, **options)
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    [buffer] = strategy.buffers.values()
    return accelerator, model, optimizer, buffer


def test_clipping_by_value_clamps_what_a_strategy_keeps():
    accelerator, model, _, buffer = prepared(InParts())
    accelerator.backward(model(X).sum())
    accelerator.clip_grad_value_(model.parameters(), 3.5)
    assert buffer.kept.tolist() == [3.0, 3.5]


def test_clipping_by_norm_scales_what_a_strategy_keeps_and_leaves_an_open_window_alone():
    accelerator, model, _, buffer = prepared(InABuffer(), gradient_accumulation_steps=2)
    for norm, kept in ((2.5, [0.0, 0.0]), (5.0, [0.6, 0.8])):
        with accelerator.accumulate(model):
            accelerator.backward(model(X).sum())
            assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == norm
            assert buffer.kept.tolist() == pytest.approx(kept)


class WithoutANorm(InABuffer):
    """Does not say that a rank has all of its gradients, and has no clipping of its own."""

    replicates_parameters = False


def test_clipping_by_norm_is_refused_where_nobody_knows_the_norm():
    accelerator, model, _, _ = prepared(WithoutANorm())
    accelerator.backward(model(X).sum())
    with pytest.raises(
        RuntimeError, match=r"clip_grad_norm_\(\) .* WithoutANorm keeps: .* implement the hook clip_gradients"
    ):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_clearing_is_for_the_parameters_of_one_optimizer():
    accelerator, model, optimizer, buffer = prepared(InABuffer())
    accelerator.backward(model(X).sum())
    accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)).zero_grad()
    assert buffer.kept.tolist() == [3.0, 4.0]
    optimizer.zero_grad()
    assert buffer.kept.tolist() == [0.0, 0.0]


def test_what_is_pending_is_rescaled_and_dropped_wherever_it_is():
    accelerator, model, _, buffer = prepared(InABuffer())
    accelerator.backward(model(X).sum())
    with accelerator.no_sync(model):
        accelerator.backward(model(X).sum())
    pending = accelerator._prepared
    pending.rescale(2.0)
    assert [each.flatten().tolist() for each in pending.gradients.tensors(model.parameters())] == [[6.0, 8.0]] * 2
    with pytest.raises(RuntimeError, match="wait to travel"):
        accelerator.forward_backward(model, [X], summed)
    pending.gradients.drop(pending.learned())
    assert buffer.kept.tolist() == [0.0, 0.0]
    assert not any(each.any() for each in pending.gradients.tensors(model.parameters()))


def test_a_window_that_fails_leaves_what_was_kept_before():
    accelerator, model, _, buffer = prepared(InABuffer())
    accelerator.backward(model(X).sum())

    def failing(output, batch):
        if batch is X:
            raise ZeroDivisionError
        return output.sum(), 1

    with pytest.raises(ZeroDivisionError):
        accelerator.forward_backward(model, [X.clone(), X], failing)
    assert buffer.kept.tolist() == [3.0, 4.0]


class Forgetful(InABuffer):
    """Leaves out gradients that are zero, also those that were made zero in place."""

    @hookimpl
    def gradient_state(self, model, prepared):
        buffer = self.buffers[prepared]
        parts = {name: buffer.part(name, buffer.kept).view(each.shape) for name, each in buffer.named.items()}
        return {name: [Elementwise.whole(part)] for name, part in parts.items() if part.any()}


def test_gradients_that_a_strategy_forgets_are_not_lost_without_a_word():
    accelerator, model, _, _ = prepared(Forgetful())
    accelerator.backward(model(X).sum())
    with pytest.raises(
        RuntimeError, match=r"'weight' had a gradient, and afterwards gradient_state\(\) .* no gradient of \[0:1"
    ):
        accelerator.forward_backward(model, [torch.zeros(1, 2)], summed)


def test_a_gradient_that_is_not_finite_is_found_where_a_strategy_keeps_it():
    accelerator, model, _, _ = prepared(InABuffer(), detect_nonfinite=True)
    accelerator.backward(model(X).sum())
    with pytest.raises(NonFiniteError, match="the gradient is not finite"):
        accelerator.backward((model(torch.zeros(1, 2)) - model(torch.zeros(1, 2))).sqrt().sum())


def test_saving_between_backward_and_step_is_refused_wherever_the_gradient_is(tmp_path):
    accelerator, model, optimizer, _ = prepared(InABuffer())
    accelerator.save_state(tmp_path / "before")
    accelerator.backward(model(X).sum())
    with pytest.raises(CheckpointError, match="between accelerator.backward"):
        accelerator.save_state(tmp_path / "between")
    optimizer.zero_grad()
    accelerator.save_state(tmp_path / "after")


def in_an_open_window(strategy):
    accelerator, model, _, buffer = prepared(strategy, gradient_accumulation_steps=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(X).sum())
    return accelerator, buffer


def test_an_open_window_goes_on_between_strategies_that_keep_gradients_apart(tmp_path):
    accelerator, _ = in_an_open_window(InABuffer())
    accelerator.save_state(tmp_path)
    plain = Accelerator(strategy="single", cpu=True, gradient_accumulation_steps=2)
    model, _ = plain.prepare(model := nn.Linear(2, 1, bias=False), torch.optim.SGD(model.parameters(), lr=0.5))
    plain.load_state(tmp_path)
    assert model.weight.grad.tolist() == [[1.5, 2.0]]
    other, buffer = in_an_open_window(InABuffer())
    other.load_state(tmp_path)
    assert buffer.kept.tolist() == [1.5, 2.0]
    forgetful, *_ = prepared(Forgetful(), gradient_accumulation_steps=2)
    with pytest.raises(CheckpointError, match="Forgetful cannot take pending gradients over"):
        forgetful.load_state(tmp_path)


def stepped(strategy, dtype=torch.bfloat16):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = nn.Linear(2, 1, bias=False).to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(X.to(dtype)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, optimizer


def test_masters_are_saved_in_their_own_dtype_and_what_changes_unseen_is_copied_at_once():
    accelerator, _ = stepped(Engine())
    run = accelerator._run
    entries = [run.model_state(0)["weight"], run.optimizer_states()[0].entries["0.weight/exp_avg"]]
    assert [(entry.dtype, entry.versioned) for entry in entries] == [(torch.float32, False)] * 2
    assert entries[0].pieces[0].data.dtype is torch.float32


def test_state_is_loaded_into_the_memory_of_the_engine(tmp_path):
    saving, optimizer = stepped(Engine())
    [expected] = optimizer.state.values()
    saving.save_state(tmp_path)
    strategy = Engine()
    accelerator, optimizer = stepped(strategy)
    accelerator.load_state(tmp_path)
    [state] = strategy.inner[optimizer].state.values()
    for key in ("exp_avg", "exp_avg_sq"):
        [memory] = [flat for (_, name), flat in strategy.memory.items() if name == key]
        assert state[key].data_ptr() == memory.data_ptr()
        assert memory.tolist() == expected[key].tolist()
    assert state["step"].item() == 1.0


def test_a_window_of_wide_gradients_goes_on_in_narrow_ones(tmp_path):
    found = []
    for strategy in (InABuffer(), "single"):
        accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(2, 1, bias=False).bfloat16()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        if not found:
            with accelerator.accumulate(model):
                accelerator.backward(model(X.bfloat16()).sum())
            accelerator.save_state(tmp_path)
        accelerator.load_state(tmp_path)
        found += [
            (each.dtype, each.flatten().tolist())
            for each in accelerator._prepared.gradients.tensors(model.parameters())
        ]
    assert found == [(torch.float32, [1.5, 2.0]), (torch.bfloat16, [1.5, 2.0])]


class Releasing(InABuffer):
    def __init__(self):
        super().__init__()
        self.released = []

    @hookimpl
    def release_model(self, model, prepared):
        self.released.append((model, prepared))


@pytest.mark.parametrize("ends", [["end_training", "free_memory"], ["free_memory", "end_training"]])
def test_a_strategy_is_told_once_of_each_model_that_it_can_let_go_of(ends):
    strategy = Releasing()
    accelerator, model, *_ = prepared(strategy)
    evaluated = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
    expected = [(accelerator.unwrap_model(model), model), (evaluated, evaluated)]
    for end in ends:
        getattr(accelerator, end)()
        assert strategy.released == expected


@pytest.mark.parametrize("factor", [0.37, torch.tensor(0.37, dtype=torch.float64)], ids=["number", "tensor"])
def test_gradients_of_every_kind_are_multiplied_by_the_exact_factor(factor):
    """In bfloat16 the factor itself would be 0.3711."""
    values = [
        torch.full((300,), 1000.0, dtype=torch.bfloat16),
        torch.tensor(1000.0, dtype=torch.bfloat16),
        torch.full((2, 2), 1000.0, dtype=torch.float16),
        torch.tensor([1000.0, 2.0]),
        torch.tensor([1000.0], dtype=torch.float64),
        torch.tensor([1000.0 - 1000.0j]),
        torch.sparse_coo_tensor([[0, 2]], [1000.0, 2.0], (3,), check_invariants=True),
    ]
    parameters = [torch.nn.Parameter(torch.zeros(value.shape, dtype=value.dtype)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()
    Gradients().scale(parameters, factor)
    for parameter, value in zip(parameters, values, strict=True):
        wide = torch.complex128 if value.is_complex() else torch.float64
        expected = (value.to_dense().to(wide) * 0.37).to(value.dtype)
        torch.testing.assert_close(parameter.grad.to_dense(), expected, rtol=1e-6, atol=0)

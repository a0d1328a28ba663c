"""Whole windows of forward_backward where every forward communicates: ranks with fewer micro-batches fill up, none hangs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_core import Accelerator, GradientAccumulationPlugin
from accel_fsdp import FSDP
from accel_testing import run_ranks

ROWS = {0: [3, 1, 2], 1: [2]}  # rows of the micro-batches of each rank


def batches(rank):
    return [torch.linspace(-1, 1, rows * 4).view(rows, 4) + rank for rows in ROWS[rank]]


def summed(output, batch):
    return output.pow(2).sum(), len(batch)


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def whole(gradient):
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).tolist()


def said(function, *args):
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Lazy(Sequence):
    """Micro-batches that are made when they are asked for."""

    def __init__(self, made):
        self.made, self.asked = made, []

    def __len__(self):
        return len(self.made)

    def __getitem__(self, number):
        self.asked.append(number)
        return self.made[number]


def passing(batches, alive):
    """Yields them, and keeps none."""
    while batches:
        batch = batches.pop(0)
        alive.append(weakref.ref(batch))
        yield batch
        del batch


def read_when_due(accelerator, model):
    """How many of the micro-batches a forward has asked for of a sequence, and how many of an iterator are alive then."""
    lazy, alive = Lazy(batches(0)), []
    asked, living = [], []

    def counting(output, batch):
        asked.append(len(lazy.asked))
        living.append(sum(reference() is not None for reference in alive))
        return summed(output, batch)

    accelerator.forward_backward(model, lazy, counting)
    asked_of_sequence, living[:] = list(asked), []
    accelerator.forward_backward(model, passing(batches(0), alive), counting)
    model.zero_grad()
    return asked_of_sequence, living


def infinite(output, batch):
    """The sum is infinite; its gradient is not."""
    return output.pow(2).sum() + math.inf, len(batch)


def pending_norm(strategy, sync_each_batch):
    """In an open window: the norm, that of the gradients of a whole model, and whether the gradients stayed what they were."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_plugin=plugin)
    shard = accelerator._layout.shard
    reference, model = built(), accelerator.prepare(built())
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(called, index):
        return called(torch.linspace(-1, 1, 8).view(2, 4) + index).pow(2).mean()

    read = range(shard.count) if sync_each_batch else [shard.index]
    (sum(loss_of(reference, index) for index in read) / len(read) / 2).backward()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in reference.parameters()])
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, shard.index))
        pending = accelerator._prepared.gradients.tensors(model.parameters())
        before = [local(each).clone() for each in pending]
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        kept = all(torch.equal(one, local(other)) for one, other in zip(before, pending, strict=True))
    named = sum(map(bool, accelerator._prepared.gradients.kept(model.parameters()).values()))
    return type(norm) is torch.Tensor, norm.item(), expected.item(), kept, named


def local(gradient):
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def pending_norms():
    tensor_parallel = {"tensor_parallel": 2, "parallelize_plan": {"0": "colwise", "2": "rowwise"}}
    return {
        f"{options}, sync_each_batch={each}": pending_norm(FSDP(**options), each)
        for options in ({}, {"ignored_modules": ["0"]}, tensor_parallel)
        for each in (False, True)
    }


def windows():
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    model = accelerator.prepare(built())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    mine = batches(accelerator.process_index)

    def window(given):
        return accelerator.forward_backward(model, given, summed)

    loss = window(iter(mine)).item()
    gradients = [whole(parameter.grad) for parameter in model.parameters()]
    optimizer.zero_grad()
    empty = said(window, mine if accelerator.is_main_process else [])
    with accelerator.no_sync(model):
        accelerator.backward(model(mine[0]).sum())
    held = said(window, mine)
    optimizer.zero_grad()
    again = window(mine).item()
    after = [whole(parameter.grad) for parameter in model.parameters()]
    optimizer.zero_grad()
    not_finite = accelerator.forward_backward(model, mine, infinite).item()
    same = [whole(parameter.grad) for parameter in model.parameters()]
    optimizer.zero_grad()
    read = read_when_due(accelerator, model)
    return loss, gradients, empty, held, again, after, (not_finite, same), read, pending_norms()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(windows, 2, timeout=60)


def test_ranks_with_fewer_micro_batches_weigh_what_they_have(ranks):
    model = built()
    every = torch.cat([batch for rank in ROWS for batch in batches(rank)])
    loss = model(every).pow(2).sum() / len(every)
    loss.backward()
    for found, gradients, *_ in ranks:
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(gradient), parameter.grad)


def test_a_rank_without_micro_batches_is_named_on_every_rank(ranks):
    for _, _, empty, *_ in ranks:
        assert "ValueError: forward_backward() was given no micro-batch" in empty
        assert empty.endswith("Ranks without: 1.")


def test_gradients_that_wait_to_travel_are_not_weighed_with_a_window(ranks):
    for loss, gradients, _, held, again, after, *_ in ranks:
        assert (
            "RuntimeError: forward_backward() weighs a whole window, but gradients of backwards inside no_sync()"
            in held
        )
        assert "drop them by optimizer.zero_grad()" in held
        assert again == pytest.approx(loss, rel=1e-6)
        for one, other in zip(gradients, after, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def test_a_micro_batch_that_fills_up_adds_nothing_to_a_loss_that_is_not_finite(ranks):
    for _, gradients, *_, (loss, same), _, _ in ranks:
        assert loss == math.inf
        for one, other in zip(gradients, same, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def test_micro_batches_are_read_when_they_are_due_and_let_go_of(ranks):
    """One is looked ahead. Of an iterator all are read first, because ranks tell each other how many they have."""
    for *_, (asked, living), _ in ranks:
        assert asked == [2, 3, 3]
        assert living == [3, 2, 1]


def test_the_norm_of_an_open_window_counts_what_was_sent_and_what_is_held_in_any_layout(ranks):
    for *_, norms in ranks:
        for name, (plain, norm, expected, kept, pending) in norms.items():
            assert plain, name
            assert norm == pytest.approx(expected, rel=1e-5), name
            assert kept, name
            assert pending == 4, name

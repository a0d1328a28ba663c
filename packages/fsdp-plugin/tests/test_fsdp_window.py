"""Whole windows of forward_backward where every forward communicates: ranks with fewer micro-batches fill up, none hangs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_core import Accelerator
from accel_core.testing import run_ranks
from accel_fsdp import FSDP

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
    return loss, gradients, empty, held, again, [whole(parameter.grad) for parameter in model.parameters()]


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
    for loss, gradients, _, held, again, after in ranks:
        assert (
            "RuntimeError: forward_backward() weighs a whole window, but gradients of backwards inside no_sync()"
            in held
        )
        assert "drop them by optimizer.zero_grad()" in held
        assert again == pytest.approx(loss, rel=1e-6)
        for one, other in zip(gradients, after, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))

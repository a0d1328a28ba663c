"""A run that was saved inside a window of accumulation goes on inside it, on any number of ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sharded_strategies import Rows
from torch.nn import functional as F

from accel_core import DDP, Accelerator, CheckpointError, Single, World
from accel_testing import models, run_ranks
from accel_testing.training import fed

WORLDS = (1, 2, 4)
BATCHES, STEPS, SAVED = 9, 3, 4  # SAVED: the number of the last batch before the checkpoint, the second one of a window
ROWS = 8  # of a global batch
DISTRIBUTED = {
    "ddp": DDP,
    "in views": partial(DDP, gradient_as_bucket_view=True),
    "static": partial(DDP, static_graph=True),
}


def strategies():
    return {"single": Single} if World.current(cpu=True).size == 1 else DISTRIBUTED


class Run:
    def __init__(self, strategy, seed=0):
        self.accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=STEPS)
        self.user_model = models.built(models.Net, seed).double()
        optimizer = torch.optim.SGD(self.user_model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(self.user_model, optimizer)

    def train(self, first, last):
        """Yields after each batch."""
        world = World.current(cpu=True)
        for index in fed(self.accelerator, last - first):
            batch = models.samples((first + index) * ROWS, ROWS)
            x, y = (tensor.double().chunk(world.size)[world.rank] for tensor in batch)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(F.mse_loss(self.model(x), y))
                self.optimizer.step()
                self.optimizer.zero_grad()
            yield first + index

    def state(self):
        return {name: value.clone() for name, value in self.user_model.state_dict().items()}


def saved_by_ranks(folder):
    """Where runs ended that were saved on their way: at once, or written behind."""
    found = {}
    modes = [False, "eager", "lazy"]
    for (name, strategy), mode in zip(strategies().items(), modes, strict=False):
        run = Run(strategy())
        for index in run.train(0, BATCHES):
            if index == SAVED:
                place = f"{folder}/{name}-{run.accelerator.num_processes}"
                run.accelerator.save_state(place, asynchronous=mode)
        run.accelerator.wait_for_checkpoint()
        found[place] = run.state()
    return found


def loaded_by_ranks(places):
    """Where runs ended that began elsewhere, and then loaded these."""
    found = {}
    for name, strategy in strategies().items():
        for place in places:
            run = Run(strategy(), seed=1)
            list(run.train(0, 1))  # pending, so that there are gradients that have to go
            run.accelerator.load_state(place)
            list(run.train(SAVED + 1, BATCHES))
            found[name, place] = run.state()
    return found


def refusal_of_rows(place):
    run = Run(Rows())
    with pytest.raises(CheckpointError) as refusal:
        run.accelerator.load_state(place)
    return str(refusal.value)


def test_an_open_window_goes_on_on_any_number_of_ranks(tmp_path):
    saved = {place: state for world in WORLDS for place, state in run_ranks(saved_by_ranks, world, tmp_path)[0].items()}
    expected = saved[f"{tmp_path}/single-1"]
    ended = [found for world in WORLDS for found in run_ranks(loaded_by_ranks, world, list(saved))]
    for where, state in [*saved.items(), *(item for found in ended for item in found.items())]:
        for name, tensor in expected.items():
            assert torch.allclose(state[name], tensor, rtol=1e-9), (where, name)
    [refusal] = run_ranks(refusal_of_rows, 1, f"{tmp_path}/ddp-2")
    assert "it was saved inside a window, and Rows cannot take pending gradients over" in refusal


def told_by_caller(steps):
    """A model, its optimizer, and a micro-batch of which the caller says whether it closes the window."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = models.built(models.Net, 0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)

    def micro_batch(index, closes):
        x, y = (tensor.double() for tensor in models.samples(index * ROWS, ROWS))
        with accelerator.accumulate(prepared, closes=closes):
            accelerator.backward(F.mse_loss(prepared(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return accelerator, model, micro_batch


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_window_that_the_caller_closes_goes_on_inside_it(steps, tmp_path):
    """Its place says nothing: three micro-batches may have run where windows are said to have one or two."""
    accelerator, model, micro_batch = told_by_caller(steps)
    for index in range(3):
        micro_batch(index, closes=False)
    folder = accelerator.save_state(str(tmp_path / "saved"))
    micro_batch(3, closes=True)
    accelerator.end_training()

    again, resumed, micro_batch = told_by_caller(steps)
    again.load_state(folder)
    micro_batch(3, closes=True)
    again.end_training()
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def beside_a_kept_iterator(folder, load):
    """Where windows closed, and the weight: two loaders, the second one's iterator lasts over all epochs of the first."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = models.built(partial(torch.nn.Linear, 1, 1), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    real, noise = (
        torch.utils.data.DataLoader(torch.randn(count * accelerator.num_processes, 1), batch_size=1)
        for count in (6, 40)
    )
    model, optimizer, real, noise = accelerator.prepare(model, optimizer, real, noise)
    if load:
        accelerator.load_state(folder)
    drawn, closing = None, []
    for epoch in range(1 if load else 0, 3):
        closing.append("")
        for index, batch in enumerate(real, 3 if load and epoch == 1 else 0):
            drawn = drawn or iter(noise)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch + next(drawn)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                closing[-1] += ".S"[accelerator.sync_gradients]
            if (epoch, index) == (1, 2) and not load:
                accelerator.save_state(folder)
    return closing, [each.item() for each in accelerator.unwrap_model(model).parameters()]


def saved_and_resumed_beside_a_kept_iterator(folder):
    found = []
    for load in (False, True):
        torch.manual_seed(1)  # for the samples
        found.append(beside_a_kept_iterator(folder, load))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_beside_an_iterator_that_is_kept_over_several_ends_in_a_resumed_run_too(ranks, tmp_path):
    for (closing, weights), (closing_resumed, weights_resumed) in run_ranks(
        saved_and_resumed_beside_a_kept_iterator, ranks, tmp_path / "checkpoint"
    ):
        assert closing == ["...S.S"] * 3
        assert closing_resumed == ["S.S", "...S.S"]
        assert weights_resumed == weights

"""Stages of torch.distributed.pipelining train, evaluate, clip, save and go on as one process does."""

from __future__ import annotations

import itertools
from functools import cache, partial

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_pipeline import Pipeline
from accel_testing import run_ranks

WINDOWS, HALF, ROWS, COUNT = 6, 3, 4, 4
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def model():
    widths = [3, 8, 8, 8, 8, 5]
    layers = [nn.Linear(before, after) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def batches(window, count=COUNT):
    """Micro-batches of a window; as many of the labels as their number says do not count."""
    generator = torch.Generator().manual_seed(window)
    found = []
    for number in range(count):
        labels = torch.randint(5, (ROWS,), generator=generator)
        labels[: number % ROWS] = -100
        found.append((torch.randn(ROWS, 3, generator=generator), labels))
    return found


def loss_of(output, batch):
    labels = batch[1]
    return nn.functional.cross_entropy(output, labels, reduction="sum"), (labels >= 0).sum()


class Run:
    """One run of the loop, which knows nothing of stages."""

    def __init__(self, strategy, folder=None):
        self.accelerator = Accelerator(strategy=strategy, cpu=True)
        torch.manual_seed(0)
        self.model = self.accelerator.build_model(model)
        decayed, others = [], []
        for name, parameter in self.model.named_parameters():
            (decayed if name.endswith("weight") else others).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.scheduler
        )
        if folder is not None:
            self.accelerator.load_state(folder)

    def train(self, windows):
        """Losses and norms of the windows; the gradients of the first."""
        figures, first = [], {}
        for window in windows:
            loss = self.accelerator.forward_backward(self.model, batches(window), loss_of)
            if not first:
                named = self.accelerator.unwrap_model(self.model).named_parameters()
                first = {name: each.grad.clone() for name, each in named}
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            figures.append([loss.item(), norm.item()])
        return figures, first

    def evaluate(self):
        with torch.no_grad():
            return self.accelerator.forward_backward(self.model, batches(100, 2), loss_of).item()


def whole(strategy=None):
    run = Run(strategy)
    figures, gradients = run.train(range(WINDOWS))
    return figures, gradients, run.evaluate(), run.accelerator.get_state_dict(run.model)


def began(folder, strategy=None):
    run = Run(strategy)
    figures, _ = run.train(range(HALF))
    run.accelerator.save_state(folder)
    return figures


def went_on(folder, strategy=None):
    run = Run(strategy, folder)
    figures, _ = run.train(range(HALF, WINDOWS))
    return figures, run.evaluate()


@cache
def expected():
    [found] = run_ranks(whole, 1)
    return found


def gpipe():
    return whole(Pipeline(schedule="gpipe"))


@pytest.mark.parametrize(
    ("world", "job"),
    [(1, partial(whole, "pipeline")), (2, partial(whole, "pipeline")), (4, partial(whole, "pipeline")), (2, gpipe)],
    ids=("1", "2", "4", "gpipe-2"),
)
def test_losses_norms_gradients_evaluation_and_weights_are_those_of_one_process(world, job):
    figures, gradients, evaluated, weights = expected()
    found = run_ranks(job, world)
    joined = {name: each for _, own, _, _ in found for name, each in own.items()}
    assert sum(len(own) for _, own, _, _ in found) == len(gradients), "each is on one rank"
    torch.testing.assert_close(joined, gradients, **TOLERANCE)
    for own, _, own_evaluated, _ in found:
        assert own == [pytest.approx(each, rel=1e-5) for each in figures]
        assert own_evaluated == pytest.approx(evaluated, rel=1e-5)
    torch.testing.assert_close(found[0][3], weights, **TOLERANCE)


PLACES = {"single": (1, None), "2 stages": (2, "pipeline"), "4 stages": (4, "pipeline"), "ddp": (2, "ddp")}


@pytest.mark.parametrize(
    ("first", "second"),
    [("single", "2 stages"), ("2 stages", "single"), ("2 stages", "4 stages"), ("4 stages", "2 stages")],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(first, second, tmp_path):
    figures, _, evaluated, _ = expected()
    folder = str(tmp_path / "checkpoint")
    world, strategy = PLACES[first]
    for own in run_ranks(began, world, folder, strategy):
        assert own == [pytest.approx(each, rel=1e-5) for each in figures[:HALF]]
    world, strategy = PLACES[second]
    for own, own_evaluated in run_ranks(went_on, world, folder, strategy):
        assert own == [pytest.approx(each, rel=1e-5) for each in figures[HALF:]]
        assert own_evaluated == pytest.approx(evaluated, rel=1e-5)


def counted():
    """How often the user's loss function was called for a window, on each rank."""
    run, calls = Run("pipeline"), []

    def loss_fn(output, batch):
        calls.append(len(batch))
        return loss_of(output, batch)

    run.accelerator.forward_backward(run.model, batches(0), loss_fn)
    return len(calls)


def test_the_loss_is_computed_once_for_each_micro_batch_on_the_last_stage():
    assert run_ranks(counted, 2) == [0, COUNT]


def added():
    """The gradients of the same window, once and twice."""
    run = Run("pipeline")
    run.accelerator.forward_backward(run.model, batches(0), loss_of)
    once = [each.grad.clone() for each in run.model.parameters()]
    run.accelerator.forward_backward(run.model, batches(0), loss_of)
    return once, [each.grad for each in run.model.parameters()]


def test_gradients_are_added_to_those_that_are_there():
    for once, twice in run_ranks(added, 2):
        torch.testing.assert_close(twice, [each * 2 for each in once])


def refused(what):
    run = Run("pipeline")
    accelerator = run.accelerator
    x, labels = batches(0)[0]
    attempts = {
        "call": lambda: run.model(x),
        "backward": lambda: accelerator.backward(torch.zeros((), requires_grad=True)),
        "plain": lambda: accelerator.prepare(nn.Linear(2, 2)),
        "empty": lambda: accelerator.forward_backward(run.model, [], loss_of),
        "shapes": lambda: accelerator.forward_backward(run.model, [(x, labels), (x[:2], labels[:2])] * 2, loss_of),
        "shallow": lambda: accelerator.build_model(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
        "other": lambda: accelerator.build_model(lambda: nn.Linear(2, 2)),
    }
    try:
        attempts[what]()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "call",
            "this rank has one stage of a pipeline, which takes activations and no batches. Call accelerator.forward_backward",
        ),
        ("backward", "accelerator.backward(loss) was called, but this rank has one stage"),
        ("plain", "trains what accelerator.build_model(factory) returned"),
        ("empty", "was given no micro-batch"),
        ("shapes", "of several shapes"),
        ("shallow", "has 1 layers with parameters, which is less than one for each of 2 stages"),
        ("other", "the factory made a Linear, and strategy 'pipeline' cuts an nn.Sequential"),
    ],
)
def test_what_stages_cannot_do_is_refused_on_every_rank(what, message):
    for said in run_ranks(refused, 2, what):
        assert message in str(said)


def test_a_precision_and_another_schedule_are_refused():
    accelerator = Accelerator(strategy="pipeline", cpu=True, mixed_precision="bf16-true")
    with pytest.raises(ValueError, match="computes in full precision, and .*bfloat16.* was asked for"):
        accelerator.prepare(accelerator.build_model(model))
    with pytest.raises(ValueError, match=r"schedule='interleaved'.: expected one of 1f1b, gpipe"):
        Pipeline(schedule="interleaved")

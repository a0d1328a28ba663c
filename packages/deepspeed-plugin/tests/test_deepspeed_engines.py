"""Several engines in one process, of the same stage and of unlike ones: each trains as under one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed, DeepSpeedPlugin
from accel_testing import run_ranks

STEPS, ROWS, WIDTH = 4, 8, 6
MAX_NORM = 0.1
STRATEGIES = {"single": lambda: "single", "ddp": lambda: "ddp"} | {
    f"zero{stage}": lambda stage=stage: DeepSpeed(zero_stage=stage) for stage in range(4)
}
PAIRS = [("zero2", "zero3"), ("zero3", "zero2"), ("zero3", "ddp"), ("zero0", "zero3"), ("zero2", None), ("zero3", None)]
"""The strategies of a generator and of its critic; None: they are in one Accelerator."""


class Player:
    """A model with its optimizer, of one Accelerator."""

    def __init__(self, accelerator, out):
        self.accelerator = accelerator
        torch.manual_seed(out)
        model = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, out))
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))

    def step(self, loss, max_norm=MAX_NORM):
        """Gives the loss over all ranks, and the norm of the gradient."""
        self.accelerator.backward(loss)
        norms = [] if max_norm is None else [float(self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm))]
        self.optimizer.step()
        return [self.accelerator.reduce(loss.detach(), "mean").item(), *norms]

    def weights(self):
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def inputs(accelerator, step):
    """This rank's rows of a batch."""
    rows = torch.arange(1.0 * ROWS * WIDTH).view(ROWS, WIDTH).add(step)
    return rows.sin()[accelerator.process_index :: accelerator.num_processes]


def gan(first, second):
    """What both lost in each step, the norms of their gradients, and their weights at the end."""
    accelerator = Accelerator(strategy=STRATEGIES[first](), cpu=True)
    other = accelerator if second is None else Accelerator(strategy=STRATEGIES[second](), cpu=True)
    generator, critic = Player(accelerator, WIDTH), Player(other, 1)
    figures = []
    for step in range(STEPS):
        noise, real = inputs(accelerator, step), inputs(accelerator, 9 * step + 1)
        critic.optimizer.zero_grad()  # also of what the generator's backward has left there
        critics = critic.model(generator.model(noise).detach()) - critic.model(real)
        figures += critic.step(critics.sigmoid().mean())
        generator.optimizer.zero_grad()
        figures += generator.step(critic.model(generator.model(noise)).sigmoid().mean())
    found = figures, generator.weights(), critic.weights()
    for each in {id(each): each for each in (accelerator, other)}.values():
        each.free_memory()
    return found


def gans(pairs):
    return {pair: gan(*pair) for pair in pairs}


def taught(named):
    """A student that learns from a teacher who learns meanwhile; what choosing the teacher's configuration said."""
    said = ""
    if named:
        # Stages and clipping differ. The one that is named first is in use.
        student, teacher = DeepSpeedPlugin(zero_stage=2, gradient_clipping=MAX_NORM / 2), DeepSpeedPlugin(zero_stage=3)
        accelerator = Accelerator(deepspeed_plugins={"student": student, "teacher": teacher}, cpu=True)
        state = accelerator.state
        state.select_deepspeed_plugin("student")
        with pytest.raises(ValueError, match="Make a second one") as raised:
            state.select_deepspeed_plugin("teacher")
        said = str(raised.value)
        assert state.deepspeed_plugin is student
        assert dict(state.deepspeed_plugins) == {"student": student, "teacher": teacher}
        other = Accelerator(strategy=state.get_deepspeed_plugin("teacher"), cpu=True)
        assert other.state.deepspeed_plugin is teacher
    else:
        accelerator, other = Accelerator(strategy="single", cpu=True), Accelerator(strategy="single", cpu=True)
    student, teacher = Player(accelerator, 2), Player(other, 2)
    figures = []
    for step in range(STEPS):
        x = inputs(accelerator, step)
        teacher.optimizer.zero_grad()
        figures += teacher.step((teacher.model(x) - x[:, :2]).square().mean(), None)
        with torch.no_grad():
            target = teacher.model(x)
        student.optimizer.zero_grad()
        figures += student.step((student.model(x) - target).square().mean(), None if named else MAX_NORM / 2)[:1]
    return figures, teacher.weights(), student.weights(), said


def assert_same(rank, found, expected):
    (figures, *weights), (others, *wanted) = found, expected
    torch.testing.assert_close(figures, others)
    if not rank:  # the weights are the main process's
        torch.testing.assert_close(weights, wanted)


@pytest.fixture(scope="module")
def alone():
    return gan("single", "single")


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(gans, 2, PAIRS, timeout=120)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_a_generator_and_its_critic_play_as_in_one_process(alone, ranks, pair):
    assert min(alone[0][1::2]) > MAX_NORM, "clipping changes nothing"
    for rank, found in enumerate(ranks):
        assert_same(rank, found[pair], alone)


def test_configurations_by_name_train_a_student_and_its_teacher():
    *expected, _ = taught(named=False)
    for rank, (*found, said) in enumerate(run_ranks(taught, 2, True)):
        assert_same(rank, found, expected)
        assert "Accelerator(strategy=accelerator.state.get_deepspeed_plugin('teacher'))" in said

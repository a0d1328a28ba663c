"""Two Accelerators in one process: a generator and its critic, each with a strategy and a precision of its own."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_precision import FP16
from accel_testing import run_ranks

STEPS, BATCH, WIDTH = 5, 8, 16
PRECISIONS = {"no": lambda: "no", "bf16": lambda: "bf16", "fp16": lambda: FP16(init_scale=1024.0, growth_interval=2)}
TOLERANCE = {"no": 1e-6, "bf16": 2e-4, "fp16": 2e-5}  # of a loss; sums over ranks are rounded in another order


class Net(nn.Module):
    """From (batch, WIDTH) to (batch, out); it remembers in which dtype its products were."""

    def __init__(self, out):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, out)
        self.seen = None

    def forward(self, x):
        hidden = self.body(x)
        self.seen = hidden.dtype
        return self.head(torch.tanh(hidden))


class Player:
    """A model, its optimizer, and the Accelerator that runs them."""

    def __init__(self, strategy, precision, out):
        self.accelerator = Accelerator(strategy=strategy, mixed_precision=precision, cpu=True)
        torch.manual_seed(out)
        self.model = Net(out)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def step(self, loss):
        """Returns the loss over all ranks, after a step that clips gradients."""
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return self.accelerator.reduce(loss.detach(), "mean").item()

    def told(self):
        return {detail.about: detail.text for detail in self.accelerator.explain().details}


class Played(NamedTuple):
    """The losses of both, whether a step was left out, the dtypes of their products, and what `explain()` said of each."""

    critic: list[float]
    generator: list[float]
    skipped: bool
    dtypes: tuple[torch.dtype, torch.dtype]
    told: tuple[dict[str, str], dict[str, str]]


def play(strategies, precision) -> Played:
    """A generator that learns to please a critic that learns to tell its samples from a sine."""
    generator = Player(strategies[0], PRECISIONS[precision](), WIDTH)
    critic = Player(strategies[1], "no", 1)
    rank, world = generator.accelerator.process_index, generator.accelerator.num_processes
    losses, skipped = ([], []), False
    for step in range(STEPS):
        noise = torch.arange(1.0 * BATCH * WIDTH).view(BATCH, WIDTH).add(step).cos()[rank::world]
        real = torch.arange(1.0 * BATCH * WIDTH).view(BATCH, WIDTH).add(step).sin()[rank::world]
        critic.optimizer.zero_grad()  # also of what the generator's backward has left there
        told_apart = critic.model(generator.model(noise).detach()) - critic.model(real)
        losses[0].append(critic.step(told_apart.sigmoid().mean()))
        generator.optimizer.zero_grad()
        losses[1].append(generator.step(critic.model(generator.model(noise)).sigmoid().mean()))
        skipped |= generator.optimizer.step_was_skipped or critic.optimizer.step_was_skipped
    dtypes = generator.model.seen, critic.model.module.seen if world > 1 else critic.model.seen
    return Played(*losses, skipped, dtypes, (generator.told(), critic.told()))


def play_all(strategies) -> dict[str, Played]:
    return {precision: play(strategies, precision) for precision in PRECISIONS}


@pytest.fixture(scope="module")
def played():
    """What one process, and each of two ranks, saw."""
    return play_all(("single", "single")), run_ranks(play_all, 2, ("fsdp", "ddp"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sharded_generator_and_a_whole_critic_play_as_in_one_process(played, precision):
    alone, ranks = played
    expected = alone[precision]
    assert expected.critic[-1] < expected.critic[0]
    for rank in ranks:
        found = rank[precision]
        assert found.critic == pytest.approx(expected.critic, rel=TOLERANCE[precision])
        assert found.generator == pytest.approx(expected.generator, rel=TOLERANCE[precision])
        assert (found.critic, found.generator) == (ranks[0][precision].critic, ranks[0][precision].generator)
        assert not found.skipped


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_each_keeps_its_own_strategy_and_precision(played, precision, dtype):
    _, ranks = played
    for rank in ranks:
        found = rank[precision]
        generator, critic = found.told
        assert found.dtypes == (dtype, torch.float32)
        assert str(dtype).removeprefix("torch.") in generator["policy"]
        assert "shard 2" in generator["mesh"]
        assert ("scaler" in generator) is (precision == "fp16")
        assert not {"policy", "scaler", "mesh"} & critic.keys()
        assert found.generator != rank["no"].generator

"""Jobs of the checkpoint suite: each trains, saves or loads on the ranks, and returns facts.

Every rank trains on the same batches, so that the mean of its gradients over the ranks is what one
process computes: a checkpoint of one process and one of the strategy describe the same run, and can
be held against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from accel_checkpoint import OF_THIS_PROCESS
from accel_core import CheckpointError
from accel_core.api.checkpoint import names_of
from accel_core.api.component import to_device
from accel_testing import models
from accel_testing.models import FEATURES, LEARNING_RATE, State
from accel_testing.shared_launch import Subject
from accel_testing.training import fed, state_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

BEFORE, AFTER = range(3), range(3, 5)
"""The steps up to a checkpoint, and from there."""

BUFFER = "noted"
OWN, OF_ONE, AGAIN = "of the strategy", "of one process", "of what was taken over"
"""The folders of checkpoints."""


@dataclass(frozen=True)
class CheckpointSubject(Subject):
    """A strategy, and the folder in which its checkpoints are."""

    folder: str = ""

    def path(self, name: str) -> str:
        """The folder of one checkpoint."""
        return f"{self.folder}/{name}"


CheckpointJob = Callable[[CheckpointSubject], Any]


@dataclass(frozen=True)
class Moment:
    """The state of a run at one moment."""

    state: State  # of the model, without the buffer; empty where the main process alone gets it
    noted: float  # the buffer of this rank
    rates: list[float]  # the learning rate of each group, and that of which the scheduler knows
    random: list[float]  # drawn from torch's stream
    tied: bool  # whether the tied parameters are one


@dataclass(frozen=True)
class PlainOptimizer:
    """One process's optimizer: state by "<parameter>/<key>", and the options of its groups."""

    state: State
    groups: list[dict[str, Any]]


class Student(nn.Module):
    """Two layers share a weight, one is frozen; one parameter has one row; a buffer is written."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, FEATURES)
        self.decoder = nn.Linear(FEATURES, FEATURES)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.row = nn.Parameter(torch.ones(1, FEATURES))
        self.head = nn.Linear(FEATURES, 3)
        self.register_buffer(BUFFER, torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, FEATURES) to (batch, 3)."""
        hidden = torch.tanh(self.decoder(torch.tanh(self.encoder(x)))) * self.row
        result: torch.Tensor = self.head(hidden + self.frozen(x))
        return result


def adam(model: nn.Module, rate: float) -> Optimizer:
    """Two groups with options of their own, and a large epsilon: a small one magnifies rounding."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1 * rate}, {"params": others, "lr": rate / 2}]
    return torch.optim.AdamW(groups, lr=rate, eps=1e-3)


def momentum(model: nn.Module, rate: float) -> Optimizer:
    """Another optimizer, with the same groups."""
    groups = [{"params": group["params"]} for group in adam(model, rate).param_groups]
    return torch.optim.SGD(groups, lr=rate, momentum=0.9)


class Session:
    """A prepared student with its optimizer and scheduler."""

    def __init__(
        self,
        subject: Subject,
        seed: int = 0,
        rate: float = LEARNING_RATE,
        make: Callable[[nn.Module, float], Optimizer] = adam,
        steps: int = 1,
    ) -> None:
        self.accelerator = subject.accelerator(gradient_accumulation_steps=steps)
        self.user_model: Any = models.built(Student, seed)
        optimizer = make(self.user_model, rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.user_model, optimizer, scheduler)

    def train(self, steps: Iterable[int]) -> None:
        """Trains on the batches with these numbers, which are the same on every rank."""
        for step in steps:
            with self.accelerator.accumulate(self.model):
                x, y = to_device(models.samples(step * models.ROWS, models.ROWS), self.accelerator.device)
                self.accelerator.backward(F.mse_loss(self.model(x), y))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def note(self) -> None:
        """Writes into the buffer what is another on every rank: one more than the rank."""
        self.student.noted.fill_(self.accelerator.process_index + 1)

    def moment(self) -> Moment:
        """The present state of the run; takes numbers from the random stream."""
        state = state_of(self.accelerator, self.model)
        state.pop(BUFFER, None)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return Moment(
            state=state,
            noted=float(self.student.noted[0]),
            rates=[*rates, *map(float, self.scheduler.get_last_lr())],
            random=torch.rand(2).tolist(),
            tied=self.student.encoder.weight is self.student.decoder.weight,
        )

    def plain_optimizer(self) -> PlainOptimizer:
        """The optimizer's state and options; for one process, with the user's parameters."""
        names = names_of({0: self.user_model})
        state = {
            f"{names[id(parameter)].partition('.')[2]}/{key}": torch.as_tensor(value).detach().cpu().clone()
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }
        left_out = {"params", *OF_THIS_PROCESS}
        groups = [
            {key: value for key, value in group.items() if key not in left_out} for group in self.optimizer.param_groups
        ]
        return PlainOptimizer(state, groups)

    @property
    def student(self) -> Any:
        """The user's model."""
        return self.accelerator.unwrap_model(self.model)


def trained_alone(subject: CheckpointSubject) -> tuple[Moment, PlainOptimizer, Moment]:
    """Where a run in one process stood when saved, with its optimizer, and where it ended."""
    run = Session(subject)
    run.train(BEFORE)
    run.note()
    run.accelerator.save_state(subject.path(OF_ONE))
    at, optimizer = run.moment(), run.plain_optimizer()
    run.train(AFTER)
    return at, optimizer, run.moment()


def resumed(subject: CheckpointSubject) -> tuple[Moment, Moment, Moment, Moment]:
    """A run when it was saved and at its end; another after loading this and at its end."""
    with torch.random.fork_rng(devices=[]):
        run = Session(subject)
        torch.manual_seed(run.accelerator.process_index)
        run.train(BEFORE)
        run.note()
        run.accelerator.save_state(subject.path(OWN))
        at = run.moment()
        run.train(AFTER)
        return at, run.moment(), *_loaded(subject, OWN)


def taken_over(subject: CheckpointSubject) -> tuple[Moment, Moment]:
    """A run that loads the checkpoint of one process: after saving it again, and at its end."""
    with torch.random.fork_rng(devices=[]):
        return _loaded(subject, OF_ONE, AGAIN)


def _loaded(subject: CheckpointSubject, name: str, again: str | None = None) -> tuple[Moment, Moment]:
    run = Session(subject, seed=1, rate=1.0)
    run.train(range(1))  # so that there is a state that has to go
    run.accelerator.load_state(subject.path(name))
    if again is not None:
        run.accelerator.save_state(subject.path(again))
    at = run.moment()
    run.train(AFTER)
    return at, run.moment()


def read_own(subject: CheckpointSubject) -> tuple[Moment, PlainOptimizer, Moment]:
    """In one process: what it read of the checkpoint of the strategy, and where it went on to."""
    return _read(subject, OWN)


def read_again(subject: CheckpointSubject) -> tuple[Moment, PlainOptimizer, Moment]:
    """In one process: what it read of its own state, after the strategy had loaded and saved it."""
    return _read(subject, AGAIN)


def _read(subject: CheckpointSubject, name: str) -> tuple[Moment, PlainOptimizer, Moment]:
    run = Session(subject, seed=1, rate=1.0)
    run.accelerator.load_state(subject.path(name))
    at, optimizer = run.moment(), run.plain_optimizer()
    run.train(AFTER)
    return at, optimizer, run.moment()


WINDOWS = 6
"""Micro-batches in windows of two; the checkpoint is asked for after the third."""


def saved_in_open_window(subject: CheckpointSubject) -> tuple[Moment, Moment] | str:
    """The ends of a run saved in an open window and of one that loaded this; or the refusal."""
    path = subject.path("in a window")
    with torch.random.fork_rng(devices=[]):
        run = Session(subject, steps=2)
        for step in _counted(run, 0):
            run.train([step])
            if step == WINDOWS // 2 - 1:
                try:
                    run.accelerator.save_state(path)
                except CheckpointError as error:
                    return str(error)
        other = Session(subject, seed=1, steps=2)
        other.accelerator.load_state(path)
        for step in _counted(other, WINDOWS // 2):
            other.train([step])
        return run.moment(), other.moment()


def _counted(run: Session, first: int) -> Iterator[int]:
    return (first + index for index in fed(run.accelerator, WINDOWS - first))


def given_another_optimizer(subject: CheckpointSubject) -> tuple[Moment, Moment, str | None]:
    """A run before and after it loads another optimizer's checkpoint, and the refusal."""
    run = Session(subject, seed=1, make=momentum)
    before = run.moment()
    refusal = None
    try:
        run.accelerator.load_state(subject.path(OF_ONE))
    except CheckpointError as error:
        refusal = str(error)
    return before, run.moment(), refusal


ALONE_FIRST: tuple[CheckpointJob, ...] = (trained_alone,)
JOBS: tuple[CheckpointJob, ...] = (resumed, taken_over, saved_in_open_window, given_another_optimizer)
ALONE_LAST: tuple[CheckpointJob, ...] = (read_own, read_again)
"""The jobs of three launches: of one process, of the strategy, and of one process again."""

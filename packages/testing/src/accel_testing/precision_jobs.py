"""The jobs of the precision suite on the ranks: each trains a little and returns what it saw.

Jobs judge nothing; the suite compares their facts with a reference in the test's own process. They
use the public loop, and read off the Accelerator only what no user asks for: its shard, who owns
which hook, and the factor by which a loss is scaled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from accel_core import AutocastKwargs, KwargsHandler, Precision, PrecisionPolicy, load_checkpoint_in_model
from accel_core.api.checkpoint import has_state
from accel_core.api.component import to_device
from accel_testing import models, precision_models
from accel_testing.precision_models import Pupil
from accel_testing.precision_observations import (
    Clipped,
    Description,
    Explained,
    Moment,
    Named,
    Observed,
    Overflow,
    Refused,
    Several,
    SideBySide,
    Trained,
    Unscaled,
)
from accel_testing.shared_launch import Raised, Subject, left_alive, tried
from accel_testing.training import Training, fed, fits, gradients_of, state_of, whole

if TYPE_CHECKING:
    from accel_core import Accelerator
    from accel_testing.models import Gradients, State

STEPS = 6
WINDOWS, SIZE = 3, 2
"""Of accumulation: how many, and of how many micro-batches."""

MAX_NORM = 0.01
SCALING = ("scale_loss", "optimizer_step")


@dataclass(frozen=True)
class PrecisionSubject(Subject):
    """A precision, the strategy under which it is examined, and a folder for checkpoints."""

    precision: str | Callable[[], Precision] = "no"
    folder: str = ""

    def accelerator(self, mixed_precision: str | Precision | None = None, **options: Any) -> Accelerator:
        """An Accelerator with a strategy and, unless one is given, a precision of its own."""
        if mixed_precision is None:
            mixed_precision = self.precision if isinstance(self.precision, str) else self.precision()
        return super().accelerator(mixed_precision, **options)

    def path(self, name: str) -> str:
        """The folder of one checkpoint."""
        return f"{self.folder}/{name}"


PrecisionJob = Callable[[PrecisionSubject], Any]


class Run(Training):
    """A prepared model with its optimizer and scheduler, and the steps of a training loop."""

    def __init__(
        self,
        subject: PrecisionSubject,
        mixed_precision: str | None = None,
        steps: int = 1,
        seed: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        accelerator = accelerator or subject.accelerator(mixed_precision, gradient_accumulation_steps=steps)
        model = models.built(Pupil, seed)
        optimizer = precision_models.sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.01 * step)
        super().__init__(accelerator, model, optimizer)
        self.scheduler = accelerator.prepare(scheduler)

    @property
    def policy(self) -> PrecisionPolicy:
        """The five dtypes."""
        return self.accelerator._parts.precision.policy

    @property
    def scales(self) -> bool:
        """Whether somebody scales losses, or may leave steps out."""
        return any(self.accelerator._parts.activation.owners[hook] is not None for hook in SCALING)

    @property
    def scale(self) -> float:
        """By what a loss is multiplied."""
        one = torch.ones((), device=self.accelerator.device)
        return float(self.accelerator._relay.scale_loss(one))

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def part(self, micro_batch: int) -> models.Batch:
        """This shard's part of a global micro-batch, on the device."""
        return part_of(self.accelerator, micro_batch)

    def backward(self, micro_batch: int, overflows: bool = False) -> float:
        """Forward and backward; returns the loss. `overflows`: one gradient is inf on a shard."""
        x, y = self.part(micro_batch)
        output = self.model(x)
        loss = F.mse_loss(output["logits"].float(), y)
        if overflows:
            last = self.shard.index == self.shard.count - 1
            loss = loss + output["shift"].float().sum() * (float("inf") if last else 0.0)
        self.accelerator.backward(loss)
        return float(loss.detach())

    def step(self, micro_batch: int, overflows: bool = False) -> float:
        """One step of training; returns the loss."""
        loss = self.backward(micro_batch, overflows)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def part_of(accelerator: Accelerator, micro_batch: int) -> models.Batch:
    """The part of a global micro-batch that an Accelerator's shard reads, on its device."""
    batch: models.Batch = to_device(precision_models.part(micro_batch, accelerator._layout.shard), accelerator.device)
    return batch


def described(subject: PrecisionSubject) -> Description:
    """The precision by itself."""
    first, second = (subject.accelerator()._parts.precision for _ in range(2))
    return Description(first.policy, second.policy, tried(lambda: pickle.loads(pickle.dumps(first)).policy))


def observed(subject: PrecisionSubject) -> Observed | Refused:
    """The dtypes that a trained model meets, or the refusal of the policy by its strategy."""
    try:
        run = Run(subject)
    except ValueError as error:
        return Refused(str(error), Raised.by(error).text)
    return _observe(run.accelerator, run.model, run.part(0)[0], trains=True)


def observed_evaluating(subject: PrecisionSubject) -> Observed:
    """The dtypes that a model meets that was prepared for evaluation only."""
    accelerator = subject.accelerator()
    model = accelerator.prepare_model(models.built(Pupil).eval(), evaluation_mode=True)
    with torch.no_grad():
        return _observe(accelerator, model, part_of(accelerator, 0)[0], trains=False)


def _observe(accelerator: Accelerator, model: nn.Module, x: torch.Tensor, trains: bool) -> Observed:
    marks = precision_models.marks_for(x)
    output = model(x, marks=marks)
    pupil: Any = accelerator.unwrap_model(model)
    gradients: Gradients = {}
    if trains:
        accelerator.backward(output["logits"].float().pow(2).mean())
        gradients = gradients_of(accelerator, model)
    return Observed(
        policy=accelerator._parts.precision.policy,
        count=accelerator._layout.shard.count,
        given={"x": x.dtype, **{name: mark.dtype for name, mark in marks.items()}},
        seen=dict(pupil.seen),
        made=dict(pupil.made),
        returned=precision_models.dtypes_of(output),
        parameters={parameter.dtype for parameter in pupil.parameters()},
        gradients={gradient.dtype for gradient in gradients.values()},
        travelled={dtype for dtype in NARROW if all(fits(gradient, dtype) for gradient in gradients.values())},
    )


NARROW = (torch.bfloat16, torch.float16)


def trained(subject: PrecisionSubject) -> Trained:
    """A run of plain steps."""
    run = Run(subject)
    losses, skipped = [], []
    for micro_batch in range(STEPS):
        losses.append(run.step(micro_batch))
        skipped.append(run.accelerator.optimizer_step_was_skipped)
    return Trained(run.shard.index, run.shard.count, losses, skipped, run.state())


def accumulated(subject: PrecisionSubject) -> Trained:
    """A run of windows, with a clipping that unscales and changes nothing else."""
    run = Run(subject, steps=SIZE)
    losses, skipped = [], []
    for micro_batch in fed(run.accelerator, WINDOWS * SIZE):
        with run.accelerator.accumulate(run.model):
            losses.append(run.backward(micro_batch))
            run.accelerator.clip_grad_norm_(run.model.parameters(), float("inf"))
            run.optimizer.step()
            run.optimizer.zero_grad()
            if run.accelerator.sync_gradients:
                skipped.append(run.accelerator.optimizer_step_was_skipped)
    means = [sum(losses[first : first + SIZE]) / SIZE for first in range(0, len(losses), SIZE)]
    return Trained(run.shard.index, run.shard.count, means, skipped, run.state())


def overflowed(subject: PrecisionSubject) -> Overflow:
    """A good step, one that overflows on one rank alone, and another good one."""
    run = Run(subject)
    states, rates, skipped = [], [], []
    for step in range(3):
        run.step(step, overflows=step == 1)
        run.scheduler.step()
        states.append(run.state())
        rates.append(run.rate)
        skipped.append(run.accelerator.optimizer_step_was_skipped)
    return Overflow(run.scales, states, rates, skipped)


def clipped(subject: PrecisionSubject) -> Clipped:
    """Clips without a word about unscaling."""
    run = Run(subject)
    run.backward(0)
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), MAX_NORM)
    return Clipped(run.shard.count, float(whole(norm)), run.gradients())


def unscaled(subject: PrecisionSubject) -> Unscaled:
    """Unscales once, twice, in an open window and at its end."""
    run = Run(subject)
    run.backward(0)
    run.accelerator.unscale_gradients()
    once = run.gradients()
    run.accelerator.unscale_gradients(run.optimizer)
    run.accelerator.clip_grad_norm_(run.model.parameters(), float("inf"))
    twice = run.gradients()
    count, run = run.shard.count, Run(subject, steps=SIZE)
    kept = []
    for micro_batch in fed(run.accelerator, SIZE):
        with run.accelerator.accumulate(run.model):
            run.backward(micro_batch)
            kept.append(run.gradients())
            run.accelerator.unscale_gradients()
            kept.append(run.gradients())
    return Unscaled(count, once, twice, pending=kept[0], untouched=kept[1], closed=kept[3])


def several(subject: PrecisionSubject) -> Several:
    """Two models with an optimizer each, and what single ones do in the same steps."""
    first = Run(subject)
    second = Run(subject, seed=1, accelerator=first.accelerator)
    alone = [Run(subject, seed=seed) for seed in (0, 1)]
    for group in (group for run in (first, second, *alone) for group in run.optimizer.param_groups):
        group["momentum"] = 0.0  # so that an update is as large as the gradient of its step
    unscale, updates = first.accelerator.unscale_gradients, {}
    for step, (moment, unscaled, order) in enumerate(_BY_TURNS):
        before = [run.state() for run in (first, second, *alone)]
        for run in (first, second, *alone):
            run.backward(step)
        for index in unscaled:
            unscale((first, second)[index].optimizer)
        for run in (*((first, second)[index] for index in order), *alone):
            run.optimizer.step()
            run.optimizer.zero_grad()
        sizes = [_distance(run.state(), old) for run, old in zip((first, second, *alone), before, strict=True)]
        if moment:
            updates[moment] = [(sizes[0], sizes[2]), (sizes[1], sizes[3])]
    states = [[run.state() for run in (first, second)]]
    for overflowing in (1, 0, None) if first.scales else ():
        for index, run in enumerate((first, second)):
            run.backward(len(states), overflows=index == overflowing)
        for run in (first, second):
            run.optimizer.step()
            run.optimizer.zero_grad()
        states.append([run.state() for run in (first, second)])
    return Several(updates, states)


_BY_TURNS: tuple[tuple[str, Sequence[int], Sequence[int]], ...] = (
    ("", (), (0, 1)),  # with which a dynamic scale finds its size
    ("one was unscaled, and the other one stepped before it", (0,), (1, 0)),
    ("both were unscaled before the first one stepped", (0, 1), (0, 1)),
)
"""Of each step: what was special, which optimizers are unscaled, and in which order they step."""


def _distance(found: State, expected: State) -> float:
    parts = [(found[name].double() - tensor.double()).norm() for name, tensor in expected.items()]
    return float(torch.stack(parts).norm()) if parts else 0.0


def resumed(subject: PrecisionSubject) -> tuple[Moment, Moment, Moment, Moment]:
    """A run as it was saved, and at its end; the same in a fresh Accelerator that has loaded it."""
    run = Run(subject)
    run.step(0)
    if run.scales:
        run.step(1, overflows=True)  # so that a dynamic scale is not what it began with
    run.step(2)
    run.accelerator.save_state(subject.path("a run"))
    at = _moment(run)
    after = _gone_on(run)
    loaded = Run(subject, seed=1)
    loaded.accelerator.load_state(subject.path("a run"))
    return at, after, _moment(loaded), _gone_on(loaded)


def _gone_on(run: Run) -> Moment:
    run.step(3)
    run.step(4)
    return _moment(run)


def _moment(run: Run) -> Moment:
    precision: Any = run.accelerator._parts.precision
    return Moment(run.state(), run.scale, precision.state_dict() if has_state(precision) else None)


def read_in_full(subject: PrecisionSubject) -> tuple[State, State, float]:
    """The saved state, a plain model's reading of it, and its next loss in full precision."""
    run = Run(subject)
    run.step(0)
    run.accelerator.save_state(subject.path("weights"))
    accelerator = subject.accelerator("no")
    model: Any = models.built(Pupil, 1)
    load_checkpoint_in_model(model, subject.path("weights"))
    read = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model, optimizer = accelerator.prepare(model, precision_models.sgd(model.parameters()))
    x, y = run.part(1)
    loss = F.mse_loss(model(x)["logits"], y)
    accelerator.backward(loss)
    optimizer.step()
    return run.state(), read, float(loss.detach())


ORDERS = ("together with its model", "before its model", "built from the prepared model")


def named(subject: PrecisionSubject) -> Named:
    """Names, who trains, and a copy of the model without the casts."""
    still = {order: _still(subject, order) for order in ORDERS}
    run = Run(subject)
    run.step(0)
    state = list(run.state())
    inner = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    parameters = [name for name, _ in inner.named_parameters()]
    copy = tried(lambda: pickle.loads(pickle.dumps(inner)))
    copied = copy if isinstance(copy, Raised) else (type(copy).__name__, list(copy.state_dict()))
    return Named(parameters, state, still, copied)


def _still(subject: PrecisionSubject, order: str) -> list[str]:
    accelerator = subject.accelerator()
    model: Any = models.built(Pupil)
    if order == ORDERS[2]:
        model = accelerator.prepare(model)
    optimizer = precision_models.sgd(model.parameters())
    if order == ORDERS[0]:
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == ORDERS[1]:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        optimizer = accelerator.prepare(optimizer)
    before = state_of(accelerator, model)
    for step in range(2):
        x, y = part_of(accelerator, step)
        accelerator.backward(F.mse_loss(model(x)["logits"].float(), y))
        optimizer.step()
        optimizer.zero_grad()
    after = state_of(accelerator, model)
    parameters = (name for name, _ in accelerator.unwrap_model(model).named_parameters() if name in after)
    return [name for name in parameters if torch.equal(after[name], before[name])]


def autocast(subject: PrecisionSubject) -> tuple[torch.dtype | None, dict[str, torch.dtype]]:
    """The declared compute dtype, and that of a product inside and around `autocast`."""
    accelerator = subject.accelerator()
    compute = accelerator._parts.precision.policy.compute
    off = AutocastKwargs(enabled=False)
    found = {"before it": _product(accelerator)}
    with accelerator.autocast():
        found["inside"] = _product(accelerator)
        with accelerator.autocast(autocast_handler=off):
            found["switched off inside"] = _product(accelerator)
        found["inside again"] = _product(accelerator)
    found["after it"] = _product(accelerator)
    with accelerator.autocast(autocast_handler=off):
        found["switched off"] = _product(accelerator)
    if compute is not None:  # elsewhere the option has no effect, and says so
        found["switched off for the whole run"] = _product_of_a_run(subject, [off])
    return compute, found


def _product_of_a_run(subject: PrecisionSubject, handlers: Sequence[KwargsHandler]) -> torch.dtype:
    accelerator = subject.accelerator(kwargs_handlers=handlers)
    with accelerator.autocast():
        return _product(accelerator)


def _product(accelerator: Accelerator) -> torch.dtype:
    matrix = torch.ones(2, 2, device=accelerator.device)
    return (matrix @ matrix).dtype


def evaluated(subject: PrecisionSubject) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of training's forward on a batch, and those of evaluations on it."""
    run = Run(subject)
    x, _ = run.part(0)
    expected = run.model(x)["logits"].detach()
    run.model.eval()
    apart = models.built(Pupil).eval()
    apart = run.accelerator.prepare_model(apart, evaluation_mode=True)
    with torch.no_grad():
        found = {"a trained model in eval()": run.model(x)["logits"], "evaluation_mode=True": apart(x)["logits"]}
    return whole(expected), {name: whole(output) for name, output in found.items()}


def explained(subject: PrecisionSubject) -> Explained:
    """The descriptions that a precision and `explain()` give after a step."""
    run = Run(subject)
    run.step(0)
    precision = run.accelerator._parts.precision
    owners = run.accelerator._parts.activation.owners.values()
    owns = any(owner is not None and owner.component is precision for owner in owners)
    return Explained(
        run.policy == PrecisionPolicy() and not owns, dict(precision.details()), str(run.accelerator.explain())
    )


def side_by_side(subject: PrecisionSubject) -> SideBySide:
    """Full precision and this one take steps by turns."""
    single = Run(subject)
    alone = [single.step(step) for step in range(3)]
    full, mine = Run(subject, "no"), Run(subject)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(3):
        for run, found in zip((full, mine), losses, strict=True):
            found.append(run.step(step))
    return SideBySide(single.shard.index, single.shard.count, losses[0], alone, losses[1])


def freed(subject: PrecisionSubject) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What a freed model makes of a batch, and a plain one with its weights; None if sharded."""
    run = Run(subject)
    run.step(0)
    user_model, state, (x, _) = run.user_model, run.state(), run.part(1)
    if not run.accelerator._parts.strategy.replicates_parameters:
        return None
    run.accelerator.free_memory()
    dtype = run.policy.param or torch.float32
    plain: Any = models.built(Pupil, 1).to(x.device, dtype)
    plain.load_state_dict(state)
    with torch.no_grad():
        return whole(user_model(x.to(dtype))["logits"]), whole(plain(x.to(dtype))["logits"])


def released(subject: PrecisionSubject) -> list[str]:
    """The names of objects still alive after the end of a run and its last reference."""
    return left_alive(partial(_ended_run, subject))


def _ended_run(subject: PrecisionSubject) -> dict[str, object]:
    run = Run(subject)
    run.step(0)
    return {**run.end(), "the precision": run.accelerator._parts.precision}


# observed: first, for a strategy may refuse.
JOBS: tuple[PrecisionJob, ...] = (
    observed, described, observed_evaluating, trained, accumulated, overflowed, clipped, unscaled, several, resumed,
    read_in_full, named, autocast, evaluated, explained, side_by_side, freed, released,
)  # fmt: skip
"""The jobs that share a launch: each begins with an Accelerator of its own."""

"""The jobs of the strategy suite on the ranks: each trains a little and returns what it saw.

Jobs judge nothing; the suite compares their facts with a reference in the test's own process. A job
is a function of a `Subject`, at the level of this module because it travels to the ranks by name,
and uses the public loop only, but for what `accel_testing.training` names.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from accel_core import GradientAccumulationPlugin, Precision, PrecisionPolicy, World
from accel_core.api.component import to_device
from accel_testing import models
from accel_testing.models import Gradients, Net, State
from accel_testing.shared_launch import Job, Raised, Subject, left_alive, tried
from accel_testing.training import Training, fed, fits, state_of, whole

if TYPE_CHECKING:
    from accel_core import Accelerator


class Loop(Training):
    """A prepared model, and the steps of a training loop."""

    def __init__(self, subject: Subject, net: Callable[[], nn.Module] = Net, seed: int = 0, **options: Any) -> None:
        accelerator, model = subject.accelerator(**options), models.built(net, seed)
        super().__init__(accelerator, model, models.sgd(_trained(model)))

    def part(self, micro_batch: int) -> models.Batch:
        """This shard's part of a global micro-batch, on the device."""
        return part_of(self.accelerator, micro_batch)

    def loss(self, micro_batch: int) -> torch.Tensor:
        """A forward: the mean over this shard's part of a global micro-batch."""
        x, y = self.part(micro_batch)
        return F.mse_loss(self.model(x), y)

    def backward(self, micro_batch: int) -> None:
        """Forward and backward."""
        self.accelerator.backward(self.loss(micro_batch))

    def train(self, micro_batches: int) -> None:
        """A whole training loop, gated by `accumulate`."""
        for micro_batch in fed(self.accelerator, micro_batches):
            with self.accelerator.accumulate(self.model):
                self.backward(micro_batch)
                self.optimizer.step()
                self.optimizer.zero_grad()


def part_of(accelerator: Accelerator, micro_batch: int) -> models.Batch:
    """The part of a global micro-batch that an Accelerator's shard reads, on its device."""
    batch: models.Batch = to_device(models.part(micro_batch, accelerator._layout.shard), accelerator.device)
    return batch


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def layout(subject: Subject) -> tuple[int, int, int, list[int]]:
    """Rank, shard index, shard count, and the ranks of the data group."""
    accelerator = subject.accelerator()
    found = accelerator._layout
    ranks = list(range(accelerator.num_processes))
    if found.data_group is not None:
        ranks = dist.get_process_group_ranks(found.data_group)
    return accelerator.process_index, found.shard.index, found.shard.count, ranks


def start(subject: Subject) -> State:
    """The state of a model whose weights differ from rank to rank before it is prepared."""
    rank = World.current(cpu=subject.cpu).rank
    return Loop(subject, models.InheritedNet, seed=rank).state()


def surroundings(subject: Subject) -> dict[str, bool]:
    """Whether preparing left random stream, environment and default dtype as they were."""
    accelerator = subject.accelerator()
    model = models.built(Net)
    torch.rand(1)  # so that a stream that was seeded before is no longer at its beginning
    environment, stream, dtype = dict(os.environ), torch.get_rng_state(), torch.get_default_dtype()
    accelerator.prepare(model, models.sgd(model.parameters()))
    return {
        "the environment": dict(os.environ) == environment,
        "torch's random stream": torch.equal(torch.get_rng_state(), stream),
        "torch's default dtype": torch.get_default_dtype() is dtype,
    }


def two_backwards(subject: Subject) -> tuple[int, list[Gradients]]:
    """Shards, and the gradients of two steps."""
    loop = Loop(subject)
    found = []
    for micro_batch in (0, 1):
        loop.backward(micro_batch)
        found.append(loop.gradients())
        loop.optimizer.zero_grad()
    return loop.shard.count, found


def accumulated(subject: Subject) -> tuple[int, list[Gradients]]:
    """Shards, and the gradients of the windows of ten micro-batches by four."""
    return _windows(Loop(subject, gradient_accumulation_steps=4))


def accumulated_in_sync(subject: Subject) -> tuple[int, list[Gradients]]:
    """Shards, and the gradients of windows of four, synchronised at each micro-batch."""
    options = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
    return _windows(Loop(subject, gradient_accumulation_plugin=options))


def accumulated_by_hand(subject: Subject) -> tuple[int, list[Gradients]]:
    """One window of four without `accumulate`, as a plain loop does it."""
    loop = Loop(subject, gradient_accumulation_steps=4)
    for micro_batch in range(4):
        loop.backward(micro_batch)
    return loop.shard.count, [loop.gradients()]


def _windows(loop: Loop) -> tuple[int, list[Gradients]]:
    found = []
    for micro_batch in fed(loop.accelerator, 10):
        with loop.accelerator.accumulate(loop.model):
            loop.backward(micro_batch)
            if loop.accelerator.sync_gradients:
                found.append(loop.gradients())
            loop.optimizer.zero_grad()
    return loop.shard.count, found


def held_back(subject: Subject) -> tuple[int, int, list[Gradients]]:
    """Shard and shards; gradients after a micro-batch inside, half inside and outside `no_sync`."""
    loop = Loop(subject)
    found = []
    with loop.accelerator.no_sync(loop.model):
        loop.backward(0)
        found.append(loop.gradients())
        loss = loop.loss(1)
    loop.accelerator.backward(loss)
    found.append(loop.gradients())
    loop.backward(2)
    return loop.shard.index, loop.shard.count, [*found, loop.gradients()]


def interrupted(subject: Subject) -> tuple[int, list[Gradients]]:
    """Shards, and the gradients of a step after an error has left `no_sync`."""
    loop = Loop(subject)
    with contextlib.suppress(LookupError), loop.accelerator.no_sync(loop.model):
        loop.loss(0)
        raise LookupError("a sample is missing")
    loop.backward(0)
    return loop.shard.count, [loop.gradients()]


def triggered(subject: Subject) -> tuple[int, list[Gradients]]:
    """Shards, and gradients of a backward told to synchronise after a forward inside `no_sync`."""
    loop = Loop(subject)
    with loop.accelerator.no_sync(loop.model):
        loss = loop.loss(0)
    with loop.accelerator.trigger_sync_in_backward(loop.model):
        loop.accelerator.backward(loss)
    return loop.shard.count, [loop.gradients()]


def backward_twice(subject: Subject) -> tuple[int, list[Gradients]]:
    """Shards, and the gradients of two backwards through one graph."""
    loop = Loop(subject)
    loss = loop.loss(0)
    loop.accelerator.backward(loss, retain_graph=True)
    loop.accelerator.backward(loss)
    return loop.shard.count, [loop.gradients()]


def same_token_batches(index: int) -> list[models.TokenBatch]:
    """Three micro-batches for each shard, of unequal weights, one of them fully masked."""
    return [models.token_batch(3 * index + i, rows, (rows - i + index) * (i != 1)) for i, rows in enumerate((4, 3, 5))]


def uneven_token_batches(index: int) -> list[models.TokenBatch]:
    """One micro-batch for the first shard, two for the second, three for the third."""
    return [models.token_batch(10 * index + i, 4, 4 - i) for i in range(index + 1)]


def token_window(subject: Subject) -> tuple[int, Gradients, float]:
    """Shards, gradients and mean loss of `forward_backward`, after another one and a step."""
    loop = Loop(subject, gradient_accumulation_steps=4)
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.0  # the step is to be possible, and to change nothing
    _forward_backward(loop, [models.token_batch(50 + loop.shard.index, 4, 3)])
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loss = _forward_backward(loop, same_token_batches(loop.shard.index))
    return loop.shard.count, loop.gradients(), loss


def uneven_window(subject: Subject) -> tuple[int, Gradients, float]:
    """Shards, gradients and mean loss after two windows whose lengths differ by rank."""
    loop = Loop(subject)
    for _ in range(2):
        loss = _forward_backward(loop, uneven_token_batches(loop.shard.index))
    return loop.shard.count, loop.gradients(), loss


def _forward_backward(loop: Loop, batches: Iterable[models.TokenBatch]) -> float:
    placed = [to_device(batch, loop.accelerator.device) for batch in batches]
    return float(loop.accelerator.forward_backward(loop.model, placed, models.token_loss))


def trained(subject: Subject) -> tuple[int, State]:
    """Shards, and the state after three steps of two micro-batches."""
    loop = Loop(subject, gradient_accumulation_steps=2)
    loop.train(6)
    return loop.shard.count, loop.state()


ORDERS = (
    "model, optimizer and scheduler together",
    "scheduler, optimizer, model",
    "optimizer in an earlier call",
    "optimizer in a later call",
    "optimizer built from the prepared model",
)


def orders(subject: Subject) -> tuple[int, dict[str, State | Raised]]:
    """Shards, and for each order of preparing the state after two steps, or how it was refused."""
    count = subject.accelerator()._layout.shard.count
    found: dict[str, State | Raised] = {}
    for order in ORDERS:
        try:
            found[order] = _trained_after(order, subject)
        except RuntimeError as error:
            found[order] = Raised.by(error)
    return count, found


def _trained_after(order: str, subject: Subject) -> State:
    accelerator = subject.accelerator()
    model = models.built(Net)
    optimizer = models.sgd(model.parameters())
    if order == "optimizer built from the prepared model":
        model = accelerator.prepare(model)
        optimizer = models.sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    if order == "model, optimizer and scheduler together":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    elif order == "scheduler, optimizer, model":
        scheduler, optimizer, model = accelerator.prepare(scheduler, optimizer, model)
    elif order == "optimizer in an earlier call":
        optimizer = accelerator.prepare(optimizer)
        scheduler, model = accelerator.prepare(scheduler, model)
    else:
        model = accelerator.prepare(model)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    for step in range(2):
        x, y = part_of(accelerator, step)
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return state_of(accelerator, model)


def apart(subject: Subject) -> tuple[int, State | Raised]:
    """Shards, and the state after two steps of two optimizers of one model, or how it was refused."""
    accelerator = subject.accelerator()
    net: Any = models.built(Net)

    def train() -> State:
        parts = [models.sgd(part.parameters()) for part in (net.backbone, net.head)]
        model, *optimizers = accelerator.prepare(net, *parts)
        for step in range(2):
            x, y = part_of(accelerator, step)
            accelerator.backward(F.mse_loss(model(x), y))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return state_of(accelerator, model)

    return accelerator._layout.shard.count, tried(train)


MAX_NORM = 0.01
CLIPPED: dict[str, tuple[float, float]] = {
    "all parameters": (MAX_NORM, 2.0),
    "the head": (MAX_NORM, 2.0),
    "a generator": (MAX_NORM, 2.0),
    "beside a frozen backbone": (MAX_NORM, 2.0),
    "by the largest element": (MAX_NORM, math.inf),
    "by a norm that they do not reach": (1000.0, 2.0),
}
"""Choices of what is clipped → `max_norm` and `norm_type`."""


def clipped(subject: Subject) -> tuple[int, dict[str, tuple[float, Gradients] | Raised]]:
    """Shards, and for each choice the norm and the gradients after clipping, or a refusal."""
    found: dict[str, tuple[float, Gradients] | Raised] = {}
    for choice, (max_norm, norm_type) in CLIPPED.items():
        loop = Loop(subject, models.FrozenBackbone if "frozen" in choice else Net)
        loop.backward(0)
        chosen: Any = list(loop.model.parameters())
        if choice == "the head":
            chosen = [value for name, value in loop.model.named_parameters() if "head." in name]
        elif choice == "a generator":
            chosen = (parameter for parameter in loop.model.parameters())
        try:
            norm = loop.accelerator.clip_grad_norm_(chosen, max_norm, norm_type)
        except ValueError as error:
            found[choice] = Raised.by(error)
        else:
            found[choice] = float(whole(norm)), loop.gradients()
    return loop.shard.count, found


def clipped_in_open_window(subject: Subject) -> tuple[Gradients, Gradients]:
    """The gradients before and after clipping while the window is open."""
    loop = Loop(subject, gradient_accumulation_steps=2)
    with loop.accelerator.accumulate(loop.model):
        loop.backward(0)
        before = loop.gradients()
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), MAX_NORM)
        loop.accelerator.clip_grad_value_(loop.model.parameters(), MAX_NORM)
        return before, loop.gradients()


def adversaries(subject: Subject) -> tuple[int, dict[str, tuple[State, State]]]:
    """Shards, and both states after two steps, under one Accelerator and under one each."""
    found = {}
    for arrangement in ("under one Accelerator", "under an Accelerator each"):
        first = subject.accelerator()
        second = first if arrangement == "under one Accelerator" else subject.accelerator()
        generator, critic = models.built(Net), models.built(models.Critic, 1)
        generator, for_generator = first.prepare(generator, models.sgd(generator.parameters()))
        critic, for_critic = second.prepare(critic, models.sgd(critic.parameters()))
        for step in range(2):
            batch = part_of(first, step)
            models.adversarial_step(
                (generator, critic), (for_generator, for_critic), (first.backward, second.backward), batch
            )
        found[arrangement] = state_of(first, generator), state_of(second, critic)
    return first._layout.shard.count, found


def evaluated(subject: Subject) -> dict[str, torch.Tensor | None]:
    """Outputs of a frozen model and, on the main process only, one prepared for evaluation."""
    accelerator = subject.accelerator()
    frozen = accelerator.prepare(models.built(models.NormNet).requires_grad_(False).eval())
    only_evaluated = accelerator.prepare_model(models.built(models.NormNet).eval(), evaluation_mode=True)
    x, _ = models.samples(0, models.ROWS)
    x = x.to(accelerator.device)
    with torch.no_grad():
        return {
            "frozen": whole(frozen(x)),
            "evaluation_mode=True": whole(only_evaluated(x)) if accelerator.is_main_process else None,
        }


def names(subject: Subject) -> dict[str, Any]:
    """Class and names of the unwrapped model, and whether it is the user's."""
    loop = Loop(subject, models.NormNet)
    unwrapped = loop.accelerator.unwrap_model(loop.model)
    return {
        "is the user's": unwrapped is loop.user_model,
        "class": type(loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=False)).__name__,
        "parameters": [name for name, _ in unwrapped.named_parameters()],
        "state": list(loop.state()),
    }


def ties(subject: Subject) -> tuple[int, bool, State]:
    """Shards, whether the tie holds, and the state after two steps."""
    loop = Loop(subject, models.TiedNet)
    loop.train(2)
    model: Any = loop.accelerator.unwrap_model(loop.model)
    return loop.shard.count, model.encoder.weight is model.decoder.weight, loop.state()


def prepared_again(subject: Subject) -> dict[str, bool]:
    """Whether preparing once more gives the same objects."""
    loop = Loop(subject)
    again = loop.accelerator.prepare
    return {
        "the user's model": again(loop.user_model) is loop.model,
        "the prepared model": again(loop.model) is loop.model,
        "the optimizer": again(loop.optimizer) is loop.optimizer,
    }


def buffers(subject: Subject) -> tuple[int, State, State, bool]:
    """BatchNorm's state after two steps and an evaluation, and whether that was finite."""
    loop = Loop(subject, models.NormNet)
    loop.train(2)
    before = loop.state()
    loop.model.eval()
    with torch.no_grad():
        output = loop.model(loop.part(0)[0])
    return loop.shard.count, before, loop.state(), bool(torch.isfinite(output).all())


class _Policy(Precision):
    """A precision that is a policy, and nothing else."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy


POLICIES = {
    "compute": PrecisionPolicy(compute=torch.bfloat16, output=torch.float32),
    "param": PrecisionPolicy(param=torch.bfloat16, input=torch.bfloat16, output=torch.float32),
    "reduce": PrecisionPolicy(reduce=torch.bfloat16),
}


def precisions(subject: Subject) -> tuple[int, dict[str, dict[str, torch.dtype] | Raised]]:
    """Shards, and for each policy the dtypes that were met, or how it was refused."""
    count = subject.accelerator()._layout.shard.count
    found: dict[str, dict[str, torch.dtype] | Raised] = {}
    for name, policy in POLICIES.items():
        try:
            found[name] = _dtypes(subject, policy)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            found[name] = Raised.by(error)
    return count, found


def _dtypes(subject: Subject, policy: PrecisionPolicy) -> dict[str, torch.dtype]:
    loop = Loop(subject, models.ProbeNet, mixed_precision=_Policy(policy))
    x, y = loop.part(0)
    output = loop.model(x, torch.arange(len(x), device=x.device))
    loop.accelerator.backward(F.mse_loss(output.float(), y))
    probe: Any = loop.accelerator.unwrap_model(loop.model)
    travelled = [gradient for gradient in loop.gradients().values() if not fits(gradient, torch.bfloat16)]
    return {
        **probe.seen,
        "output": output.dtype,
        "parameters": next(probe.parameters()).dtype,
        "gradients as they travelled": torch.float32 if travelled else torch.bfloat16,
    }


def released(subject: Subject) -> list[str]:
    """The names of objects still alive after the end of a run and its last reference."""
    return left_alive(partial(_ended_run, subject))


def _ended_run(subject: Subject) -> dict[str, object]:
    loop = Loop(subject)
    loop.train(2)
    return {**loop.end(), "the strategy": loop.accelerator._parts.strategy}


_ALIVE: list[Loop] = []


def left_open(subject: Subject) -> None:
    """Trains, and returns with everything alive and nothing ended, as most scripts end."""
    loop = Loop(subject)
    loop.train(2)
    _ALIVE.append(loop)


# surroundings: before another job has changed what it looks at.
JOBS: tuple[Job, ...] = (
    surroundings, layout, start, two_backwards, accumulated, accumulated_in_sync, accumulated_by_hand, held_back,
    interrupted, triggered, backward_twice, token_window, uneven_window, trained, orders, apart, clipped, clipped_in_open_window,
    adversaries, evaluated, names, ties, prepared_again, buffers, precisions, released,
)  # fmt: skip
"""The jobs that share a launch: each begins with an Accelerator of its own. `left_open` needs one for itself."""

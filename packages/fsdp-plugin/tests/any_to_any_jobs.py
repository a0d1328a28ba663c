"""A run whose every step depends on all that a checkpoint holds, under any strategy; and what ranks do with it."""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accel_checkpoint import gather_entry
from accel_core import DDP, Accelerator, CheckpointError, World
from accel_core.api.component import gather_objects
from accel_fsdp import FSDP
from accel_precision import FP16
from accel_testing import models
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED, extra_memory, leave_no_gaps

WORDS, LENGTH, WIDTH, HEADS = 6, 5, 6, 2
"""Five rows are cut into 3 and 2, or into 2, 2, 1 and none; six by tensor parallelism into twice 3, and these into 2 and 1."""
ROWS, BATCHES = 8, 5  # of a global batch, and of an epoch
BEFORE, AFTER = 3, 4  # steps up to the checkpoint, and from there: into the next epoch

PLAN = {
    "tokens": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_rep",
}
STRATEGIES = {
    "single": lambda: "single",
    "ddp": DDP,
    "fsdp": FSDP,
    "kept": partial(FSDP, reshard_after_forward=False),
    "hybrid": partial(FSDP, replicate=2),
    "tensor": partial(FSDP, tensor_parallel=2, parallelize_plan=PLAN),
    "context": partial(FSDP, context_parallel=2, wrap="none"),
    "in parts": partial(FSDP, reshard_after_forward=2, wrap=["Linear", "Embedding"], cpu_offload=True),
}
PRECISIONS = {
    "no": lambda: "no",
    "fp16": partial(FP16, init_scale=1024.0, growth_interval=2),  # the scale has grown once when it is saved
    "bf16-true": lambda: "bf16-true",
}
MODES = {"kept": "eager", "hybrid": "eager", "fsdp": "lazy", "tensor": "lazy"}
"""How a strategy's checkpoints are written, while the run goes on; those of the others are before it does."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Its head is its embedding. It has parameters of one element and of none, and buffers of both kinds, all of which count."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        self.gate = nn.Parameter(torch.ones(1))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.arange(LENGTH), persistent=False)

    def forward(self, tokens):
        if self.training:
            self.calls += 1
        x = self.tokens(tokens) + self.positions(self.order)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.gate) * self.temperature * (1 + self.calls / 100)


class Notes:
    """Something of the user's."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state):
        self.losses = state["losses"]


class Step(NamedTuple):
    """What one step saw: the numbers of the samples of all ranks, their loss, and the learning rates behind it."""

    samples: list[int]
    loss: float
    rates: list[float]


class Run:
    """A transformer, an AdamW with two groups, a schedule, a loader, and something of the user's; `options` of the Accelerator."""

    def __init__(self, strategy, precision="no", seed=0, lr=0.02, **options):
        self.accelerator = Accelerator(
            strategy=STRATEGIES[strategy](),
            mixed_precision=PRECISIONS[precision](),
            split_batches=True,
            cpu=True,
            **options,
        )
        model = models.built(Transformer, seed)
        model = model.double() if precision == "no" else model
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 5 * lr}, {"params": others, "lr": lr / 2}]
        optimizer = torch.optim.AdamW(groups, lr=lr, eps=1e-4, amsgrad=True)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
        data = torch.arange(ROWS * BATCHES)
        loader = DataLoader(data, ROWS, shuffle=True, generator=torch.Generator().manual_seed(seed))
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.own = self.accelerator.unwrap_model(self.model)
        self.notes = Notes()
        self.accelerator.register_for_checkpointing(self.notes)
        self._batches = self._endless()

    def load(self, folder):
        self.accelerator.load_state(folder)
        self._batches = self._endless()

    def train(self, count):
        """What so many micro-batches saw."""
        return [self._step(numbers) for numbers in itertools.islice(self._batches, count)]

    @torch.no_grad()
    def evaluate(self):
        """The loss of one batch; some strategies have whole parameters behind it."""
        self.model.eval()
        tokens = torch.arange(LENGTH)[None] % WORDS
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        self.model.train()
        return loss.item()

    def state(self):
        """All that a checkpoint brings back, whole, on every rank, by the user's names."""
        return {
            "weights": {name: full(value) for name, value in self.own.state_dict().items()},
            "optimizers": [self._optimizer(each) for each in self.accelerator._run.optimizer_states()],
            "schedule": self.scheduler.last_epoch,
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "scale": self._scale(),
            "notes": self.notes.losses[:],
        }

    def held(self):
        """Of how many parameters there are gradients that have not been stepped."""
        return sum(map(len, self.accelerator._parts.strategy.gradient_state(self.own).values()))

    def is_tied(self):
        """Whether head and embedding are one parameter, in one place."""
        head, tokens = self.own.head.weight, self.own.tokens.weight
        return head is tokens and local(head).data_ptr() == local(tokens).data_ptr()

    def _endless(self):
        while True:
            yield from self.loader

    def _step(self, numbers):
        tokens = (numbers[:, None] * 3 + torch.arange(LENGTH + 1) ** 2) % WORDS
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        mean = self.accelerator.reduce(loss.detach(), "mean").item()
        self.notes.losses.append(mean)
        samples = sorted(self.accelerator.gather_for_metrics(numbers).tolist())
        return Step(samples, mean, [group["lr"] for group in self.optimizer.param_groups])

    def _optimizer(self, state):
        world = World.current(cpu=True)
        values = {name: value for part in gather_objects([state.values], world) for name, value in part.items()}
        tensors = {name: gather_entry(name, entry, world).clone() for name, entry in state.entries.items()}
        # How a process steps is its own: FSDP steps one by one where some parameters are whole.
        groups = [{name: value for name, value in group.items() if name != "foreach"} for group in state.groups]
        return {"kind": state.kind, "groups": groups, "values": values, **tensors}

    def _scale(self):
        precision = self.accelerator._parts.precision
        return precision.state_dict() if hasattr(precision, "state_dict") else None


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    """As torch puts it together, which is not how checkpoints are."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Source(NamedTuple):
    """A checkpoint: the strategy, the number of ranks and the precision that saved it."""

    strategy: str
    world: int
    precision: str = "no"

    def within(self, folder):
        return f"{folder}/{self.strategy}-{self.world}-{self.precision}"


class Case(NamedTuple):
    """A checkpoint, and the strategy and the number of ranks that load it."""

    strategy: str
    world: int
    source: Source


class Saved(NamedTuple):
    """The state at the checkpoint, what the steps behind it saw, and the state in the end."""

    at: dict
    steps: list[Step]
    end: dict


class Loaded(NamedTuple):
    """The same of a run that began with a checkpoint, and whether its ties survived."""

    at: dict
    steps: list[Step]
    end: dict
    tied: bool


def saved_by_ranks(folder, sources):
    """What each source saved, also as weights alone, and where the run that went on came to."""
    found = {}
    for source in sources:
        run = Run(source.strategy, source.precision)
        run.train(BEFORE)
        run.evaluate()
        run.accelerator.save_state(source.within(folder), asynchronous=MODES.get(source.strategy, False))
        at = run.state()
        run.accelerator.save_model(run.model, f"{source.within(folder)}-weights", max_shard_size=1000)
        steps = run.train(AFTER)
        run.accelerator.wait_for_checkpoint()
        found[source] = Saved(at, steps, run.state())
        run.accelerator.free_memory()
    return found


def loaded_by_ranks(folder, cases, relay=None):
    """What came of each checkpoint; and, as the last one, of a relay: (strategy, from, to), half of whose steps are made."""
    found = {}
    for strategy, _, source in cases:
        run = Run(strategy, source.precision, seed=1, lr=0.5)
        run.train(1)  # so that there is state that has to go
        run.evaluate()
        run.load(source.within(folder))
        weights = run.accelerator.get_state_dict(run.model)
        if run.accelerator.is_main_process:
            Transformer().load_state_dict(weights, strict=True)
        at = run.state()
        found[strategy, source] = Loaded(at, run.train(AFTER), run.state(), run.is_tied())
        run.accelerator.free_memory()
    if relay is not None:
        found["relay"] = _passed_on(*relay)
    return found


def _passed_on(strategy, source, target):
    run = Run(strategy, seed=1, lr=0.5)
    run.load(source)
    steps = run.train(AFTER // 2)
    if target is not None:
        run.accelerator.save_state(target)
    run.accelerator.free_memory()
    return steps


# Windows of accumulation

STEPS = 2  # micro-batches of a window


class Windows(NamedTuple):
    """What saving inside a window says, of how many parameters gradients are held then, and what comes behind a load.

    Args:
        said: the error.
        held: before the load.
        kept: after it.
        inside: what steps saw, and the state in the end, of a run that loaded inside a window.
        fresh: the same of one that had not trained.
    """

    said: str
    held: int
    kept: int
    inside: tuple[list[Step], dict]
    fresh: tuple[list[Step], dict]


def in_windows(folder, strategy):
    """Saves at the end of a window and inside the next one, and loads there."""
    run = Run(strategy, gradient_accumulation_steps=STEPS)
    run.train(STEPS)
    run.accelerator.save_state(folder)
    run.train(1)
    said = "nothing was raised"
    try:
        run.accelerator.save_state(f"{folder} in a window")
    except CheckpointError as error:
        said = str(error)
    held = run.held()
    run.evaluate()
    run.load(folder)
    kept = run.held()
    inside = run.train(2 * STEPS), run.state()
    fresh = Run(strategy, seed=1, gradient_accumulation_steps=STEPS)
    fresh.load(folder)
    return Windows(said, held, kept, inside, (fresh.train(2 * STEPS), fresh.state()))


# A rank that is killed


def killed_in_a_save(folder):
    """Rank 1 is killed in the middle of a write of the second save into a folder; the other one cannot end it."""
    run = Run("fsdp")
    run.train(1)
    run.accelerator.save_state(folder)
    run.train(1)
    if run.accelerator.process_index == 1:
        write = os.write

        def write_half(descriptor, data):
            write(descriptor, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        os.write = write_half
    run.accelerator.save_state(folder)


def behind_a_kill(folder):
    """What the next step sees, after the last checkpoint is loaded; and what it sees in a run that nothing interrupted."""
    run = Run("fsdp", seed=1)
    run.load(folder)
    resumed = run.train(1)
    run.accelerator.save_state(folder)
    run.load(folder)
    assert run.notes.losses[-1] == resumed[-1].loss
    return resumed, Run("fsdp").train(2)[1:]


# Memory

SIZE, LAYERS = 1024, 6
WEIGHT = 4 * SIZE * SIZE  # bytes


def deep(size):
    """An accelerator, and under it a model, with an AdamW that keeps twice as much."""
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(LAYERS)))
    accelerator = Accelerator(strategy="fsdp", cpu=True)
    called, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=False))
    accelerator.backward(called(torch.ones(1, size)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, called


def memory(folder):
    """Bytes that saving and loading took beside what is trained; and that a copy of the parameters takes."""
    leave_no_gaps()
    small, _ = deep(8)
    small.save_state(f"{folder}/small")  # imports
    small.load_state(f"{folder}/small")
    large, model = deep(SIZE)
    saving = extra_memory(lambda: large.save_state(f"{folder}/large"))
    loading = extra_memory(lambda: large.load_state(f"{folder}/large"))
    copying = extra_memory(lambda: [parameter.detach().clone() for parameter in model.parameters()])
    for each in (small, large):
        each.free_memory()
    return saving, loading, copying


def on_two_ranks(folder):
    """All of these, and the memory first."""
    facts = {"memory": memory(f"{folder}/memory")} if PEAKS_ARE_MEASURED else {}
    facts["kill"] = behind_a_kill(f"{folder}/killed")
    facts.update((strategy, in_windows(f"{folder}/{strategy}", strategy)) for strategy in ("fsdp", "kept"))
    return facts

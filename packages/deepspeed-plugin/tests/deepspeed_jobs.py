"""A run whose every step depends on all that a checkpoint holds, under any strategy and stage; and what ranks do with it."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from accel_core import DDP, Accelerator
from accel_deepspeed import DeepSpeed
from accel_fsdp import FSDP

WORDS, WIDTH, LENGTH, ROWS = 7, 6, 5, 4
"""Odd sizes: groups are padded, and parameters lie across the border of two partitions."""

STRATEGIES = {
    "single": lambda: "single",
    "ddp": DDP,
    "fsdp": FSDP,
    **{f"zero{stage}": partial(DeepSpeed, zero_stage=stage) for stage in range(4)},
}


class Net(nn.Module):
    """Tied weights, a frozen layer, buffers, and parameters of one element."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        self.gate = nn.Parameter(torch.ones(1))
        self.temperature = nn.Parameter(torch.full((1,), 1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        hidden = self.tokens(x)
        hidden = hidden + self.gate * self.frozen(hidden)
        return self.head(self.norm(hidden + self.block(hidden))) * self.temperature


class Run:
    """One training, built from a seed of its own: what it finds is what it was loaded with."""

    def __init__(self, strategy, seed=0, **options):
        chosen = STRATEGIES[strategy]() if isinstance(strategy, str) else strategy
        self.accelerator = Accelerator(strategy=chosen, cpu=True, **options)
        torch.manual_seed(seed)
        net = Net()
        decayed = [each for each in net.parameters() if each.dim() > 1 and each.requires_grad]
        others = [each for each in net.parameters() if each.dim() < 2 and each.requires_grad]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
        self.net, self.optimizer, scheduler = self.accelerator.prepare(net, optimizer, StepLR(optimizer, 2, 0.5))
        self.scheduler = scheduler

    def train(self, first, count=1):
        """Steps number `first` and following, each by a global batch of its own."""
        for number in range(first, first + count):
            batch = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(number))
            shard, share = self.accelerator.process_index, ROWS // self.accelerator.num_processes
            batch = batch[shard * share : (shard + 1) * share]
            logits = self.net(batch[:, :-1])
            self.accelerator.backward(F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def state(self):
        """The weights and buffers, whole; the schedule."""
        weights = {name: each.clone() for name, each in self.accelerator.get_state_dict(self.net).items()}
        return weights, self.scheduler.last_epoch, [group["lr"] for group in self.optimizer.param_groups]

    def end(self):
        self.accelerator.wait_for_checkpoint()
        self.accelerator.free_memory()


def legs(folder, strategies, first):
    """Each leg loads what the one before has saved, trains one step, and saves. Gives what was loaded, and what came of it."""
    found = []
    for number, strategy in enumerate(strategies, first):
        run = Run(strategy, seed=number)
        if number:
            run.accelerator.load_state(f"{folder}/{number - 1}")
        loaded = run.state()
        run.train(number)
        run.accelerator.save_state(f"{folder}/{number}")
        found.append((strategy, loaded, run.state()))
        run.end()
    return found


def saved_behind(folder, strategy):
    """What a run was when it saved, and what a new one loads, while the first one went on; and how far it came."""
    found = {}
    for mode in ("eager", "lazy"):
        run = Run(strategy)
        run.train(0, 2)
        then = run.state()
        run.accelerator.save_state(f"{folder}/{strategy}-{mode}", asynchronous=mode)
        run.train(2, 3)
        after = run.state()
        run.end()
        other = Run(strategy, seed=1)
        other.accelerator.load_state(f"{folder}/{strategy}-{mode}")
        loaded = other.state()
        other.train(2, 3)
        found[mode] = then, loaded, after, other.state()
        other.end()
    return found


def all_saved_behind(folder):
    return {strategy: saved_behind(folder, strategy) for strategy in ("zero1", "zero2", "zero3")}


def saved_by(folder, strategies):
    """Checkpoints of two steps, and what a third one makes of them."""
    found = {}
    for strategy in strategies:
        run = Run(strategy)
        run.train(0, 2)
        run.accelerator.save_state(f"{folder}/{strategy}@{run.accelerator.num_processes}")
        found[strategy] = run.state()
        run.end()
    return found


def loaded_by(folder, strategies, sources):
    """What each strategy finds in each checkpoint, and what a third step makes of it."""
    found = {}
    for strategy in strategies:
        for source in sources:
            run = Run(strategy, seed=1)
            run.accelerator.load_state(f"{folder}/{source}")
            loaded = run.state()
            run.train(2)
            found[strategy, source] = loaded, run.state()
            run.end()
    return found

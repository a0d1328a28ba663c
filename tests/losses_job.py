"""Trains the same small transformer on the same data under any strategy and precision, and returns what each step saw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accel_core import DDP, Accelerator, set_seed
from accel_fsdp import FSDP
from accel_precision import FP16

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 16, 32, 4
GLOBAL_BATCH, ACCUMULATION, STEPS = 8, 2, 6

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
STRATEGIES = {
    "single": lambda: "single",
    "ddp": DDP,
    "fsdp": FSDP,
    "hybrid": lambda: FSDP(replicate=2),
    "tensor": lambda: FSDP(tensor_parallel=2, parallelize_plan=PLAN),
}
PRECISIONS = {"no": lambda: "no", "bf16": lambda: "bf16", "fp16": lambda: FP16(init_scale=1024.0)}


class Trained(NamedTuple):
    """Loss and gradient norm of every step, the last learning rate, and what `explain()` said."""

    losses: list[float]
    norms: list[float]
    rate: float
    told: dict[str, str]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """From ids (batch, length) to logits (batch, length, VOCABULARY); the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.2)

    def forward(self, ids):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequences():
    """As many as STEPS windows need: each id is the one before, plus one."""
    start = torch.arange(GLOBAL_BATCH * ACCUMULATION * STEPS)[:, None]
    return (start * 7 + torch.arange(LENGTH)) % VOCABULARY


def train(strategy, precision) -> Trained:
    """What `STEPS` optimizer steps see. Every rank gives the same answer."""
    accelerator = Accelerator(
        strategy=STRATEGIES[strategy](),
        mixed_precision=PRECISIONS[precision](),
        gradient_accumulation_steps=ACCUMULATION,
        split_batches=True,
        cpu=True,
    )
    set_seed(3)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
    loader = DataLoader(sequences(), batch_size=GLOBAL_BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses, norms, window = [], [], []
    for ids in loader:
        with accelerator.accumulate(model):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            accelerator.backward(loss)
            window.append(loss.detach())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                losses.append(accelerator.reduce(torch.stack(window).mean(), "mean").item())
                window.clear()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    told = {detail.about: detail.text for detail in accelerator.explain().details}
    return Trained(losses, norms, optimizer.param_groups[0]["lr"], told)


def train_all(strategies) -> dict[tuple[str, str], Trained]:
    """Every precision under each of these strategies, one after the other in one launch."""
    return {(strategy, precision): train(strategy, precision) for strategy in strategies for precision in PRECISIONS}

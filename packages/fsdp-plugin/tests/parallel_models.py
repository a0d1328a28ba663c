"""A small transformer whose layers can be cut, data for it, and what one process makes of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, FEATURES, HEADS, LENGTH = 12, 32, 4, 8
HEAD_SIZE = FEATURES // HEADS


class Attention(nn.Module):
    """It lets torch count the heads, so it works on any part of them."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.query = nn.Linear(FEATURES, FEATURES)
        self.key = nn.Linear(FEATURES, FEATURES, bias=False)
        self.value = nn.Linear(FEATURES, FEATURES, bias=False)
        self.norm = nn.LayerNorm(HEAD_SIZE)
        self.output = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        query, key, value = (layer(x).unflatten(-1, (-1, HEAD_SIZE)) for layer in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in (self.norm(query), key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.before = nn.LayerNorm(FEATURES)
        self.attention = Attention(causal)
        self.between = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """(batch, length) tokens, and their positions, to (batch, length, VOCABULARY) logits."""

    def __init__(self, causal=(True, True), tied=True):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, FEATURES)
        nn.init.normal_(self.tokens.weight, std=0.1)  # it is the head's too, and logits are to be small
        self.positions = nn.Embedding(LENGTH, FEATURES)
        self.blocks = nn.ModuleList(Block(each) for each in causal)
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "tokens": "embedding_rowwise",
    "blocks.*.before": "sequence",
    "blocks.*.between": "sequence_parallel",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.up": "colwise_gather_output",
    "blocks.0.down": "rowwise_rep",
    "blocks.1.down": "rowwise_split_input",
    "head": "colwise_rep",
}
"""All the words in all their spellings, and two layers that stay whole."""


def make_model(seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(**options)


def make_batches(count, rows=4):
    """`count` global batches of tokens, labels that follow them, and positions."""
    drawn = torch.randint(VOCABULARY, (count, rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(rows, LENGTH)
    return [(batch[:, :-1], batch[:, 1:], positions) for batch in drawn]


def mean_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gradients_of(model):
    """By name, whole, on every rank."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: grad for name, grad in found.items() if grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}


def reference(model, batches, max_norm=1.0, lr=0.1, momentum=0.0):
    """(loss, norm, clipped gradients) of each step of SGD in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    steps = []
    for tokens, labels, positions in batches:
        loss = mean_loss(model(tokens, positions), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        steps.append((loss.item(), norm.item(), {name: each.clone() for name, each in gradients_of(model).items()}))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def counted_loss(logits, batch):
    """(sum, weight) over the labels below 9 only: every part counts another number of them."""
    counted = batch[1] < 9
    return F.cross_entropy(logits[counted], batch[1][counted], reduction="sum"), counted.sum()


def reference_window(model, batches):
    """Gradients of the mean over micro-batches; (mean over counted labels, its gradients)."""
    for tokens, labels, positions in batches:
        (mean_loss(model(tokens, positions), labels) / len(batches)).backward()
    mean = {name: each.clone() for name, each in gradients_of(model).items()}
    model.zero_grad()
    parts = [counted_loss(model(batch[0], batch[2]), batch) for batch in batches]
    loss = sum(part for part, _ in parts) / sum(weight for _, weight in parts)
    loss.backward()
    return mean, loss.item(), gradients_of(model)

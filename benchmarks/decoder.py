"""A decoder of plain blocks, shaped like a Llama: what rows B1 and B2 load and run; its files, and its expected output."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, HEADS, VOCABULARY = 16, 8, 4096
FILES = 4
BATCH, LENGTH = 1, 16


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm, without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        inner = width * 11 // 4
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of and to (batch, length, width)."""
        normed = self.before(x)
        q, k, v = (each(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Token ids (batch, length) → logits (batch, length, vocabulary)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of each next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def width_of(size: int) -> int:
    """The width by which the fp32 weights take about `size` MiB."""
    width = HEADS * 8
    while LAYERS * 12.25 * width**2 + 2 * VOCABULARY * width < size * 2**18:
        width += HEADS * 8
    return width


def tokens() -> torch.Tensor:
    """The input of every forward."""
    return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 37 % VOCABULARY


HALVES: dict[str, tuple[str | int, str | int]] = {
    "cpu": ("cpu", "cpu"),
    "half": ("cpu", "disk"),
    "disk": ("disk", "disk"),
    "device": (0, 0),
    "device_cpu": (0, "cpu"),
    "device_disk": (0, "disk"),
}
"""Where the first half of the blocks is, and the second. Those with a device run there."""


def places(where: str) -> dict[str, str | int]:
    """A device map, by a name of `HALVES`. One norm is never on disk: a peer refuses a map to the disk alone."""
    sooner, later = HALVES[where]
    blocks = {f"blocks.{index}": sooner if index < LAYERS // 2 else later for index in range(LAYERS)}
    return {"embedding": sooner, **blocks, "norm": "cpu" if sooner == "disk" else sooner, "head": later}


def write(folder: Path, size: int) -> None:
    """Writes weights of `size` MiB as safetensors, in several files with an index."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = Decoder(width_of(size)).state_dict()
    names = list(state)
    step = -(-len(names) // FILES)
    parts = {f"model-{at // step:05}.safetensors": names[at : at + step] for at in range(0, len(names), step)}
    for part, held in parts.items():
        save_file({name: state[name] for name in held}, folder / part, {"format": "pt"})
    weight_map = {name: part for part, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def bytes_at(place: str | int, width: int, places: dict[str, str | int]) -> int:
    """Of the weights that a device map has there."""
    with torch.device("meta"):
        named = Decoder(width).named_parameters()
    kept = tuple(f"{module}." for module, its in places.items() if its == place)
    return sum(each.nbytes for name, each in named if name.startswith(kept))

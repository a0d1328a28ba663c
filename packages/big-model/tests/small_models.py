"""Models of a few weights, and the ways in which tests of several files build and load them."""

from __future__ import annotations

import torch
from torch import nn

from accel_big_model import init_empty_weights, load_checkpoint_and_dispatch

IDS = torch.tensor([1, 5, 10, 0])


class Net(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.norm = norm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, scale=None):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        x = self.head(self.norm(x))
        return x if scale is None else x * scale


class Small(nn.Module):
    """The same with one block, whose statistics are buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.middle(self.embedding(ids)))


def seeded(build, seed=3):
    """A model of the same weights each time, for evaluation."""
    torch.manual_seed(seed)
    return build().eval()


def empty(build):
    """A model without memory."""
    with init_empty_weights():
        return build()


def loaded(build, files, device_map, **options):
    """A model that is built without memory, and filled from files in the places of a map."""
    return load_checkpoint_and_dispatch(empty(build), files, device_map=device_map, **options)

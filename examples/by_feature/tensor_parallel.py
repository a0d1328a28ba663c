"""Tensor parallelism: processes share each layer, and compute parts of its output together, on the same batch.

    python examples/by_feature/tensor_parallel.py
    accel launch --num-processes 2 examples/by_feature/tensor_parallel.py
    accel launch --num-processes 8 examples/by_feature/tensor_parallel.py --peers 4    # two shards of the data, of four peers each

The loss is the same in all of them. Peers talk in every layer, so they belong on one machine.
"""

import argparse
from itertools import islice

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, World, set_seed
from accel_fsdp import FSDP

WIDTH, HEAD = 64, 8  # features, and those of one head of attention

PLAN = {
    "blocks.*.query": "colwise",  # each peer computes some of the heads, …
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",  # … and what they contribute is summed here
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        normed = self.norms[0](x)
        # -1 counts the heads: a peer has only some of them.
        heads = [
            layer(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        x = x + self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Net(nn.Module):
    """Reads a picture of 8 × 8 pixels row by row."""

    def __init__(self):
        super().__init__()
        self.row, self.place = nn.Linear(8, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.row(x.view(-1, 8, 8)) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def main():
    parser = argparse.ArgumentParser(description="Cuts each layer over peers.")
    parser.add_argument("--peers", type=int, help="processes that share a layer; all of them, if it is not given")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    peers = options.peers or World.current().size
    strategy = FSDP(tensor_parallel=peers, parallelize_plan=PLAN if peers > 1 else None)
    accelerator = Accelerator(strategy=strategy, split_batches=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 32, shuffle=True))

    for x, y in islice(loader, options.steps):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    loss = accelerator.reduce(loss.detach(), "mean").item()
    heads = model.blocks[0].query.weight.to_local().shape[0] // HEAD
    accelerator.print(f"{heads} of {WIDTH // HEAD} heads in this process, loss {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Context parallelism: processes share each long sequence, and every token attends to all of it.

python examples/by_feature/context_parallel.py
accel launch --num-processes 2 examples/by_feature/context_parallel.py
accel launch --num-processes 8 examples/by_feature/context_parallel.py --peers 4   # two shards of the data, of four peers each
accel launch --num-processes 2 --ddp examples/by_feature/context_parallel.py --peers 1     # to compare: the loss is the same
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accel_core import Accelerator, World, set_seed
from accel_fsdp import FSDP

LENGTH, WIDTH = 128, 64  # bytes of a sequence: a multiple of twice the number of peers


class Net(nn.Module):
    """From bytes and their positions, both (batch, length), to the logits of each next byte (batch, length, 256)."""

    def __init__(self):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens, positions):
        x = self.byte(tokens) + self.position(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, -1)).permute(2, 0, 3, 1, 4)
        # Under this name: that is the call which becomes one over all peers.
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def main():
    parser = argparse.ArgumentParser(description="Shares each sequence out over peers.")
    parser.add_argument("--peers", type=int, help="processes that share a sequence; all of them, if it is not given")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    set_seed(1)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # a text that every Python has: its own source
    data = text[: 256 * (LENGTH + 1)].view(-1, LENGTH + 1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    accelerator = Accelerator(strategy=FSDP(context_parallel=options.peers or World.current().size), split_batches=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 16, shuffle=True, drop_last=True))

    for epoch in range(options.epochs):
        for rows in loader:
            tokens, targets = rows[:, :-1].clone(), rows[:, 1:].clone()  # shifted before they are cut
            positions = torch.arange(LENGTH, device=rows.device).expand_as(tokens).clone()
            with accelerator.maybe_context_parallel([tokens, targets, positions], [1, 1, 1]):
                here = tokens.shape[1]  # each process has a part of every sequence
                loss = F.cross_entropy(model(tokens, positions).transpose(1, 2), targets)
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        loss = accelerator.reduce(loss.detach(), "mean").item()
        if epoch == 0:
            accelerator.print(f"first epoch {loss:.4f}")
    accelerator.print(f"{here} of {LENGTH} bytes in this process, last epoch {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

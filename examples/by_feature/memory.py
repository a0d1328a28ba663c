"""Memory: the batch size is found that fits, by trying smaller ones.

`find_executable_batch_size` calls the function again with nine tenths of the size when memory runs out, in all processes together.
On a machine without a limit that this script could reach, --room stands for one: a batch of more pictures runs out of memory.

    python examples/by_feature/memory.py --room 400
    accel launch --num-processes 2 examples/by_feature/memory.py --room 400
    accel launch --num-processes 8 examples/by_feature/memory.py --batch-size 100000
    accel launch --num-processes 2 --fsdp examples/by_feature/memory.py --room 400
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, find_executable_batch_size, set_seed


class Net(nn.Sequential):
    """A model that has room for so many pictures."""

    def __init__(self, room):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.room = room

    def forward(self, x):
        if len(x) > self.room:
            raise torch.OutOfMemoryError(f"no room for {len(x)} pictures")
        return super().forward(x)


def main():
    parser = argparse.ArgumentParser(description="Finds the batch size that fits.")
    parser.add_argument("--batch-size", type=int, default=512, help="of one process; the first to try")
    parser.add_argument("--room", type=float, default=math.inf, metavar="PICTURES", help="run out of memory with more")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    accelerator = Accelerator()  # outside of the function: the processes stay
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    tried = []

    @find_executable_batch_size(starting_batch_size=options.batch_size)
    def train(batch_size):
        """Begins from its first line with each size: all that depends on the size is made in here."""
        tried.append(batch_size)
        accelerator.free_memory()  # what the last attempt had prepared
        set_seed(1)
        model = Net(options.room)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size, shuffle=True)
        )
        for _ in range(options.epochs):
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean").item()

    loss = train()
    accelerator.print(f"tried {tried}, loss {loss:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

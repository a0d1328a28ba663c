"""A step of a small model with blocks, as a script that `accel launch` starts: prints whether the loss became smaller."""

import torch
from torch import nn

from accel_core import Accelerator


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*(Block() for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    losses = []
    for _ in range(2):
        losses.append(model(torch.ones(2, 16)).square().mean())
        accelerator.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    smaller = losses[1].item() < losses[0].item()
    # In one piece: what is printed in pieces gets mixed with that of the other processes.
    print(f"{accelerator.num_processes} {accelerator.distributed_type} {smaller}\n", end="")
    accelerator.end_training()


if __name__ == "__main__":
    main()

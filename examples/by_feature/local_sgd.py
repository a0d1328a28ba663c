"""Local SGD: processes train by themselves for some steps, and then average their parameters, where the network is slow.

    python examples/by_feature/local_sgd.py
    accel launch --num-processes 2 examples/by_feature/local_sgd.py --every 8
    accel launch --num-processes 8 examples/by_feature/local_sgd.py --every 4
    accel launch --num-processes 2 --ddp examples/by_feature/local_sgd.py --every 0     # gradients in every step, to compare

It needs whole parameters in every process: `--fsdp` is refused. In one process the block does nothing.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, LocalSGD, set_seed


def spread(accelerator, model):
    """How far apart the processes are: the largest difference between parameters on any two of them."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = accelerator.gather(flat[None])
    return (every.amax(0) - every.amin(0)).max().item()


def main():
    parser = argparse.ArgumentParser(description="Averages parameters every few steps, instead of gradients in each.")
    parser.add_argument("--every", type=int, default=8, help="steps between two averages; 0 averages gradients instead")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    accelerator = Accelerator(split_batches=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    widest, together = 0.0, 0  # to show what happens; a real loop would not ask
    with LocalSGD(accelerator, model, local_sgd_steps=options.every or 1, enabled=options.every > 0) as local_sgd:
        for _ in range(options.epochs):
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
                apart = spread(accelerator, model)
                widest, together = max(widest, apart), together + (apart == 0)

    loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"apart by {widest:.4f} at most, together behind {together} steps, loss {loss:.3f}")
    accelerator.print(f"apart by {spread(accelerator, model):g} in the end")
    accelerator.end_training()


if __name__ == "__main__":
    main()

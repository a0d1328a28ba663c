"""Gradient accumulation: a large batch in small pieces, which gives the gradient of the large batch.

The global batch is --batch-size × --accumulation × processes. Runs with the same product take the same steps: the last line, the
loss, is the same for all of these, up to rounding.

    python examples/by_feature/gradient_accumulation.py --batch-size 64 --accumulation 1
    python examples/by_feature/gradient_accumulation.py --batch-size 8 --accumulation 8
    accel launch --num-processes 2 examples/by_feature/gradient_accumulation.py --batch-size 8 --accumulation 4
    accel launch --num-processes 8 examples/by_feature/gradient_accumulation.py --batch-size 4 --accumulation 2
    accel launch --num-processes 2 --fsdp examples/by_feature/gradient_accumulation.py --batch-size 8 --accumulation 4
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, set_seed


def main():
    parser = argparse.ArgumentParser(description="Trains on small batches as on a large one.")
    parser.add_argument("--batch-size", type=int, default=8, help="pictures in a batch of one process")
    parser.add_argument("--accumulation", type=int, default=8, help="batches in an optimizer step")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)  # 1,797 pictures of 8 × 8 pixels
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    loader = DataLoader(data, options.batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulation)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = 0
    for _ in range(options.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()  # these two do nothing until the last batch of the window
                optimizer.zero_grad()
            steps += accelerator.sync_gradients  # that was a real step

    with torch.no_grad():
        x, y = (tensor.to(accelerator.device) for tensor in data.tensors)
        loss = cross_entropy(model(x), y).item()
    accelerator.print(
        f"batch of {options.batch_size * options.accumulation * accelerator.num_processes}, {steps} steps"
    )
    accelerator.print(f"loss {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

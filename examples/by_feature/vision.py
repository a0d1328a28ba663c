"""Vision: a convolutional network with BatchNorm, augmented pictures, and an accuracy that counts every picture once.

The batch is that of all processes together, so a run in two processes takes as many steps as a run in one.

    python examples/by_feature/vision.py
    accel launch --num-processes 2 examples/by_feature/vision.py
    accel launch --num-processes 8 examples/by_feature/vision.py --workers 2
    accel launch --num-processes 2 --fsdp --bf16 examples/by_feature/vision.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from accel_core import Accelerator, set_seed


class Digits(Dataset):
    """Pictures (1, 8, 8) and the digits that they show; moved by a pixel at random, to train on."""

    def __init__(self, pixels, digits, augment=False):
        self.pixels, self.digits, self.augment = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, digits, augment

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        picture = self.pixels[index]
        if self.augment:
            picture = picture.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(1, 2))
        return picture, self.digits[index]


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description="Classifies pictures of digits.")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, for each that trains")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    train_loader = DataLoader(Digits(pixels[360:], digits[360:], True), 64, shuffle=True, num_workers=options.workers)
    test_loader = DataLoader(Digits(pixels[:360], digits[:360]), 50)  # the last batch is not full
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    # The batch of 64 is that of all processes together. sync_batch_norm would average statistics over processes.
    accelerator = Accelerator(split_batches=True)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    steps = options.epochs * len(train_loader)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=steps))

    for epoch in range(options.epochs):
        model.train()
        for x, y in train_loader:
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = torch.cat([accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in test_loader])
        accelerator.print(f"epoch {epoch}: {right.sum()} of {len(right)} right, accuracy {right.float().mean():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

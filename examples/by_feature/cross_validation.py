"""Cross-validation: one Accelerator, a new model for each fold, and every sample predicted once by a model that never saw it.

A fold ends with `free_memory`: what it had prepared would stay in memory, and in checkpoints.

    python examples/by_feature/cross_validation.py
    accel launch --num-processes 2 examples/by_feature/cross_validation.py
    accel launch --num-processes 8 examples/by_feature/cross_validation.py --folds 10
    accel launch --num-processes 2 --fsdp examples/by_feature/cross_validation.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from accel_core import Accelerator, set_seed


def main():
    parser = argparse.ArgumentParser(
        description="Trains a model for each fold, and predicts what it was not trained on."
    )
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    accelerator = Accelerator(split_batches=True)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    folds = StratifiedKFold(options.folds, shuffle=True, random_state=1).split(pixels, digits)

    predicted, labels = [], []
    for fold, (train, held_out) in enumerate(folds):
        set_seed(fold)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        model, optimizer, train_loader, test_loader = accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            DataLoader(Subset(data, train.tolist()), 64, shuffle=True),
            DataLoader(Subset(data, held_out.tolist()), 64),
        )
        for _ in range(options.epochs):
            for x, y in train_loader:
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for x, y in test_loader:  # 599 pictures: the last batch is filled up, and the filling is not counted
                classes, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
                predicted.append(classes)
                labels.append(y)
        # Forgets the fold: its model and optimizer would stay in memory, and in a checkpoint.
        model, optimizer, train_loader, test_loader = accelerator.free_memory(
            model, optimizer, train_loader, test_loader
        )

    right = torch.cat(predicted) == torch.cat(labels)
    accelerator.print(f"{len(right)} predictions of {options.folds} models, accuracy {right.float().mean():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

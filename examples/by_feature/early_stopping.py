"""Early stopping: one process decides, and all of them stop at the same step.

A process that leaves the loop alone would leave the others waiting in their next collective. `set_trigger` notes the wish of one
process, whichever it is, and `check_trigger`, called by all, gives all the same answer.

    python examples/by_feature/early_stopping.py
    accel launch --num-processes 2 examples/by_feature/early_stopping.py
    accel launch --num-processes 8 examples/by_feature/early_stopping.py --patience 5
    accel launch --num-processes 2 --fsdp examples/by_feature/early_stopping.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_core import Accelerator, set_seed


class Patience:
    """Says when a loss has not become better for some evaluations."""

    def __init__(self, evaluations):
        self.evaluations, self.best, self.worse = evaluations, float("inf"), 0

    def is_over(self, loss):
        self.worse = 0 if loss < self.best else self.worse + 1
        self.best = min(self.best, loss)
        return self.worse >= self.evaluations


def main():
    parser = argparse.ArgumentParser(description="Stops when the validation loss rises.")
    parser.add_argument("--patience", type=int, default=2, help="evaluations without a better loss")
    parser.add_argument("--epochs", type=int, default=100, help="at most")
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    train_set, valid_set = random_split(data, [1400, 397])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    accelerator = Accelerator(split_batches=True)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, 128, shuffle=True), DataLoader(valid_set, 128)
    )
    patience, epochs = Patience(options.patience), 0

    while epochs < options.epochs:
        epochs += 1
        for x, y in train_loader:
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [
                accelerator.gather_for_metrics(cross_entropy(model(x), y, reduction="none")) for x, y in valid_loader
            ]
        # One process looks at the curve. It could as well be another one, or each at its own.
        if accelerator.is_last_process and patience.is_over(torch.cat(losses).mean().item()):
            accelerator.set_trigger()
        if accelerator.check_trigger():  # on all processes, each time
            break

    stopped = accelerator.gather(torch.tensor(epochs, device=accelerator.device)).tolist()
    accelerator.print(f"stopped after epochs {stopped}, of at most {options.epochs}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

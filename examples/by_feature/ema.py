"""EMA: an exponential moving average of the weights, which evaluates better than the weights of the last step.

The copy is prepared like the model: it is laid out in the same way where that is sharded, and checkpoints hold it.

    python examples/by_feature/ema.py
    accel launch --num-processes 2 examples/by_feature/ema.py
    accel launch --num-processes 8 examples/by_feature/ema.py --decay 0.99
    accel launch --num-processes 2 --fsdp examples/by_feature/ema.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel_core import Accelerator, set_seed


def main():
    parser = argparse.ArgumentParser(description="Keeps an average of the weights, and evaluates it.")
    parser.add_argument("--decay", type=float, default=0.98, help="what stays of the average in each step")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    train_set, test_set = random_split(data, [1437, 360])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # Copied before prepare, and prepared too: it is laid out like the model, also where that is sharded, and checkpoints hold it.
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.decay))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # large, of small batches: the weights jump

    accelerator = Accelerator(split_batches=True)
    model, average, optimizer, train_loader, test_loader = accelerator.prepare(
        model, average, optimizer, DataLoader(train_set, 8, shuffle=True), DataLoader(test_set, 64)
    )

    @torch.no_grad()
    def evaluate(model):
        losses = [accelerator.gather_for_metrics(cross_entropy(model(x), y, reduction="none")) for x, y in test_loader]
        return torch.cat(losses).mean().item()

    for _ in range(options.epochs):
        for x, y in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # where the optimizer stepped, and not in every micro-batch
                average.update_parameters(model)

    accelerator.print(f"loss {evaluate(model):.4f}, of the average {evaluate(average):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

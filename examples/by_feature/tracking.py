"""Tracking: curves, a table and pictures of a run, in whatever the people who look at it use.

`jsonl` writes a plain file and needs nothing else. Others are chosen by name, several at once, in the script or from outside.

    python examples/by_feature/tracking.py
    python examples/by_feature/tracking.py --log-with tensorboard && tensorboard --logdir out
    accel launch --num-processes 2 examples/by_feature/tracking.py --log-with wandb
    accel launch --num-processes 8 examples/by_feature/tracking.py --log-with jsonl tensorboard
    accel launch --num-processes 2 --fsdp examples/by_feature/tracking.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, Histogram, set_seed


def main():
    parser = argparse.ArgumentParser(description="Records curves, a table and pictures.")
    parser.add_argument(
        "--log-with", nargs="+", default=["jsonl"], metavar="TRACKER", help="jsonl, tensorboard, wandb, …"
    )
    parser.add_argument("--out", default="out", metavar="DIR", help="folder of trackers that write files")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    loader = DataLoader(data, 64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    accelerator = Accelerator(log_with=options.log_with, project_dir=options.out, split_batches=True)
    accelerator.init_trackers("digits", config=options)  # names the run, and stores how it was started
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, table = 0, []
    for epoch in range(options.epochs):
        right = []
        for x, y in loader:
            output = model(x)
            loss = cross_entropy(output, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            right.append(accelerator.gather_for_metrics(output.argmax(1) == y))
            # All processes call log, and the main process records. reduce makes it the loss of all of them.
            accelerator.log({"train": {"loss": accelerator.reduce(loss.detach(), "mean")}}, step=step)
        accuracy = torch.cat(right).float().mean().item()
        table.append([epoch, accuracy])
        accelerator.log({"train": {"accuracy": accuracy}, "last outputs": Histogram(output.detach().cpu())}, step=step)
        accelerator.log_images({"pictures": x[:4].view(-1, 1, 8, 8)}, step=step)
    accelerator.log_table("accuracy by epoch", columns=["epoch", "accuracy"], data=table, step=step)

    accelerator.print(f"{step} steps recorded by {', '.join(accelerator.log_with)}, accuracy {accuracy:.3f}")
    accelerator.end_training()  # returns when all is recorded


if __name__ == "__main__":
    main()

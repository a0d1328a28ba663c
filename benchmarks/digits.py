"""The training that convergence.py starts: scikit-learn's handwritten digits, with a batch of the same size in every world.

It writes the loss of each step, and how many of the digits that it did not train on it reads correctly. It can be told to kill itself in
the middle of a step, in all processes, and to go on from what it saved.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, set_seed

BATCH, TRAINED = 64, 1408  # rows of a step in all processes together, and of an epoch: 22 steps
LEARNING_RATE = 2e-3


class Curve:
    """The loss of each step so far: a checkpoint holds it beside what is prepared."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, object]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.losses = list(state["losses"])


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1408 rows to train on and 389 others: 64 grey values from 0 to 1, and the digit."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return TensorDataset(x[:TRAINED], y[:TRAINED]), TensorDataset(x[TRAINED:], y[TRAINED:])


def network() -> nn.Module:
    """From 64 grey values to the logits of ten digits."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.LayerNorm(128),
        nn.GELU(),
        nn.Linear(128, 128),
        nn.LayerNorm(128),
        nn.GELU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The part of the rows whose digit is found; every row counts once."""
    model.eval()
    right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in loader]
    return torch.cat(right).float().mean().item()


def main() -> None:
    options = arguments()
    set_seed(1)
    accelerator = Accelerator(
        cpu=True, strategy=options.strategy, mixed_precision=options.precision, split_batches=True
    )
    train, test = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    loaders = DataLoader(train, BATCH, shuffle=True), DataLoader(test, BATCH)
    model, optimizer, scheduler, loader, tested = accelerator.prepare(model, optimizer, scheduler, *loaders)
    curve = Curve()
    accelerator.register_for_checkpointing(curve)
    if options.resume:
        accelerator.load_state(options.checkpoint)
    begun = len(curve.losses)
    while len(curve.losses) < options.steps:
        for x, y in loader:
            loss = F.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            if len(curve.losses) == options.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            curve.losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(curve.losses) == options.save:
                accelerator.save_state(options.checkpoint)
            if len(curve.losses) == options.steps:
                break
    found = {
        "begun": begun,
        "losses": curve.losses,
        "accuracy": accuracy(accelerator, model, tested),
        "world": accelerator.num_processes,
    }
    if accelerator.is_main_process:
        options.out.write_text(json.dumps(found), encoding="utf-8")
    accelerator.end_training()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits.")
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--precision", default="no")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--save", type=int, help="the step behind which it saves")
    parser.add_argument("--checkpoint", type=Path, help="where to")
    parser.add_argument("--kill", type=int, help="SIGKILL to all processes, in the step behind so many")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="where the losses are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()

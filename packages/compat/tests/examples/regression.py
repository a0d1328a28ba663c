"""The line that the smaller examples learn, and their arguments."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset


def loaders(rows=88, batch_size=4):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 1, generator=generator)
    targets = 2 * inputs + 3 + 0.1 * torch.randn(rows, 1, generator=generator)
    data = TensorDataset(inputs, targets)
    return DataLoader(data, batch_size=batch_size, shuffle=True), DataLoader(data, batch_size=batch_size)


def model_and_optimizer(lr=0.1):
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def parser():
    found = argparse.ArgumentParser()
    found.add_argument("--cpu", action="store_true")
    found.add_argument("--mixed_precision", type=str, default=None)
    found.add_argument("--output_dir", type=str, default=".")
    found.add_argument("--resume_from_checkpoint", type=str, default=None)
    found.add_argument("--checkpointing_steps", type=str, default=None)
    found.add_argument("--gradient_accumulation_steps", type=int, default=1)
    found.add_argument("--local_sgd_steps", type=int, default=4)
    return found

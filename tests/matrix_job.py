"""Trains with whatever is installed and compares the weights with plain torch in one process.

`nox -s matrix` runs it from wheels in worlds of one and two. Without a loader plugin a larger world must refuse to prepare
a loader, and trains with a sampler of its own.
"""

from __future__ import annotations

from importlib import metadata

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_core import Accelerator
from accel_core.errors import NotInstalledError

BATCH, SAMPLES = 4, 32


def dataset():
    inputs = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)
    return TensorDataset(inputs, 3 * inputs - 1)


def model_and_optimizer():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, loader, backward, device):
    for inputs, targets in loader:
        optimizer.zero_grad()
        backward(torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)))
        optimizer.step()


def prepared_loader(accelerator, loader_plugins):
    """What each rank reads: its part of batches of BATCH times the world."""
    loader = DataLoader(dataset(), batch_size=BATCH)
    if loader_plugins or accelerator.num_processes == 1:
        return accelerator.prepare(loader)
    try:
        accelerator.prepare(loader)
    except NotInstalledError as error:
        assert "pip install" in str(error), error
    else:
        raise AssertionError("without a loader plugin, prepare(loader) let all ranks read the same batches")
    sampler = DistributedSampler(dataset(), accelerator.num_processes, accelerator.process_index, shuffle=False)
    return DataLoader(dataset(), batch_size=BATCH, sampler=sampler)


def main():
    plugins = sorted(point.name for point in metadata.entry_points(group="accel.loaders"))
    accelerator = Accelerator()
    loader = prepared_loader(accelerator, plugins)
    original, optimizer = model_and_optimizer()
    model, optimizer = accelerator.prepare(original, optimizer)
    train(model, optimizer, loader, accelerator.backward, accelerator.device)

    reference, its_optimizer = model_and_optimizer()
    whole = DataLoader(dataset(), batch_size=BATCH * accelerator.num_processes)
    train(reference, its_optimizer, whole, torch.Tensor.backward, "cpu")
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        torch.testing.assert_close(
            parameter.detach().cpu(), reference.get_parameter(name).detach(), atol=1e-6, rtol=1e-5
        )
    accelerator.print(f"world of {accelerator.num_processes}, loader plugins {plugins}: trained as plain torch does")
    accelerator.end_training()


if __name__ == "__main__":
    main()

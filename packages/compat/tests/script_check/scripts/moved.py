"""A script that has moved: it imports accel_core, and nothing is to be said. Never run, only read."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator, GradientAccumulationPlugin, get_logger
from accel_data import DataLoaderConfiguration

logger = get_logger(__name__)


def plain_loop(model, optimizer, loader):
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main(steps, epochs):
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(64, 4), batch_size=8)
    print(len(loader), "batches in all")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs * math.ceil(len(loader) / steps))
    scheduler = accelerator.prepare(scheduler)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.save_model(model, "weights")
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
    with torch.no_grad():
        accelerator.unwrap_model(model)(torch.randn(1, 4))

"""A small training script as users write it: it saves and resumes, or does so with a fault that its argument names."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accel_core import Accelerator, ProjectConfiguration, set_seed

STEPS, ROWS = 10, 24


class Counter:
    """How many steps were made."""

    def __init__(self):
        self.step, self.seconds = 0, 0.0

    def state_dict(self):
        return {"step": self.step, "seconds": self.seconds}

    def load_state_dict(self, state):
        self.step, self.seconds = state["step"], state["seconds"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    fault = options.fault
    set_seed(os.getpid() if fault == "unseeded" else 1)
    project = ProjectConfiguration(options.save, automatic_checkpoint_naming=True)
    accelerator = Accelerator(split_batches=True, project_config=project)
    norm = [torch.nn.BatchNorm1d(8)] if fault == "batch norm" else []
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), *norm, torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    data = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(3))
    noise = torch.Generator().manual_seed(5)
    augment = (lambda rows: torch.stack(rows) + torch.randn(4, generator=noise)) if fault == "augmentation" else None
    loader = DataLoader(data, 4, shuffle=True, collate_fn=augment)
    counter = Counter()
    model = accelerator.prepare(model)
    if fault != "optimizer":
        optimizer = accelerator.prepare(optimizer)
    if fault not in {"scheduler", "optimizer"}:
        scheduler = accelerator.prepare(scheduler)
    if fault not in {"order", "weights only"}:
        loader = accelerator.prepare(loader)
    accelerator.register_for_checkpointing(counter)
    if options.resume and fault == "weights only":
        model.load_state_dict(torch.load(options.save / "model.pt", weights_only=True))
    elif options.resume and fault == "crash":
        raise RuntimeError("the folder is of another run")
    elif options.resume and fault != "fresh":
        accelerator.load_state()
    if fault == "late schedule":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    began = time.perf_counter()
    while counter.step < STEPS:
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.step += 1
            counter.seconds = accelerator.reduce(torch.tensor(time.perf_counter() - began), "mean").item()
            if counter.step % 4 == 0 and fault == "weights only":
                options.save.mkdir(exist_ok=True)
                accelerator.save(model.state_dict(), options.save / "model.pt")
            elif counter.step % 4 == 0:
                accelerator.save_state()
            if counter.step == STEPS:
                break


if __name__ == "__main__":
    main()

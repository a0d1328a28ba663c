"""Profiling: some steps of a run, recorded by torch's profiler, as a table and as a file for a viewer of traces.

    python examples/by_feature/profiling.py --traces traces
    accel launch --num-processes 2 examples/by_feature/profiling.py
    accel launch --num-processes 8 examples/by_feature/profiling.py --active 5
    accel launch --num-processes 2 --fsdp examples/by_feature/profiling.py

Open `traces/profile_0.json` in https://ui.perfetto.dev or chrome://tracing. There is a file for each process.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ProfileKwargs, set_seed


def main():
    parser = argparse.ArgumentParser(description="Profiles some steps.")
    parser.add_argument("--traces", default="traces", metavar="DIR", help="a new folder for the traces of this run")
    parser.add_argument("--active", type=int, default=3, help="steps that are recorded")
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    accelerator = Accelerator(split_batches=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    handler = ProfileKwargs(
        schedule_option={"wait": 2, "warmup": 1, "active": options.active, "repeat": 1},  # in steps
        record_shapes=True,
        output_trace_dir=options.traces,
    )
    with accelerator.profile(handler) as profiler:
        for x, y in loader:
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()

    averages = profiler.key_averages()
    accelerator.print(averages.table(sort_by="cpu_time_total", row_limit=8))
    products = next(event.count for event in averages if event.key == "aten::addmm")
    accelerator.print(f"{products} calls of aten::addmm in {options.active} of {len(loader)} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()

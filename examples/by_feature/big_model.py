"""Inference with a model that does not fit: parts of it in the memory of accelerators and of the host, the rest on disk.

A model is built without memory, a device map says where each part goes, and weights that are elsewhere are brought for each call.
In several processes each answers a part of the questions, with a model of its own.

    python examples/by_feature/big_model.py --memory 300KB
    accel launch --num-processes 2 examples/by_feature/big_model.py --memory 300KB
    accel launch --num-processes 8 examples/by_feature/big_model.py --questions 64
    accel launch --num-processes 2 --cpu examples/by_feature/big_model.py
"""

import argparse

import torch
from torch import nn

from accel_big_model import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accel_core import Accelerator, set_seed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build():
    return nn.Sequential(*(Block() for _ in range(8)), nn.Linear(64, 10))


def main():
    parser = argparse.ArgumentParser(description="Runs a model that does not fit.")
    parser.add_argument(
        "--memory", default="300KB", help="what the model may take in the memory of the host: 300KB, 20GiB"
    )
    parser.add_argument("--questions", type=int, default=11, help="rows of the input")
    parser.add_argument(
        "--weights", default="out/weights", metavar="DIR", help="folder of the weights, which this script writes"
    )
    options = parser.parse_args()

    accelerator = Accelerator()
    set_seed(1)
    reference = build()
    questions = torch.randn(options.questions, 64)
    accelerator.save_model(reference, options.weights)  # stands for weights that are there already

    with init_empty_weights():
        model = build()  # shapes and dtypes; no memory
    limits = {"cpu": options.memory}
    if accelerator.device.type != "cpu":
        limits[accelerator.device.index] = "600KB"  # of the accelerator of this process
    places = infer_auto_device_map(model, limits, no_split_module_classes=["Block"])  # a block is one piece
    model = load_checkpoint_and_dispatch(model, options.weights, device_map=places)

    with accelerator.split_between_processes(questions) as part, torch.no_grad():
        answers = model(part)
    answers = accelerator.gather(answers.to(accelerator.device)).cpu()  # parts may differ by one row

    with torch.no_grad():
        error = (answers - reference(questions)).abs().max()
    counts = {place: list(places.values()).count(place) for place in dict.fromkeys(places.values())}
    accelerator.print(f"places {counts}, {len(answers)} answers, off by {error:.0e} at most")
    accelerator.end_training()


if __name__ == "__main__":
    main()

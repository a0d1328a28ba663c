"""Compiling: torch.compile for every model that is prepared; of a deep model, one block for all that are equal.

A model of equal blocks is compiled block by block with `use_regional_compilation`, and equal ones once: the time that it takes does not
grow with the depth. `inductor` makes machine code, and needs a C++ compiler on the CPU; `eager` and `aot_eager` only trace.

    python examples/by_feature/compilation.py --backend eager
    accel launch --num-processes 2 examples/by_feature/compilation.py
    accel launch --num-processes 8 examples/by_feature/compilation.py --whole
    accel launch --num-processes 2 --fsdp examples/by_feature/compilation.py
    accel launch --dynamo-backend inductor train.py            # without a line in the script
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch._dynamo import lookup_backend
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, TorchDynamoPlugin, set_seed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.stem, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)  # so that all blocks are alike: one whose input needs no gradient is another graph
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser(description="Compiles a model.")
    parser.add_argument("--backend", default="inductor", help="inductor, aot_eager, eager; no: do not compile")
    parser.add_argument("--whole", action="store_true", help="compile the model as one, instead of its blocks")
    parser.add_argument("--depth", type=int, default=8, help="blocks")
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    model = Net(options.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    graphs = []

    def counted(graph, inputs):  # a backend is a function; a name such as "inductor" is one that torch knows
        graphs.append(graph)
        return lookup_backend(options.backend)(graph, inputs)

    backend = "no" if options.backend == "no" else counted
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=not options.whole)
    accelerator = Accelerator(dynamo_plugin=plugin, split_batches=True)
    loader = DataLoader(data, 64, shuffle=True, drop_last=True)  # batches of one size: another one is compiled again
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    began, seconds = time.perf_counter(), []
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)

    loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(
        f"first step {seconds[0]:.2f} s, then {(seconds[-1] - seconds[0]) / (len(seconds) - 1):.4f} s each"
    )
    operations = sum(node.op.startswith("call") for graph in graphs for node in graph.graph.nodes)
    accelerator.print(f"{operations} operations in {len(graphs)} graphs for {options.depth} blocks, loss {loss:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

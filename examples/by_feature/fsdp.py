"""FSDP: each process has a part of every parameter, of its gradient, and of what the optimizer keeps for it.

    python examples/by_feature/fsdp.py
    accel launch --num-processes 2 examples/by_feature/fsdp.py
    accel launch --num-processes 8 examples/by_feature/fsdp.py --activation-checkpointing --cpu-offload
    accel launch --num-processes 8 examples/by_feature/fsdp.py --replicate 2           # sharded over four, in two copies
    accel launch --num-processes 2 --ddp examples/by_feature/fsdp.py --strategy ddp    # to compare: the loss is the same

Any script is sharded from outside, by `accel launch --fsdp`, `--strategy fsdp` or a file; this one shows the options in code.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, set_seed
from accel_fsdp import FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser(description="Shards a model over all processes.")
    parser.add_argument(
        "--strategy", choices=["fsdp", "ddp", "single"], default="fsdp", help="the others are for comparison"
    )
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="compute activations again in the backward"
    )
    parser.add_argument("--cpu-offload", action="store_true", help="keep parameters in the memory of the host")
    parser.add_argument("--replicate", type=int, default=1, help="copies of the sharded model: hybrid sharding")
    parser.add_argument("--out", default="out", metavar="DIR", help="folder of the weights")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))

    strategy = options.strategy
    if strategy == "fsdp":
        strategy = FSDP(
            wrap=["Block"],  # the units: gathered, computed with, and let go of, one at a time
            activation_checkpointing=options.activation_checkpointing,
            cpu_offload=options.cpu_offload,
            replicate=options.replicate,
        )
    accelerator = Accelerator(strategy=strategy, split_batches=True)
    model = accelerator.build_model(Net)  # without data until prepare, where each process gets its part
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 64, shuffle=True, drop_last=True))

    for _ in range(options.epochs):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the whole gradient
            optimizer.step()
            optimizer.zero_grad()

    accelerator.save_model(model, options.out)  # whole weights, under the names of Net, for any library
    here = sum(getattr(parameter, "to_local", lambda p=parameter: p)().numel() for parameter in model.parameters())
    loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"{here} of {whole} parameters in this process, loss {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

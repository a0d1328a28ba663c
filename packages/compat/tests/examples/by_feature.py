"""A script that names no engine: the launcher's options say which one. Prints what came out, and saves full weights."""

import os

import torch
import torch.nn.functional as F
from regression import parser
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed


class Block(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.second(torch.relu(self.first(hidden)))


def training_function(args):
    accelerator = Accelerator()
    set_seed(42)
    inputs = torch.randn(48, 16, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if accelerator.distributed_type == DistributedType.FSDP:
        accelerator.print(f"sharded by {accelerator.state.fsdp_plugin.auto_wrap_policy.__class__.__name__}")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(4):
        for batch, targets in loader:
            loss = F.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    assert losses[-1] < losses[0], losses
    state = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.path.join(args.output_dir, "saved"))
    if accelerator.is_main_process:
        assert sorted(state) == sorted(
            f"{block}.{layer}.{kind}"
            for block in (0, 1)
            for layer in ("first", "second")
            for kind in ("bias", "weight")
        )
    accelerator.print(
        f"{accelerator.distributed_type} {accelerator.num_processes}: {losses[0]:.5f} to {losses[-1]:.5f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    training_function(parser().parse_args())
